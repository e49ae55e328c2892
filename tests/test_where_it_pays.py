"""Compute may move where a collective is on the path or reduced, and the result says so; with gathers alone it stays as captured."""

import pytest
from layered import Layer, layered

from apsched.config import Caps, SolveOptions
from apsched.pipeline import moving_where_it_pays
from apsched.solve_problem import solve

QUICK = SolveOptions(budget=1)


@pytest.mark.parametrize(("on_path", "backward"), [(False, False), (False, True), (True, False), (True, True)])
def test_compute_may_move_where_it_has_something_to_hide(on_path: bool, backward: bool) -> None:
    problem = layered([Layer(on_path=on_path)], backward=backward)
    assert moving_where_it_pays(problem, Caps(max_compute_move=200)).max_compute_move == (200 if on_path or backward else 0)


def test_the_result_says_what_held() -> None:
    """Backward with a collective on the path: compute moves, and that is faster. Forward without any: nothing moves."""
    problem = layered([Layer(ticks=(40, 60), on_path=True)] * 12, backward=True, ticks=(30, 1))
    result, captured = solve(problem, options=QUICK), solve(problem, max_compute_move=0, options=QUICK)
    assert result.caps.max_compute_move == 200
    assert result.chosen is not None
    assert result.chosen.moved_nodes > 0
    assert result.answer.fastest_ticks < captured.answer.fastest_ticks
    still = solve(layered([Layer(ticks=(40, 60))] * 12, ticks=(30, 1)), options=QUICK)
    assert still.caps.max_compute_move == 0
    assert still.chosen is not None
    assert still.chosen.moved_nodes == 0
