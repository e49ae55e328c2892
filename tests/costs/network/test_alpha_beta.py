"""Collectives on a topology, against figures worked out by hand and against published
measurements.
"""

from dataclasses import replace

import pytest

from apsched.costs.clusters.cluster import cluster_names, load_cluster
from apsched.costs.network.alpha_beta import (
    GroupShape,
    bus_bandwidth_gb_per_s,
    collective_us,
    group_shape,
)
from apsched.errors import InputError
from apsched.kinds import PRICED_KINDS

H100 = load_cluster("h100")
GIB = 1 << 30


def test_shapes_follow_from_ranks_numbered_node_by_node() -> None:
    assert group_shape(H100, 64) == GroupShape(num_ranks=64, num_nodes=8, ranks_per_node=8)
    assert group_shape(H100, range(0, 64, 8)) == GroupShape(
        num_ranks=8, num_nodes=8, ranks_per_node=1
    )
    assert group_shape(H100, [8, 9, 10, 11]) == GroupShape(
        num_ranks=4, num_nodes=1, ranks_per_node=4
    )
    assert group_shape(H100, 12) == GroupShape(num_ranks=12, num_nodes=2, ranks_per_node=4)
    for bad in (0, [], [1, 1], [-1, 0]):
        with pytest.raises(InputError, match="distinct process ranks"):
            group_shape(H100, bad)


def test_bus_bandwidth_is_nvlink_or_all_nics_of_the_group() -> None:
    """8 NICs of 47 GB/s are 376 GB/s, above the ring's 360; 4 are 188; a rank alone on its node has
    one.
    """
    assert bus_bandwidth_gb_per_s(H100, group_shape(H100, 8)) == 360.0
    assert bus_bandwidth_gb_per_s(H100, group_shape(H100, 64)) == 360.0
    assert bus_bandwidth_gb_per_s(
        H100, group_shape(H100, [*range(4), *range(8, 12)])
    ) == pytest.approx(188)
    assert bus_bandwidth_gb_per_s(H100, group_shape(H100, range(0, 64, 8))) == pytest.approx(47)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_large_gather_on_64_ranks_by_hand(kind: str) -> None:
    """Ring, Simple: 8.4 + 56 hops of 3.4 + 7 of 14 us, then 63/64 of the bytes at 360 GB/s."""
    expected = 8.4 + 56 * 3.4 + 7 * 14.0 + 8 * GIB * 63 / 64 / 360e3
    assert collective_us(H100, kind, group_shape(H100, 64), 8 * GIB) == pytest.approx(expected)


def test_small_gather_on_64_ranks_is_the_latency_of_the_ring() -> None:
    """Ring, LL: 6.6 + 56 * 1.0 (each hop posts to the network's proxy) + 7 * 2.7 = 81.5 us."""
    assert collective_us(H100, "all_gather", group_shape(H100, 64), 0) == pytest.approx(81.5)


def test_all_reduce_by_hand() -> None:
    """Twice the bytes in a ring, of whose 126 steps 16 cross nodes; a tree when small; the switch
    adds up within a node.
    """
    ring_us = 8.4 + 110 * 3.4 + 16 * 14.0 + 2 * 8 * GIB * 63 / 64 / 360e3
    assert collective_us(H100, "all_reduce", group_shape(H100, 64), 8 * GIB) == pytest.approx(
        ring_us
    )
    alone_us = 8.4 + 14 * 14.0 + 2 * 8 * GIB * 7 / 8 / 47e3
    assert collective_us(
        H100, "all_reduce", group_shape(H100, range(0, 64, 8)), 8 * GIB
    ) == pytest.approx(alone_us)
    assert collective_us(H100, "all_reduce", group_shape(H100, 64), 0) == pytest.approx(
        6.8 + 2 * 7 * 0.6 + 2 * 3 * 5.0
    )
    assert collective_us(H100, "all_reduce", group_shape(H100, 8), 8 * GIB) == pytest.approx(
        25 + 8 * GIB * 14 / 8 / 479e3
    )


