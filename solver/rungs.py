"""Search under ever looser caps: sequences of caps, as far as these are below the stated cap, and
then the stated cap. The memory caps depend on the problem alone; those on prefetch are always the
same.

The search under each cap also starts from the schedules found under the caps before. So the work
under a cap of the sequence is a part of the work under any looser cap, whose schedule is never
slower. A memory cap above the whole sequence starts from a search without a cap: one that may not
pass through schedules that do not fit finds less. All found schedules stand on one front of step
time and peak, from which the second objective takes its schedule. Under a tight cap on prefetch few
large buckets win, to which single moves from many small ones do not lead.
"""

from collections.abc import Sequence
from typing import Protocol

from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.layers import find_periods
from apsched.solver.arrays.problem_arrays import ALL_GATHER

_LAYERS = (0, 3, 30)
"""Layers of gathered weights above the floor: the memory caps of the sequence."""
_FIRST, _DENSE, _NEXT, _FAR = 2, 16, 2, 4
"""The first cap on prefetch; up to the second number each is twice the one before, from there on
four times.
"""
_GAIN, _FLAT = 1e-4, 2
"""Share of the step time by which one of so many searches in a row has to be faster, or memory does
not bind any more.
"""


class Climber(Protocol):
    """A search under one cap after another."""

    def under(self, cap_bytes: int | None) -> None:
        """Search under one memory cap."""

    def fastest_ticks(self, cap_bytes: int | None) -> int | None:
        """Return the least step time that is known within a cap."""

    def is_done(self, cap_bytes: int | None) -> bool:
        """Whether nothing within the cap can be noticeably faster."""


def climb(
    caps_below: Sequence[int], cap_bytes: int | None, climber: Climber, *, is_loose: bool = False
) -> None:
    """Let ``climber`` search under ``caps_below``, ascending, until it is done or more memory gains
    nothing, and then under ``cap_bytes``; if that ``is_loose``, first without a cap, which is
    enough where the fastest fits.
    """
    last, flat = None, 0
    for rung in caps_below:
        climber.under(rung)
        if climber.is_done(rung):
            return
        fastest = climber.fastest_ticks(rung)
        if fastest is not None:
            flat = 0 if last is None or fastest < last * (1 - _GAIN) else flat + 1
            last = fastest
        if flat >= _FLAT:
            break
    if is_loose:
        climber.under(None)
        if climber.fastest_ticks(None) == climber.fastest_ticks(cap_bytes):
            return
    climber.under(cap_bytes)


def memory_rungs(instance: Instance, floor_bytes: int) -> tuple[int, ...]:
    """Return the memory caps of the sequence that are below the cap of ``instance``."""
    cap = instance.caps.memory_cap_bytes
    layer = layer_bytes(instance) or max(floor_bytes // 50, 1)
    most = 2 * int(instance.arrays.output_bytes.sum())  # buckets with their copies
    caps = (floor_bytes + n * layer for n in _LAYERS if n == 0 or n * layer < most)
    return tuple(rung for rung in caps if cap is None or rung < cap)


def prefetch_rungs(max_prefetch: int | None) -> tuple[int, ...]:
    """Return the caps of the sequence below ``max_prefetch``, ascending; none without a cap, since
    the search under each takes as long as that without one.
    """
    found, rung = [], _FIRST
    while max_prefetch is not None and rung < max_prefetch:
        found.append(rung)
        rung *= _NEXT if rung < _DENSE else _FAR
    return tuple(found)


def is_tight(instance: Instance, peak_bytes: int) -> bool:
    """Return whether the memory cap leaves less than a layer of gathered weights above
    ``peak_bytes``: orders of the compute with a lower peak may then be faster.
    """
    cap_bytes = instance.caps.memory_cap_bytes
    return cap_bytes is not None and cap_bytes < peak_bytes + layer_bytes(instance)


def layer_bytes(instance: Instance) -> int:
    """Return the gathered weights of a repeated layer, the largest one; 0 where none repeats."""
    arrays = instance.arrays
    return max(
        (
            sum(
                int(arrays.output_bytes[row[0]])
                for row in period.collectives
                if arrays.kind[row[0]] == ALL_GATHER and not arrays.on_path[row[0]]
            )
            for period in find_periods(arrays)
        ),
        default=0,
    )
