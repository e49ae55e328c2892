"""Gathers priced as they run in a queue, as schedules have them.

A gather of gloo is fast where both process ranks start within microseconds of each other, and slow
where one comes later (:mod:`apsched.calibrate.measure_collectives`). In a graph as captured, where
each gather finds its stream idle, either happens; in a queue ranks are always apart. A solver would
exploit a price that depends on the begin of a gather: a schedule that launches each gather right
after the end of the one before looks faster, and is not (9 % too short at 200 Mb/s). So the
problems that are solved have the slow price throughout.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from apsched.calibrate.measure_collectives import queued_us
from apsched.costs.measured import MeasuredCosts, Transfers, rising
from apsched.kinds import CollectiveKind

_CPU = torch.device("cpu")


def with_queued_gathers(profiled: MeasuredCosts) -> MeasuredCosts:
    """Return ``profiled`` with gathers that take no less than in a queue of the default group; all
    process ranks call this.
    """
    return replace(
        profiled,
        transfers=tuple(
            _queued(t) if t.kind == CollectiveKind.ALL_GATHER else t for t in profiled.transfers
        ),
    )


def _queued(gathers: Transfers) -> Transfers:
    step = 4 * dist.get_world_size()
    sizes = [max(step, size_bytes // step * step) for size_bytes, _ in gathers.points]
    group = dist.group.WORLD
    assert group is not None
    queued = [
        queued_us(gathers.kind, group.group_name, gathers.num_ranks, size_bytes, _CPU)[0]
        for size_bytes in sizes
    ]
    taken_us = torch.tensor(queued, dtype=torch.float64)
    dist.all_reduce(taken_us)
    means = (taken_us / dist.get_world_size()).tolist()
    points = [
        (size_bytes, max(time_us, mean))
        for (size_bytes, time_us), mean in zip(gathers.points, means, strict=True)
    ]
    return replace(gathers, points=rising(points, [1.0] * len(points)))
