"""The MILP on problems worked out by hand."""

from dataclasses import replace

import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.problem.restriction import Restriction
from apsched.solver.milp.engine import Engine
from apsched.solver.milp.model import solve_milp
from tests.helpers.problems.by_hand import line
from tests.helpers.problems.by_hand_gathers import two_gathers


def solved(problem: Problem, caps: Caps) -> tuple[str, int | None, int | None]:
    """Return status, step time and launches."""
    result = solve_milp(problem, caps)
    return result.status, result.step_time_ticks, result.num_launches


def test_two_gathers_share_a_launch_where_copies_are_free() -> None:
    problem = two_gathers(needed_by=(0, 0))
    assert solved(problem, Caps()) == ("optimal", 25 + 40, 1)
    dear = replace(problem, copy_price=line(1000))
    assert solved(dear, Caps()) == ("optimal", 25 + 25 + 40, 2)


def test_a_cap_in_flight_may_be_met() -> None:
    """One gather has 512 bytes in flight, two have twice as many."""
    problem = two_gathers(needed_by=(0, 0))
    assert solved(problem, Caps(in_flight_cap_bytes=512)) == ("optimal", 25 + 25 + 40, 2)
    assert solved(problem, Caps(in_flight_cap_bytes=511))[0] == "infeasible"


def test_the_buffers_of_a_bucket_count_as_memory() -> None:
    """In a bucket both results and their copies are alive together; alone each is used at once."""
    problem = two_gathers(needed_by=(0, 2))
    least = solve_milp(problem, Caps(bucket_cap_bytes=0)).peak_memory_bytes
    together = solve_milp(problem, Caps())
    assert together.num_launches == 1
    assert least is not None
    assert together.peak_memory_bytes is not None
    assert least < together.peak_memory_bytes
    assert solved(problem, Caps(memory_cap_bytes=least))[::2] == ("optimal", 2)


def test_a_plan_says_where_a_launch_may_begin() -> None:
    """Behind the second node at the earliest: half of the transfer is left where it is needed."""
    problem = two_gathers(needed_by=(0, 3))
    late = replace(problem.collectives[1], restriction=Restriction(alone=True, start_slots=(2, 4)))
    problem = replace(problem, collectives=(problem.collectives[0], late))
    assert solved(problem, Caps()) == ("optimal", 25 + 20 + 25 + 10, 2)


def test_out_of_time_the_longest_path_and_the_relaxation_are_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gather, and all compute behind it."""
    problem = two_gathers(needed_by=(0, 0))
    assert solve_milp(problem, Caps(), time_limit_s=1e-6).bound_ticks == 25 + 40
    run = Engine.run

    def only_relaxed(self: Engine, model: object, *, relaxed: bool = False) -> object:
        answer = run(self, model, relaxed=True)
        return answer if relaxed else replace(answer, status="unknown", bound=float("-inf"))

    monkeypatch.setattr(Engine, "run", only_relaxed)
    assert solve_milp(problem, Caps()).bound_ticks == 25 + 40


def test_orders_that_only_tolerances_let_through_are_no_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where exact figures refuse whatever the solver comes up with, it is asked a few times more,
    and then nothing is known: not that there is nothing.
    """
    monkeypatch.setattr("apsched.solver.milp.model._MOST_REFUSALS", 2)
    monkeypatch.setattr("apsched.solver.milp.model.verify", lambda *_: ("over a limit",))
    result = solve_milp(two_gathers(needed_by=(0, 0)), Caps())
    assert (result.status, result.schedule) == ("unknown", None)
