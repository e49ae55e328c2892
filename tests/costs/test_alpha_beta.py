"""Collectives on a topology, against figures worked out by hand and against published measurements."""

from dataclasses import replace

import pytest

from apsched.costs.alpha_beta import KINDS, GroupShape, bus_bandwidth_gb_per_s, collective_us, group_shape
from apsched.costs.cluster import cluster_names, load_cluster
from apsched.errors import InputError

H100 = load_cluster("h100")
GIB = 1 << 30


def test_shapes_follow_from_ranks_numbered_node_by_node() -> None:
    assert group_shape(H100, 64) == GroupShape(num_ranks=64, num_nodes=8, ranks_per_node=8)
    assert group_shape(H100, range(0, 64, 8)) == GroupShape(num_ranks=8, num_nodes=8, ranks_per_node=1)
    assert group_shape(H100, [8, 9, 10, 11]) == GroupShape(num_ranks=4, num_nodes=1, ranks_per_node=4)
    assert group_shape(H100, 12) == GroupShape(num_ranks=12, num_nodes=2, ranks_per_node=4)
    for bad in (0, [], [1, 1], [-1, 0]):
        with pytest.raises(InputError, match="distinct process ranks"):
            group_shape(H100, bad)


def test_bus_bandwidth_is_nvlink_or_all_nics_of_the_group() -> None:
    """8 NICs of 47 GB/s are 376 GB/s, above the ring's 370.8; 4 are 188; a rank alone on its node has one."""
    assert bus_bandwidth_gb_per_s(H100, group_shape(H100, 8)) == 370.8
    assert bus_bandwidth_gb_per_s(H100, group_shape(H100, 64)) == 370.8
    assert bus_bandwidth_gb_per_s(H100, group_shape(H100, [*range(4), *range(8, 12)])) == pytest.approx(188)
    assert bus_bandwidth_gb_per_s(H100, group_shape(H100, range(0, 64, 8))) == pytest.approx(47)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_large_gather_on_64_ranks_by_hand(kind: str) -> None:
    """Ring, Simple: 8.4 + 56 hops of 3.4 + 7 of 14 us, then 63/64 of the bytes at 370.8 GB/s."""
    expected = 8.4 + 56 * 3.4 + 7 * 14.0 + 8 * GIB * 63 / 64 / 370.8e3
    assert collective_us(H100, kind, group_shape(H100, 64), 8 * GIB) == pytest.approx(expected)


def test_small_gather_on_64_ranks_is_the_latency_of_the_ring() -> None:
    """Ring, LL: 6.6 + 56 * 0.6 + 7 * 2.7 = 59.1 us."""
    assert collective_us(H100, "all_gather", group_shape(H100, 64), 0) == pytest.approx(59.1)


def test_all_reduce_by_hand() -> None:
    """Twice the bytes in a ring; a tree when small; the switch adds up within a node."""
    shape = group_shape(H100, range(0, 64, 8))
    assert collective_us(H100, "all_reduce", shape, 8 * GIB) == pytest.approx(8.4 + 14 * 14.0 + 2 * 8 * GIB * 7 / 8 / 47e3)
    assert collective_us(H100, "all_reduce", group_shape(H100, 64), 0) == pytest.approx(6.8 + 2 * 7 * 0.6 + 2 * 3 * 5.0)
    assert collective_us(H100, "all_reduce", group_shape(H100, 8), 8 * GIB) == pytest.approx(25 + 8 * GIB * 14 / 8 / 475e3)


def test_all_to_all_is_bound_by_the_rank_s_own_nic() -> None:
    """64 ranks: 56/64 of the bytes leave through a 47 GB/s NIC; within a node all go over NVLink."""
    latency_us = 8.4 + 7 * 3.4 + 7 * 14.0
    assert collective_us(H100, "all_to_all", group_shape(H100, 64), 8 * GIB) == pytest.approx(latency_us + 8 * GIB * 56 / 64 / 47e3)
    assert collective_us(H100, "all_to_all", group_shape(H100, 8), 8 * GIB) == pytest.approx(8.4 + 7 * 3.4 + 8 * GIB * 7 / 8 / 370.8e3)


def test_a_slow_link_raises_the_latency_of_each_hop() -> None:
    slow = replace(H100, inter_node=replace(H100.inter_node, latency_us=20.0))
    assert collective_us(slow, "all_gather", group_shape(slow, 64), 0) == pytest.approx(6.6 + 56 * 0.6 + 7 * 20.0)


@pytest.mark.parametrize(
    ("kind", "group", "size_bytes", "low", "high"),
    [
        ("all_gather", 64, 8 * GIB, 340, 390),  # 8 nodes of 8 H100, 400 Gb/s each: what users report for large messages
        ("reduce_scatter", 64, 8 * GIB, 340, 390),
        ("all_reduce", 8, 8 * GIB, 460, 480),  # nccl-tests issues 272 and 290: 475 and 476
        ("all_gather", range(0, 64, 8), 8 * GIB, 44, 48),  # one NIC: nccl-tests issue 290
        ("all_reduce", 32, 8 * GIB, 320, 380),  # NCCL issue 1221: 320 to 330 on 4 nodes
    ],
)
def test_bus_bandwidth_of_large_messages_is_what_is_measured(kind: str, group: object, size_bytes: int, low: float, high: float) -> None:
    shape = group_shape(H100, group)  # type: ignore[arg-type]
    factor = (2 if kind == "all_reduce" else 1) * (shape.num_ranks - 1) / shape.num_ranks
    assert low <= factor * size_bytes / collective_us(H100, kind, shape, size_bytes) / 1e3 <= high


@pytest.mark.parametrize("name", cluster_names())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 2, 8, 12, 64, 256, range(0, 128, 8)])
def test_time_is_positive_and_never_falls_with_size(name: str, kind: str, group: object) -> None:
    cluster = load_cluster(name)
    shape = group_shape(cluster, group)  # type: ignore[arg-type]
    times = [collective_us(cluster, kind, shape, size) for size in (0, *(round(2 ** (e / 4)) for e in range(36, 160)))]
    assert times[0] > 0
    assert times == sorted(times)


def test_a_group_of_one_copies_on_the_device() -> None:
    assert collective_us(H100, "all_gather", group_shape(H100, 1), 10**9) == pytest.approx(2.0 + 2e9 / (3350e3 * 0.85))


def test_unknown_kinds_and_negative_sizes_are_refused() -> None:
    with pytest.raises(InputError, match=r"found 'allgather' \(did you mean 'all_gather'\?\)"):
        collective_us(H100, "allgather", group_shape(H100, 8), 8)
    with pytest.raises(InputError, match="-1 bytes"):
        collective_us(H100, "all_gather", group_shape(H100, 8), -1)
