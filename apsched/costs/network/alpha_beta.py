"""Collectives priced from a topology: latency and bandwidth of each algorithm and protocol, the
fastest taken. No torch here.

Symbols: N process ranks on n nodes, at least r on each; S bytes counted once (an all-gather by its
output, a reduce-scatter by its input, the others by their size); B bus bandwidth, as nccl-tests
defines it (doc/PERFORMANCE.md): the rate at which each rank sends.

**Bandwidth.** In a ring every rank sends (N-1)/N of S once (AG, RS) or twice (AR). NCCL opens a
ring for each NIC, so that r rings leave a node through r NICs: a node sends as much as one rank
does, over r NICs. Hence

    B = min(B_intra, r * B_nic)  across nodes with r > 1;  B_nic with r = 1;  B_intra within a node
    t = alpha + f * S * (N-1)/N / (share * B),   f = 1 (AG, RS), 2 (AR)

A tree's share of B falls with the number of nodes, and it and the switches fall short of theirs at
medium sizes (:mod:`apsched.costs.network.protocols`). An all-reduce may be added up by the switches
of the nodes (NVLink SHARP): within a node S goes to the switch and back once; on two nodes 1/r of S
then crosses each NIC. On more, the NICs bound that as they bound a ring: measured on B200, 388 GB/s
beside a ring's 389 on four nodes, 390 beside 390 on 32; so the ring prices it. An all-to-all sends
S/N to each rank: S (N-r)/N through the rank's own NIC while S (r-1)/N go over NVLink; the slower
counts.

**Latency.** As NCCL's own tuner (src/graph/tuning.cc, ncclTopoTuneModel): a ring has N-1 steps (AR
2 (N-1)), of which n-1 (AR 2 n) cross nodes; a tree has 2 (r-1) steps within the node and 2 log2(n)
across. Each protocol has a base and a price per hop, no less than the latency of the link.
Protocols trade latency for bandwidth: NCCL picks the minimum over them.

``docs/collectives.md`` compares all this with published measurements.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from apsched.costs.clusters.cluster import Cluster
from apsched.costs.network.protocols import (
    IN_SWITCH,
    IN_SWITCH_MIN_RANKS,
    RINGS,
    TREES,
    Protocol,
    tree_share,
)
from apsched.errors import InputError
from apsched.kinds import PRICED_KINDS, CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The shape of a process group: its ranks and nodes."""

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    """Fewest on any node: they bound how many NICs a ring can use."""


