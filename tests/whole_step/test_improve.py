"""CP-SAT solves the choices that it may make the fastest, and no others."""

from dataclasses import dataclass, replace

import pytest

from apsched.whole_step.choices import Choice
from apsched.whole_step.improve import improved, ticks_of


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A choice with one entry, as the search solved it."""

    name: str
    step_ticks: int
    bound_ticks: int
    fits: bool = True
    may_improve: bool = True
    lacks_floor: bool = False

    @property
    def is_final(self) -> bool:
        return not self.may_improve and not self.lacks_floor

    @property
    def kept(self) -> Choice:
        return Choice([self.name])


@pytest.mark.parametrize(
    ("other", "is_solved"),
    [
        (Solved(name="near", step_ticks=1150, bound_ticks=900), True),
        (Solved(name="excluded by its bound", step_ticks=1150, bound_ticks=1000), False),
        (Solved(name="far", step_ticks=1200, bound_ticks=900), False),
        (Solved(name="does not fit", step_ticks=0, bound_ticks=900, fits=False), True),
    ],
    ids=lambda value: value.name if isinstance(value, Solved) else "",
)
def test_only_these_are_solved_again(other: Solved, is_solved: bool) -> None:
    best = Solved(name="best", step_ticks=1000, bound_ticks=950)
    solved = {one.kept: one for one in (best, other)}
    again: list[Choice] = []

    def solve(kept: Choice) -> None:
        again.append(kept)
        solved[kept] = replace(solved[kept], may_improve=False)

    found = improved(solved, solve, lambda: min(solved.values(), key=ticks_of))
    assert found == replace(best, may_improve=False)
    assert again == [best.kept, other.kept][: 1 + is_solved]


def test_the_best_is_completed_though_cp_sat_gains_nothing_there() -> None:
    best, other = (
        Solved(name=name, step_ticks=ticks, bound_ticks=950, may_improve=False, lacks_floor=True)
        for name, ticks in (("best", 1000), ("other", 1001))
    )
    solved = {one.kept: one for one in (best, other)}

    def solve(kept: Choice) -> None:
        solved[kept] = replace(solved[kept], lacks_floor=False)

    found = improved(solved, solve, lambda: min(solved.values(), key=ticks_of))
    assert found == replace(best, lacks_floor=False)
    assert solved[other.kept] == other
