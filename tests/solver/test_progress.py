"""What the solver says while it works."""

import math

from apsched.solver import solve
from tests.helpers.problems.by_hand_gathers import two_gathers


def test_before_there_is_a_schedule_its_step_time_is_not_a_number() -> None:
    """The bound is there from the beginning."""
    told: list[tuple[str, float, float]] = []
    solve(two_gathers(needed_by=(0, 0)), progress=lambda *args: told.append(args))
    assert [stage for stage, best_us, _ in told if math.isnan(best_us)] == ["bounds"]
    assert all(0 < bound_us <= best_us or math.isnan(best_us) for _, best_us, bound_us in told)
