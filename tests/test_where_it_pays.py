"""Compute stays as captured where no collective is on the path, and the result says so."""

import pytest
from layered import Layer, layered

from apsched.config import SolveOptions
from apsched.solve_problem import solve

QUICK = SolveOptions(budget=1)


@pytest.mark.parametrize("on_path", [False, True])
def test_compute_moves_only_where_a_collective_is_on_the_path(on_path: bool) -> None:
    problem = layered([Layer(ticks=(40, 60), on_path=on_path)] * 12, backward=True, ticks=(30, 1))
    result, captured = solve(problem, options=QUICK), solve(problem, max_compute_move=0, options=QUICK)
    assert result.caps.max_compute_move == (200 if on_path else 0)
    assert result.chosen is not None
    assert (result.chosen.moved_nodes > 0) == on_path
    assert (result.answer.fastest_ticks < captured.answer.fastest_ticks) == on_path
