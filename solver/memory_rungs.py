"""Search under ever looser memory caps: one sequence of caps for a problem, of which a stated cap
uses the part below it.

The sequence depends on the problem alone, and so does the search under each cap, which starts from
what was found under those before. So the work under a cap is a part of the work under any looser
one: a looser cap is never slower. What a cap between two of the sequence has beyond the lower one,
a fiftieth at most, is left free. All that is found stands on one front of step time and peak, from
which the second objective takes its schedule.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.layers import find_periods
from apsched.solver.arrays.problem_arrays import ALL_GATHER

_LAYERS = (0, 1, 3, 10, 30, 90)
"""Layers of gathered weights above the floor at which the search is a full one."""
_QUARTERS = 4
"""Short searches between the floor and one layer above it, and in each interval after that."""
_FINEST = 0.02
"""Of the cap: the least distance of two short searches that are more than a layer above the
floor.
"""


_SHARE_AT_THE_FLOOR = 1.5
"""The evaluations of the first search over those of the others: nothing is known yet."""
_SHARE_OF_A_SHORT_SEARCH = 0.03
_IDLE = 2
"""Short searches in a row that gain nothing, after which those up to the next full one are left
out.
"""
_GAIN, _FLAT = 1e-4, 2
"""Share of the step time by which so many full searches in a row have to be faster, or memory does
not bind any more.
"""


class Climber(Protocol):
    """A search under one cap after another."""

    def under(self, rung: "Rung") -> None:
        """Search under one memory cap."""

    def fastest_ticks(self, cap_bytes: int | None) -> int | None:
        """Return the least step time that is known within a cap."""

    def is_done(self, cap_bytes: int | None) -> bool:
        """Whether nothing within the cap can be noticeably faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One memory cap of the sequence."""

    cap_bytes: int | None
    """``None`` for the last one: as much as a schedule takes."""
    full: bool
    """Whether the search under it begins again, too; a short one goes on from what is known."""
    share: float
    """Of the evaluations of one search."""


def climb(instance: Instance, floor_bytes: int, climber: Climber) -> None:
    """Let ``climber`` search under the caps of the sequence up to that of ``instance``, until it is
    done; without a cap at last, where more memory gains nothing.
    """
    cap, last, idle, flat = instance.caps.memory_cap_bytes, None, 0, 0
    for rung in rungs(instance, floor_bytes):
        if cap is not None and rung.cap_bytes is not None and rung.cap_bytes > cap:
            return
        if rung.full and flat >= _FLAT:
            break
        if not rung.full and idle >= _IDLE:
            continue
        before = climber.fastest_ticks(rung.cap_bytes)
        climber.under(rung)
        after = climber.fastest_ticks(rung.cap_bytes)
        if climber.is_done(rung.cap_bytes):
            return
        idle = 0 if rung.full or after != before else idle + 1
        if rung.full and after is not None:
            flat = 0 if last is None or after < last * (1 - _GAIN) else flat + 1
            last = after
    climber.under(Rung(cap_bytes=None, full=True, share=1.0))


def planned_searches(instance: Instance, floor_bytes: int) -> float:
    """Return how many searches the caps up to that of ``instance`` take at most."""
    cap = instance.caps.memory_cap_bytes
    return 1.0 + sum(
        rung.share
        for rung in rungs(instance, floor_bytes)
        if cap is None or rung.cap_bytes is None or rung.cap_bytes <= cap
    )


def rungs(instance: Instance, floor_bytes: int) -> Iterator[Rung]:
    """Yield the memory caps from the floor up to what everything at once would take."""
    layer = layer_bytes(instance) or max(floor_bytes // 50, 1)
    most = floor_bytes + int(instance.arrays.output_bytes.sum())
    full = [floor_bytes + layers * layer for layers in _LAYERS]
    full = [cap for cap in full if cap < most]
    for low, high in zip(full, [*full[1:], most], strict=True):
        share = _SHARE_AT_THE_FLOOR if low == floor_bytes else 1.0
        yield Rung(cap_bytes=low, full=True, share=share)
        step = max((high - low) // _QUARTERS, 1)
        if low > floor_bytes:
            step = max(min(step, int(_FINEST * low)), layer // _QUARTERS, 1)
        for cap in range(low + step, high - step // 2, step):
            yield Rung(cap_bytes=cap, full=False, share=_SHARE_OF_A_SHORT_SEARCH)


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
