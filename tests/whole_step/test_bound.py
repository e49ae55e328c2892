"""The bound over choices on problems by hand."""

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource
from apsched.solver import solve_requested
from apsched.solver.bounds.whole_step import KeptItem, StepBound
from tests.helpers.problems.by_hand import ByHand, line

KIB = 1024
PARAMETERS = ("w", "v", "u")


def backward(kept: frozenset[str]) -> Problem:
    """A node of 4 us for each parameter of 4 KiB, all of which are gathered but ``kept``: 12 us
    alone, 4 us and a share of 8 us in a bucket; in a bucket also copies of about 10 us each.
    """
    b = ByHand(prices={"all_gather": line(8_000, 1_000)}, copy_price=line(0, 2_000))
    made = b.input("x", 512)
    whole = {}
    for name in PARAMETERS:
        if name in kept:
            whole[name] = b.input(name, 4 * KIB)
            continue
        shard = b.input(f"shard_{name}", KIB, kept=True)
        fields = {"launch_ticks": 1_000, "module": name}
        start = b.start("all_gather", f"ag_{name}", shard, KIB, 4 * KIB, **fields)
        whole[name] = b.wait(name, start)
    for name in PARAMETERS:
        made = b.compute(f"mm_{name}", 4_000, made, whole[name], size=KIB)
    return b.output(made)


def bound_with(free_bytes: int | None) -> StepBound:
    items = [KeptItem(collectives=(c,), kept_bytes=4 * KIB) for c in range(len(PARAMETERS))]
    return StepBound.of(
        forward_ticks=0,
        again=backward(frozenset()),
        kept=backward(frozenset(PARAMETERS)),
        items=items,
        caps=Caps(max_compute_move=0),
        free_bytes=free_bytes,
    )


def test_streams_are_weighed_against_each_other() -> None:
    """Nothing may be kept: gathers in a bucket would fill the compute stream with copies, gathers
    alone the network. Neither stream by itself shows it.
    """
    bound = bound_with(0)
    best = {
        source: fixed + sum(values)
        for source, fixed, values in sorted(bound.rows, key=lambda row: row[1] + sum(row[2]))
    }
    weighed = best.pop(BoundSource.WEIGHED)
    assert weighed > 1.1 * max(best.values())
    found = bound.over_choices()
    assert found.source == BoundSource.WEIGHED
    assert found.ticks == int(weighed)


@pytest.mark.parametrize("room", range(len(PARAMETERS) + 1))
def test_no_choice_that_fits_is_below_it(room: int) -> None:
    """With room for so many parameters no choice of that many is faster than the bound."""
    bound = bound_with(room * 4 * KIB).over_choices()
    kept = backward(frozenset(PARAMETERS[:room]))
    answer = solve_requested(kept, Caps(max_compute_move=0), SolveOptions())
    assert answer.best is not None
    assert bound.ticks <= answer.best.step_time_ticks
    others = [bound_with(k * 4 * KIB).over_choices().ticks for k in range(room)]
    assert bound.ticks <= min(others, default=bound.ticks)