def test_all_to_all_is_bound_by_the_rank_s_own_nic() -> None:
    """64 ranks: 56/64 of the bytes leave through a 47 GB/s NIC; within a node all go over
    NVLink.
    """
    latency_us = 8.4 + 7 * 3.4 + 7 * 14.0
    assert collective_us(H100, "all_to_all", group_shape(H100, 64), 8 * GIB) == pytest.approx(
        latency_us + 8 * GIB * 56 / 64 / 47e3
    )
    assert collective_us(H100, "all_to_all", group_shape(H100, 8), 8 * GIB) == pytest.approx(
        8.4 + 7 * 3.4 + 8 * GIB * 7 / 8 / 360e3
    )


def test_a_slow_link_raises_the_latency_of_each_hop() -> None:
    slow = replace(H100, inter_node=replace(H100.inter_node, latency_us=20.0))
    assert collective_us(slow, "all_gather", group_shape(slow, 64), 0) == pytest.approx(
        6.6 + 56 * 1.0 + 7 * 20.0
    )


def test_an_all_reduce_on_two_nodes_is_added_up_by_their_switches() -> None:
    """The switches take 8/14 of 479 GB/s, less than eight NICs of 47 carry: 25 us, 2 hops of 14,
    and no gain from the ring beyond.
    """
    expected_us = 25 + 2 * 14.0 + 8 * GIB / (479e3 * 8 / 14)
    assert collective_us(H100, "all_reduce", group_shape(H100, 16), 8 * GIB) == pytest.approx(
        expected_us
    )
    narrow = replace(H100, inter_node=replace(H100.inter_node, gbit_per_s_per_rank=200.0))
    assert collective_us(narrow, "all_reduce", group_shape(H100, 16), 8 * GIB) == pytest.approx(
        25 + 2 * 14.0 + 8 * GIB / (8 * 23.5e3)
    )


def test_trees_fall_short_at_medium_sizes_and_on_many_nodes() -> None:
    """4 MiB on 32 ranks of 4 nodes: LL128 tree, 14 hops of 1.25 and 4 of 8.5 us, at half of the
    ring's bandwidth and 0.8 of that.
    """
    expected_us = (
        14 + 14 * 1.25 + 4 * 8.5 + 2 * (4 << 20) * 31 / 32 / (360e3 * 0.5 * 120 / 128 * 0.8)
    )
    assert collective_us(H100, "all_reduce", group_shape(H100, 32), 4 << 20) == pytest.approx(
        expected_us
    )


def test_a_network_without_low_latency_protocols_has_only_simple_across_nodes() -> None:
    efa = load_cluster("h100-efa")
    assert collective_us(efa, "all_gather", group_shape(efa, 64), 0) == pytest.approx(
        8.4 + 56 * 3.4 + 7 * 40.0
    )
    assert collective_us(efa, "all_gather", group_shape(efa, 8), 0) == collective_us(
        H100, "all_gather", group_shape(H100, 8), 0
    )


@pytest.mark.parametrize("name", cluster_names())
@pytest.mark.parametrize("kind", PRICED_KINDS)
@pytest.mark.parametrize("group", [1, 2, 8, 12, 16, 64, 256, range(0, 128, 8)])
def test_time_is_positive_and_never_falls_with_size(name: str, kind: str, group: object) -> None:
    cluster = load_cluster(name)
    shape = group_shape(cluster, group)  # type: ignore[arg-type]
    times = [
        collective_us(cluster, kind, shape, size)
        for size in (0, *(round(2 ** (e / 4)) for e in range(36, 160)))
    ]
    assert times[0] > 0
    assert times == sorted(times)


def test_a_group_of_one_copies_on_the_device() -> None:
    assert collective_us(H100, "all_gather", group_shape(H100, 1), 10**9) == pytest.approx(
        2.0 + 2e9 / (3350e3 * 0.90)
    )


def test_unknown_kinds_and_negative_sizes_are_refused() -> None:
    with pytest.raises(InputError, match=r"found 'allgather' \(did you mean 'all_gather'\?\)"):
        collective_us(H100, "allgather", group_shape(H100, 8), 8)
    with pytest.raises(InputError, match="-1 bytes"):
        collective_us(H100, "all_gather", group_shape(H100, 8), -1)
