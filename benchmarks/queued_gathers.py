"""By how much gathers that queue are slower than those of a graph as captured, which find their stream idle.

A gather of gloo is fast where both process ranks start within microseconds, and slow where one comes later
(:mod:`apsched.calibrate.measure_collectives`). As captured either happens; in a queue ranks are always apart. With t(s) what the gather of
s bytes takes as profiled, t_queued(s) in a queue, and the latency l,

    t_queued(s) = l + q (t(s) - l)
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import networkx as nx
import torch
import torch.distributed as dist

from apsched.calibrate.measure_collectives import part_ranks
from apsched.costs.measured import MeasuredCosts, Transfers

_QUEUES, _IN_QUEUE = 12, 5


def queued_gather_slowdown(dags: Sequence[nx.DiGraph], profiled: MeasuredCosts) -> float:
    """Return q on the default group, at the size of which ``dags`` gather the most bytes; all process ranks call this and get the same."""
    total: dict[int, int] = {}
    for dag in dags:
        for rank in range(dag.number_of_nodes()):
            collective = dag.nodes[rank]["record"].collective
            if collective is not None and collective.kind == "all_gather":
                total[collective.size_bytes] = total.get(collective.size_bytes, 0) + collective.size_bytes
    size_bytes = max(total, key=lambda size: (total[size], size))
    gathers = next(t for t in profiled.transfers if t.kind == "all_gather")
    latency_us, alone_us = gathers.points[0][1], dict(gathers.points)[size_bytes]
    queued_us = torch.tensor(_queued_us(size_bytes), dtype=torch.float64)
    dist.all_reduce(queued_us)
    return max(1.0, (queued_us.item() / dist.get_world_size() - latency_us) / (alone_us - latency_us))


def _queued_us(size_bytes: int) -> float:
    """Return the mean, without the extremes, of what gathers take one behind the other."""
    whole = torch.zeros(size_bytes // 4)
    part = torch.zeros(whole.numel() // dist.get_world_size())
    times = []
    for _ in range(_QUEUES):
        part_ranks()
        works = [dist.all_gather_into_tensor(whole, part, async_op=True) for _ in range(_IN_QUEUE)]
        ends = []
        for work in works:
            assert work is not None
            work.wait()
            ends.append(time.perf_counter_ns())
        times.append((ends[-1] - ends[0]) / 1e3 / (_IN_QUEUE - 1))
    return fmean(sorted(times)[2:-2])


def as_if_idle(measured: MeasuredCosts, slowdown: float) -> MeasuredCosts:
    """Return ``measured`` with gathers as they would be if they did not queue."""
    return replace(measured, transfers=tuple(_as_if_idle(t, slowdown) if t.kind == "all_gather" else t for t in measured.transfers))


def _as_if_idle(gathers: Transfers, slowdown: float) -> Transfers:
    latency_us = gathers.points[0][1]
    points = tuple((size_bytes, latency_us + max(0.0, time_us - latency_us) / slowdown) for size_bytes, time_us in gathers.points)
    return replace(gathers, points=points, bytes_per_us=gathers.bytes_per_us and gathers.bytes_per_us * slowdown)
