"""Gathers priced as they run in a queue, as schedules have them.

A gather of gloo is fast where both process ranks start within microseconds of each other, and slow where one comes later
(:mod:`apsched.calibrate.measure_collectives`). In a graph as captured, where each finds its stream idle, either happens; in a queue ranks
are always apart. A price by where a gather begins would be exploited: a schedule that launches each right after the one before it has ended
looks faster, and is not (9 % too short at 200 Mb/s). So what is solved has the slow price throughout.
"""

import time
from dataclasses import replace
from statistics import fmean

import torch
import torch.distributed as dist

from apsched.calibrate.measure_collectives import part_ranks
from apsched.costs.measured import MeasuredCosts, Transfers, rising

_QUEUES, _IN_QUEUE = 10, 4


def with_queued_gathers(profiled: MeasuredCosts) -> MeasuredCosts:
    """Return ``profiled`` with gathers that take no less than in a queue of the default group; all process ranks call this."""
    return replace(profiled, transfers=tuple(_queued(t) if t.kind == "all_gather" else t for t in profiled.transfers))


def _queued(gathers: Transfers) -> Transfers:
    taken_us = torch.tensor([_queued_us(size_bytes) for size_bytes, _ in gathers.points], dtype=torch.float64)
    dist.all_reduce(taken_us)
    means = (taken_us / dist.get_world_size()).tolist()
    points = [(size_bytes, max(time_us, mean)) for (size_bytes, time_us), mean in zip(gathers.points, means, strict=True)]
    return replace(gathers, points=rising(points, [1.0] * len(points)))


def _queued_us(size_bytes: int) -> float:
    """Return the mean, without the extremes, of what gathers take one behind the other."""
    part = torch.zeros(max(1, size_bytes // 4 // dist.get_world_size()))
    whole = torch.zeros(part.numel() * dist.get_world_size())
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
