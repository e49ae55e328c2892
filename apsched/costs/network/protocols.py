"""Latency and bandwidth of each algorithm and protocol of a library of collectives. No torch here.

Those of NCCL are its own tuner's (NCCL 2.26 to 2.29, src/graph/tuning.cc, ncclTopoTuneModel:
baseLat, hwLat for NVLink and NET, and the factors of busBw), except where a comment names a
measurement. Bandwidths are shares of a ring's bus bandwidth over large messages.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One protocol of one algorithm; latencies in microseconds."""

    name: str
    base_us: float
    intra_hop_us: float
    inter_hop_us: float
    bandwidth_share: float
    net_overhead_us: float = 0.0
    """Least price of a hop inside a node where the group spans several: every hop posts to the
    network's proxy.
    """
    low_latency: bool = False
    """Bound by ``low_latency_busbw_gb_per_s``."""
    share_by_size: tuple[float, ...] = (1.0,)
    """Share of the bandwidth at 64 B, 128 B, 256 B, ...; the last holds beyond."""

    def share_of_bandwidth(self, size_bytes: int) -> float:
        """Return the share of the ring's bandwidth at that size: linear between powers of two."""
        position = min(max(math.log2(max(size_bytes, 1) / 64), 0.0), len(self.share_by_size) - 1)
        below = (
            min(int(position), len(self.share_by_size) - 2) if len(self.share_by_size) > 1 else 0
        )
        above = min(below + 1, len(self.share_by_size) - 1)
        at_size = self.share_by_size[below] + (position - below) * (
            self.share_by_size[above] - self.share_by_size[below]
        )
        return self.bandwidth_share * at_size


# treeCorrectionFactor of NCCL (src/graph/tuning.cc; now src/tuning/cost_model.cc): 64 B to 512 MiB,
# and all of it beyond
_TREE_LL = (
    1,
    1,
    1,
    1,
    0.9,
    0.8,
    0.7,
    0.7,
    0.7,
    0.7,
    0.6,
    0.5,
    0.4,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    1,
    1,
    1,
    1,
    1,
    1,
)
_TREE_LL128 = (
    1,
    1,
    1,
    1,
    1,
    0.9,
    0.8,
    0.8,
    0.8,
    0.7,
    0.6,
    0.6,
    0.6,
    0.6,
    0.6,
    0.6,
    0.8,
    0.9,
    0.9,
    0.9,
    0.9,
    1,
    1,
    1,
    1,
)
_TREE_SIMPLE = (
    0.9,
    0.9,
    0.9,
    0.9,
    0.9,
    0.9,
    0.9,
    0.8,
    0.7,
    0.6,
    0.6,
    0.5,
    0.5,
    0.5,
    0.5,
    0.6,
    0.7,
    0.8,
    0.7,
    0.7,
    0.8,
    0.9,
    0.9,
    0.9,
    1,
)

_NET_OVERHEAD_US = (
    1.0  # getNetOverhead: 1 us on Intel hosts, 2 us on AMD ones; three times that for Simple
)

RINGS = {
    "nccl": (
        Protocol(
            name="LL",
            base_us=6.6,
            intra_hop_us=0.6,
            inter_hop_us=2.7,
            bandwidth_share=0.5,
            net_overhead_us=_NET_OVERHEAD_US,
            low_latency=True,
        ),
        Protocol(
            name="LL128",
            base_us=14.0,
            intra_hop_us=1.9,
            inter_hop_us=4.0,
            bandwidth_share=120 / 128,
            net_overhead_us=_NET_OVERHEAD_US,
        ),
        Protocol(
            name="Simple",
            base_us=8.4,
            intra_hop_us=3.4,
            inter_hop_us=14.0,
            bandwidth_share=1.0,
            net_overhead_us=3 * _NET_OVERHEAD_US,
        ),
    ),
    # gloo: one protocol; base measured (cpu.toml), hops are those of the links
    "gloo": (
        Protocol(
            name="TCP", base_us=300.0, intra_hop_us=0.0, inter_hop_us=0.0, bandwidth_share=1.0
        ),
    ),
}

TREES = {
    "nccl": (
        Protocol(
            name="LL",
            base_us=6.8,
            intra_hop_us=0.6,
            inter_hop_us=5.0,
            bandwidth_share=1 / 3.8,
            low_latency=True,
            share_by_size=_TREE_LL,
        ),
        Protocol(
            name="LL128",
            base_us=14.0,
            intra_hop_us=1.25,
            inter_hop_us=8.5,
            bandwidth_share=120 / 128,
            share_by_size=_TREE_LL128,
        ),
        Protocol(
            name="Simple",
            base_us=8.4,
            intra_hop_us=4.0,
            inter_hop_us=14.0,
            bandwidth_share=1.0,
            share_by_size=_TREE_SIMPLE,
        ),
    ),
    "gloo": (),
}

# measured on 8 H100 with NCCL_ALGO=NVLS at 2 MiB to 2 GiB (togethercomputer/together-nccl-tests,
# benchmarks/H100, 20260305_220944): (S / bandwidth at 8 GiB) / (time - base); taken as flat below 2
# MiB, where the latency counts
_IN_SWITCH_SHARES = (0.42,) * 16 + (0.50, 0.51, 0.60, 0.70, 0.81, 0.87, 0.90, 0.92, 0.98, 1.0)
# an all-reduce that the switches of the nodes add up (NVLink SHARP), and the NICs between two:
# hwLat of NVLS and NVLSTree
IN_SWITCH = Protocol(
    name="NVLS",
    base_us=25.0,
    intra_hop_us=0.0,
    inter_hop_us=14.0,
    bandwidth_share=1.0,
    share_by_size=_IN_SWITCH_SHARES,
)
IN_SWITCH_MIN_RANKS = 3  # NCCL src/transport/nvls.cc: not for two


def tree_share(num_nodes: int) -> float:
    """Return a tree's share of the bus bandwidth of a ring over the same nodes.

    Measured on B200 at 32 GiB (togethercomputer/together-nccl-tests, baselines/flapping-airplanes,
    2026-05-12): 556 of 698 GB/s in a node, 339 of 388 on two, 192 of 389 on four and 195 of 390 on
    32, where the NICs carry the way up and the way down.
    """
    return {1: 0.80, 2: 0.87}.get(num_nodes, 0.50)
