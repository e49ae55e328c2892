"""The whole formulation on problems worked out by hand: its optimum is that of a schedule, which
``verify`` accepts.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from ortools.sat.python import cp_model

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.problem.restriction import Restriction
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.cpsat.model import ExactModel
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.min_memory import horizon_ticks
from tests.helpers.problems.by_hand import ByHand, a_view_of_a_size, line
from tests.helpers.problems.by_hand_gathers import two_gathers
from tests.helpers.problems.layered import Layer, layered


def fastest(problem: Problem, caps: Caps, *, in_any_order: bool = False) -> int:
    """Return the least step time that the model proves, which a schedule within ``caps`` takes."""
    instance = Instance.of(problem, caps)
    orders = Orders(Instance.of(problem)) if in_any_order else None
    model = ExactModel(instance, horizon_ticks(instance), orders=orders)
    exact = model.minimize_step_time(SolveOptions(), None)
    assert exact.optimal
    assert exact.program is not None
    there = instance if orders is None else orders.in_order(exact.order)
    schedule = expand(there, exact.program)
    assert not verify(problem, schedule, caps)
    assert simulate(problem, schedule).step_time_ticks == exact.bound
    return exact.bound


@pytest.mark.parametrize("in_any_order", [False, True])
def test_a_cap_on_prefetch_counts_from_what_needs_a_member(*, in_any_order: bool) -> None:
    """The first gather is for the last node, the second one for the first node: both begin at
    once where copies are free, and right before their nodes where they are not.
    """
    problem = two_gathers(needed_by=(3, 0))
    caps = Caps(max_prefetch=0, max_compute_move=None if in_any_order else 0)
    assert fastest(problem, caps, in_any_order=in_any_order) == 25 + 40
    dear = replace(problem, copy_price=line(1000))
    assert fastest(dear, caps, in_any_order=in_any_order) == 25 + 30 + 25 + 10


@pytest.mark.parametrize("in_any_order", [False, True])
def test_a_launch_that_waits_for_a_gather_needs_it_where_its_own_result_is_needed(
    *, in_any_order: bool
) -> None:
    problem = two_gathers(needed_by=(-1, 3), chained=True)
    caps = Caps(max_prefetch=0, max_compute_move=None if in_any_order else 0)
    assert fastest(problem, caps, in_any_order=in_any_order) == 30 + 25 + 25 + 10


def test_a_view_of_a_size_that_data_decide_is_no_birth() -> None:
    """In any order: at the peak ``large`` is not there, though a view of it follows a node before
    the peak.
    """
    caps = Caps(max_compute_move=None, memory_cap_bytes=512 + 512 + 8192)
    assert fastest(a_view_of_a_size(), caps, in_any_order=True) == 5


def test_a_plan_may_keep_a_wait_late() -> None:
    """The wait stands behind two more nodes: what the gather brings is needed by the last one."""
    problem = two_gathers(needed_by=(3, 3))
    late = Restriction(alone=True, start_slots=(0, 2), wait_slots=(3, 3))
    planned = tuple(replace(c, restriction=late) for c in problem.collectives)
    problem = replace(problem, collectives=planned)
    assert fastest(problem, Caps()) == 25 + 25 + 10


def test_what_follows_the_waits_of_a_coalesced_launch_takes_its_time() -> None:
    """One coalesced launch beats two launches and any copy; its members' epilogues run behind
    it.
    """
    b = ByHand(prices={"all_gather": line(100)}, copy_price=line(1000), bucket_launch_ticks=3)
    results = []
    for i in range(2):
        shard = b.input(f"s{i}", 512, kept=True)
        start = b.start("all_gather", f"ag{i}", shard, 512, 1024, launch_ticks=3)
        wait = b.wait(f"w{i}", start)
        results.append(b.compute(f"after{i}", 7, wait, size=512))
    problem = b.output(b.compute("k", 10, *results, size=512))
    problem = replace(
        problem,
        keys=tuple(replace(key, coalesced_member_ticks=2) for key in problem.keys),
        collectives=tuple(
            replace(c, epilogue=(results[i],)) for i, c in enumerate(problem.collectives)
        ),
    )
    assert fastest(problem, Caps()) == 3 + 100 + 2 * 2 + 2 * 7 + 10


def test_prices_that_are_too_large_for_exact_products_stay_straight() -> None:
    """Two gathers of 8 GiB, a tick for 16 KiB and a latency: together they cost it once."""
    b = ByHand()
    gathered = [
        b.wait(
            f"w{i}",
            b.start("all_gather", f"ag{i}", b.input(f"s{i}", 512, kept=True), 512, 2**33),
        )
        for i in range(2)
    ]
    problem = b.output(b.compute("k", 10, *gathered, size=512))
    price = replace(line(0), size_bytes=(0, 2**34), price_ticks=(5000, 5000 + 2**20))
    problem = replace(problem, keys=tuple(replace(key, price=price) for key in problem.keys))
    assert fastest(problem, Caps()) == 5000 + 2**20 + 10


def test_work_ends_where_it_moves_neither_the_objective_nor_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a relaxation only the bound counts, and that of eight layers stays at 843 ticks."""
    budgets = budgets_of_runs(monkeypatch)
    instance, whole = Instance.of(layered([Layer()] * 8), Caps()), SolveOptions(budget=1.0)
    model = ExactModel(instance, horizon_ticks(instance), is_relaxation=True)
    exact = model.minimize_step_time(whole, None)
    assert not exact.optimal
    assert budgets[0] == whole.budget / 32
    assert [b / a for a, b in pairwise(budgets)] == [2.0] * (len(budgets) - 1)
    assert 1 < len(budgets) < 5
    assert exact.deterministic_work > sum(budgets) * 0.9


def budgets_of_runs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that grows with the limit of work of each run of CP-SAT."""
    budgets: list[float] = []
    solve = cp_model.CpSolver.solve

    def counted(solver: cp_model.CpSolver, model: cp_model.CpModel) -> object:
        budgets.append(solver.parameters.max_deterministic_time)
        return solve(solver, model)

    monkeypatch.setattr(cp_model.CpSolver, "solve", counted)
    return budgets
