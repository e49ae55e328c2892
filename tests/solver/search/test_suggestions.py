"""Suggestions: only what makes a schedule faster is one."""

from apsched.config import Caps, SolveOptions
from apsched.schedule.schedule import as_captured
from apsched.schedule.score import score
from apsched.solver import best_changes, solve
from tests.helpers.problems.by_hand_gathers import two_gathers


def test_what_cannot_be_faster_has_no_suggestion_and_the_captured_order_has_one() -> None:
    problem, caps = two_gathers(needed_by=(0, 0)), Caps(max_compute_move=0)
    best = solve(problem, caps, SolveOptions(budget=1.0)).best
    assert best is not None
    assert best_changes(problem, caps, best, best.peak_memory_bytes) == ()
    now = score(problem, "now", as_captured(problem.num_nodes), caps)
    assert now.step_time_ticks > best.step_time_ticks
    changes = best_changes(problem, caps, now, now.peak_memory_bytes)
    assert [change.scored.step_time_ticks for change in changes][-1:] == [best.step_time_ticks]
