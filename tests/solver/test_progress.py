"""Progress reports of the solver."""

import math
import random

from apsched.config import Caps, SolveOptions
from apsched.solver import solve, solve_requested
from apsched.units import ticks_to_us
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.by_hand_gathers import two_gathers
from tests.helpers.problems.strategies import layered_problem


def test_before_there_is_a_schedule_its_step_time_is_not_a_number() -> None:
    """The bound is there from the beginning."""
    told: list[tuple[str, float, float, float]] = []
    solve(two_gathers(needed_by=(0, 0)), progress=lambda *args: told.append(args))
    assert [stage for stage, best_us, *_ in told if math.isnan(best_us)] == ["bounds"]
    assert all(0 < bound_us <= best_us or math.isnan(best_us) for _, best_us, bound_us, _ in told)


def test_the_bound_shown_is_the_one_claimed() -> None:
    """Compute stays as captured, and what is claimed is about all orders that the cap allows."""
    b = ByHand(prices={"reduce_scatter": line(200)})
    x = b.input("x", 512)
    grad = b.compute("g", 100, x, size=512)
    others = [b.compute(f"f{i}", 1, x, size=512) for i in range(2)]
    problem = b.output(*others, b.wait("w", b.start("reduce_scatter", "rs", grad, 512, 512)))
    shown: list[float] = []
    result = solve_requested(
        problem, Caps(max_compute_move=3), progress=lambda _, __, bound, ___: shown.append(bound)
    )
    assert set(shown) == {ticks_to_us(result.bound_ticks)}


def test_a_search_reports_a_rising_share_of_its_budget() -> None:
    problem = layered_problem(random.Random(0), num_layers=16)
    shares: list[float] = []
    solve(
        problem,
        options=SolveOptions(budget=2.0),
        progress=lambda _, __, ___, share: shares.append(share),
    )
    known = [share for share in shares if not math.isnan(share)]
    assert known
    assert known == sorted(known)
    assert 0 < known[-1] <= 1