def group_shape(cluster: Cluster, group: int | Sequence[int]) -> GroupShape:
    """Return the shape of a group given by its process ranks, or by its size alone (then contiguous
    from a node's start).
    """
    ranks = range(group) if isinstance(group, int) else group
    if len(ranks) < 1 or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise InputError(
            f"a process group needs distinct process ranks from 0 on, at least one; found {group!r}"
        )
    on_node = Counter(rank // cluster.ranks_per_node for rank in ranks)
    return GroupShape(
        num_ranks=len(ranks), num_nodes=len(on_node), ranks_per_node=min(on_node.values())
    )


def collective_us(cluster: Cluster, kind: str, shape: GroupShape, size_bytes: int) -> float:
    """Return the time of a collective of ``size_bytes`` (counted once) in microseconds; it never
    falls with size.
    """
    if kind not in PRICED_KINDS:
        close = get_close_matches(kind, map(str, PRICED_KINDS), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise InputError(
            f"expected a kind of collective among {', '.join(PRICED_KINDS)}; found {kind!r}{hint}"
        )
    if size_bytes < 0:
        raise InputError(f"a collective cannot have {size_bytes} bytes")
    if shape.num_ranks == 1:  # a copy on the device
        return cluster.device.kernel_us + 2 * size_bytes / cluster.device.memory_bytes_per_us
    rings = _enabled(RINGS[cluster.library], cluster, shape)
    if kind == CollectiveKind.ALL_TO_ALL:
        return min(_all_to_all_us(cluster, protocol, shape, size_bytes) for protocol in rings)
    times = [_ring_us(cluster, protocol, kind, shape, size_bytes) for protocol in rings]
    if kind == CollectiveKind.ALL_REDUCE:
        times += [
            _tree_us(cluster, protocol, shape, size_bytes)
            for protocol in _enabled(TREES[cluster.library], cluster, shape)
        ]
        times += _in_switch_us(cluster, shape, size_bytes)
    return min(times)


def _enabled(protocols: Sequence[Protocol], cluster: Cluster, shape: GroupShape) -> list[Protocol]:
    """Return those that the network takes; within a node NVLink takes all."""
    if shape.num_nodes == 1 or cluster.library != "nccl":
        return list(protocols)
    return [
        protocol for protocol in protocols if protocol.name in cluster.inter_node.protocols.split()
    ]


def bus_factor(kind: str, num_ranks: int) -> float:
    """Return bus bandwidth over size by time, as nccl-tests defines it (doc/PERFORMANCE.md)."""
    return (2 if kind == CollectiveKind.ALL_REDUCE else 1) * (num_ranks - 1) / num_ranks


def bus_bandwidth_gb_per_s(cluster: Cluster, shape: GroupShape) -> float:
    """Return the bandwidth of a ring for large messages, as nccl-tests' busbw."""
    intra, nics = (
        cluster.intra_node.busbw_gb_per_s,
        shape.ranks_per_node * cluster.inter_node.nic_gb_per_s,
    )
    if shape.num_nodes == 1:
        return intra
    return nics if shape.num_nodes == shape.num_ranks else min(intra, nics)


def _protocol_bytes_per_us(
    cluster: Cluster, protocol: Protocol, shape: GroupShape, size_bytes: int
) -> float:
    bandwidth = bus_bandwidth_gb_per_s(cluster, shape) * protocol.share_of_bandwidth(size_bytes)
    if protocol.low_latency:
        link = cluster.intra_node if shape.num_nodes == 1 else cluster.inter_node
        bandwidth = min(bandwidth, link.low_latency_busbw_gb_per_s)
    return bandwidth * 1e3


def _latency_us(
    cluster: Cluster, protocol: Protocol, intra_steps: float, inter_steps: float
) -> float:
    intra_us = max(protocol.intra_hop_us, cluster.intra_node.latency_us)
    if inter_steps:
        intra_us = max(intra_us, protocol.net_overhead_us)
    inter_us = max(protocol.inter_hop_us, cluster.inter_node.latency_us)
    return protocol.base_us + intra_steps * intra_us + inter_steps * inter_us


def _ring_us(
    cluster: Cluster, protocol: Protocol, kind: str, shape: GroupShape, size_bytes: int
) -> float:
    rounds = 2 if kind == CollectiveKind.ALL_REDUCE else 1
    steps = rounds * (shape.num_ranks - 1)
    crossing = 2 * shape.num_nodes if kind == CollectiveKind.ALL_REDUCE else shape.num_nodes - 1
    inter_steps = min(crossing, steps) if shape.num_nodes > 1 else 0
    sent_bytes = rounds * size_bytes * (shape.num_ranks - 1) / shape.num_ranks
    latency_us = _latency_us(cluster, protocol, steps - inter_steps, inter_steps)
    return latency_us + sent_bytes / _protocol_bytes_per_us(cluster, protocol, shape, size_bytes)


def _tree_us(cluster: Cluster, protocol: Protocol, shape: GroupShape, size_bytes: int) -> float:
    widest = math.ceil(shape.num_ranks / shape.num_nodes)
    latency_us = _latency_us(cluster, protocol, 2 * (widest - 1), 2 * math.log2(shape.num_nodes))
    sent_bytes = 2 * size_bytes * (shape.num_ranks - 1) / shape.num_ranks
    bytes_per_us = tree_share(shape.num_nodes) * _protocol_bytes_per_us(
        cluster, protocol, shape, size_bytes
    )
    return latency_us + sent_bytes / bytes_per_us


def _in_switch_us(cluster: Cluster, shape: GroupShape, size_bytes: int) -> list[float]:
    """Return the time of an all-reduce in the switches; none where they cannot, or where a ring is
    as good.
    """
    busbw = cluster.intra_node.in_switch_all_reduce_busbw_gb_per_s
    simple = shape.num_nodes == 1 or "Simple" in cluster.inter_node.protocols.split()
    if (
        busbw is None
        or shape.num_nodes > 2
        or shape.ranks_per_node < IN_SWITCH_MIN_RANKS
        or not simple
    ):
        return []
    # each rank sends and receives S once whatever the size of the group: the busbw of the whole
    # node gives the rate
    ranks = cluster.ranks_per_node
    bytes_per_us = busbw * 1e3 * ranks / (2 * (ranks - 1))
    if shape.num_nodes == 2:
        bytes_per_us = min(
            bytes_per_us, shape.ranks_per_node * cluster.inter_node.nic_gb_per_s * 1e3
        )
    latency_us = _latency_us(cluster, IN_SWITCH, 0, 2 * math.log2(shape.num_nodes))
    return [latency_us + size_bytes / (bytes_per_us * IN_SWITCH.share_of_bandwidth(size_bytes))]


def _all_to_all_us(
    cluster: Cluster, protocol: Protocol, shape: GroupShape, size_bytes: int
) -> float:
    to_each_bytes = size_bytes / shape.num_ranks
    peers = shape.ranks_per_node - 1
    intra_us = (
        peers * to_each_bytes / (cluster.intra_node.busbw_gb_per_s * 1e3 * protocol.bandwidth_share)
    )
    inter_us = (
        (shape.num_ranks - 1 - peers)
        * to_each_bytes
        / (cluster.inter_node.nic_gb_per_s * 1e3 * protocol.bandwidth_share)
    )
    return _latency_us(cluster, protocol, peers, shape.num_nodes - 1) + max(intra_us, inter_us)
