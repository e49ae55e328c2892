"""Choices that the search solved, improved by CP-SAT as far as that may change the answer."""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from apsched.whole_step.choices import Choice


class _Timed(Protocol):
    """A choice with a step time if it fits."""

    @property
    def fits(self) -> bool: ...
    @property
    def step_ticks(self) -> int: ...


class _Solved(_Timed, Protocol):
    """A solved choice, of one pair of graphs or of several micro-batches."""

    @property
    def kept(self) -> Choice: ...
    @property
    def bound_ticks(self) -> int: ...
    @property
    def may_improve(self) -> bool: ...
    @property
    def is_final(self) -> bool: ...


_S = TypeVar("_S", bound=_Solved)


NEVER = float("inf")
"""The step time of a choice that does not fit."""
_MOST_GAINED = 0.15
"""Share of the step time that CP-SAT gains on the search at most: 14 % were seen
(benchmarks/notes.md).
"""


def ticks_of(solved: _Timed) -> float:
    """Return the step time of a choice; infinity where it does not fit."""
    return solved.step_ticks if solved.fits else NEVER


def improved(
    solved: Mapping[Choice, _S], solve: Callable[[Choice], object], best_of: Callable[[], _S]
) -> _S:
    """Return ``best_of`` the choices ``solved``, with nothing left out of its answers, after those
    are solved with CP-SAT that it may make the fastest, the fastest first: by their bounds, and by
    the most that it gains on the search. ``solve`` changes ``solved``.
    """
    while True:
        least = min(map(ticks_of, solved.values()), default=NEVER)
        open_ones = [
            s
            for s in solved.values()
            if s.may_improve
            and s.bound_ticks < least
            and not (s.fits and s.step_ticks * (1 - _MOST_GAINED) > least)
        ]
        best = min(open_ones, key=ticks_of) if open_ones else best_of()
        if best.is_final:
            return best
        solve(best.kept)
