"""The least peak: schedules that hold every buffer as briefly as possible."""

from dataclasses import dataclass, replace

from apsched.config import Caps
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import ProblemArrays
from apsched.solver.program.evaluate import evaluate, most_prefetch
from apsched.solver.program.program import Figures, Program
from apsched.solver.search.construct import construct
from apsched.solver.search.grouping import group
from apsched.solver.search.launch_policy import Policy

JUST_IN_TIME = (
    Policy(lead=0.0, copy_out_early=True, prefetch=False, wait_reductions_at_once=True),
    Policy(lead=0.0, copy_out_early=True, prefetch=False),
)

_TINY_BYTES = 2**20
"""Buckets up to this size hold next to nothing and may save rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The known schedule with the least peak."""

    program: Program
    peak_memory_bytes: int


def just_in_time(instance: Instance) -> Floor | None:
    """Return the just-in-time schedule with the least peak that keeps the other caps; None if there
    is none.
    """
    caps = instance.caps
    pricer = Pricer(instance)
    tiny = _TINY_BYTES if caps.bucket_cap_bytes is None else min(_TINY_BYTES, caps.bucket_cap_bytes)
    small = Caps(bucket_cap_bytes=tiny, max_topo_span=caps.max_topo_span)
    partitions = [pricer.partition_of(pricer.tables.plan_groups.leader)]
    partitions.append(pricer.partition_of(group(pricer, small, range(len(instance.problem.keys)))))
    best: Floor | None = None
    for partition in partitions:
        for policy in JUST_IN_TIME:
            steer = 0 if policy.wait_reductions_at_once else caps.memory_cap_bytes
            program = construct(pricer, partition, policy, replace(caps, memory_cap_bytes=steer))
            figures = evaluate(instance.arrays, program)
            if not _keeps(instance.arrays, program, figures, caps):
                continue
            if best is None or figures.peak_memory_bytes < best.peak_memory_bytes:
                best = Floor(program=program, peak_memory_bytes=figures.peak_memory_bytes)
    return best


def without_caps_on_launches(caps: Caps) -> Caps:
    """Return the caps that every just-in-time schedule keeps: all but those on bytes in flight and
    on prefetch.
    """
    return replace(caps, in_flight_cap_bytes=None, max_prefetch=None)


def _keeps(arrays: ProblemArrays, program: Program, figures: Figures, caps: Caps) -> bool:
    """Return whether a program keeps the caps on launches; no pass over the compute order ensures
    them.
    """
    if (
        caps.in_flight_cap_bytes is not None
        and figures.peak_in_flight_bytes > caps.in_flight_cap_bytes
    ):
        return False
    if caps.max_prefetch is None:
        return True
    need_slot = program.partition.need_slot
    return (
        most_prefetch(program.operation, program.argument, need_slot, len(arrays.compute_ticks))
        <= caps.max_prefetch
    )
