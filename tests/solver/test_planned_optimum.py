"""Under a plan, too, the solver's answer equals exhaustive search on small random problems, and so
does the MILP's.

``APSCHED_PLANS=2000 pytest tests/solver/test_planned_optimum.py`` for as many seeds.
"""

import os
import random
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest

from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.rules import Plan, Rule
from apsched.problem.problem import Problem, without_plan
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import least_memory as solver_least_memory
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.bounds.linear_program import lp_bound
from apsched.solver.milp.model import solve_milp
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.construct import construct
from apsched.solver.search.just_in_time import JUST_IN_TIME
from apsched.solver.search.local_search import policies
from tests.helpers.oracle import best_schedule, least_memory
from tests.helpers.problems.random_plans import named, planned
from tests.helpers.problems.strategies import random_caps, random_problem

NUM_SEEDS = int(os.environ.get("APSCHED_PLANS", "60"))
STRICT = SolveOptions(time_slack=0.0, budget=20.0)


def case(seed: int, *, max_collectives: int = 5, max_compute: int = 4) -> tuple[Problem, Caps]:
    """Return a problem under a plan, and caps; every third has a memory cap at, just under or just
    above the least that is possible.
    """
    rng = random.Random(90_000 + seed)
    problem = planned(
        rng, random_problem(rng, max_collectives=max_collectives, max_compute=max_compute)
    )
    caps = random_caps(rng, problem) if seed % 2 else Caps()
    if seed % 3 == 0 and (floor := least_memory(problem, caps)) is not None:
        caps = replace(caps, memory_cap_bytes=max(0, floor + rng.choice((-1, 0, 0, 512, 4096))))
    return problem, caps


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_the_optimum_under_a_plan_is_that_of_exhaustive_search(seed: int) -> None:
    """Step time, then peak, then launches; infeasible exactly where nothing keeps plan and caps."""
    problem, caps = case(seed)
    best, result = best_schedule(problem, caps), solve(problem, caps, STRICT)
    if best is None:
        assert result.status == "infeasible"
        assert result.infeasibility is not None
        return
    assert result.best is not None
    assert verify(problem, result.best.schedule, caps) == ()
    assert (
        result.best.step_time_ticks,
        result.best.peak_memory_bytes,
        result.best.num_launches,
    ) == best.value
    assert result.bound_ticks <= best.step_time_ticks
    assert (result.status == "optimal") == (result.bound_ticks == best.step_time_ticks)
    if not problem.travels:  # exhaustive search is of the normal form
        assert (result.status, result.bound_ticks) == ("optimal", best.step_time_ticks)


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 4))
def test_the_milp_agrees_under_a_plan(seed: int) -> None:
    problem, caps = case(seed, max_collectives=4, max_compute=3)
    best, result = best_schedule(problem, caps), solve_milp(problem, caps)
    if best is None:
        assert (result.status, result.schedule) == ("infeasible", None)
        return
    assert (result.step_time_ticks, result.peak_memory_bytes, result.num_launches) == best.value


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 3))
def test_the_floor_under_a_plan_is_the_least_memory_of_any_schedule(seed: int) -> None:
    problem, caps = case(3 * seed + 1)
    floor = least_memory(problem, caps)
    if floor is not None:
        found, bound = solver_least_memory(problem, caps, STRICT)
        assert found == floor
        assert bound == floor or (
            bound < floor and problem.travels
        )  # the search above is of the normal form


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_search_and_windows_keep_the_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What large problems go through, on small ones: never against the plan, never below the
    optimum, a bound that holds.
    """
    monkeypatch.setattr(sys.modules["apsched.solver.reorder.min_memory"], "_SMALL_LITERALS", -1)
    problem, caps = case(seed)
    best, result = (
        best_schedule(problem, caps),
        solve(problem, caps, SolveOptions(time_slack=0.0, budget=2.0)),
    )
    if best is None:
        assert result.best is None
        return
    assert result.bound_ticks <= best.step_time_ticks
    assert result.floor_bound_bytes <= best.peak_memory_bytes
    if caps == Caps():
        assert result.best is not None
    if result.best is not None:
        assert verify(problem, result.best.schedule, caps) == ()
        assert result.best.step_time_ticks >= best.step_time_ticks


def test_a_problem_without_its_plan_is_the_problem_before() -> None:
    alone = 0
    for seed in range(200):
        problem = named(random_problem(random.Random(seed), max_collectives=4, max_compute=4))
        under = planned(random.Random(seed), problem)
        assert without_plan(under) == problem
        assert without_plan(problem) is problem
        alone += any(c.bucketable and not c.may_share for c in under.collectives)
    assert alone > 20


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 2))
def test_a_plan_never_makes_it_faster(seed: int) -> None:
    problem, caps = case(seed)
    under, free = solve(problem, caps, STRICT), solve(without_plan(problem), caps, STRICT)
    if under.best is not None:
        assert free.best is not None
        assert free.best.step_time_ticks <= under.best.step_time_ticks


def test_baselines_know_no_plan_and_say_what_they_break() -> None:
    """Somewhere a baseline breaks a group, and does not fit for that."""
    said = [
        violation
        for seed in range(60)
        for b in solve(*case(seed), SolveOptions(budget=0.0)).baselines
        for violation in b.violations
    ]
    assert any("launches, not in one (rule" in violation for violation in said)


def test_the_plans_are_not_all_of_one_sort() -> None:
    """Each thing that a rule can ask for is among them, and some bind; otherwise the tests above
    would say little.
    """
    seen: Counter[str] = Counter()
    for seed in range(60):
        problem, caps = case(seed)
        asked = [c.restriction for c in problem.collectives]
        seen["group"] += any(r.group is not None for r in asked)
        seen["closed"] += any(r.closed for r in asked)
        seen["start"] += any(r.start_slots is not None for r in asked)
        seen["wait"] += any(r.wait_slots is not None for r in asked)
        free, under = best_schedule(without_plan(problem), caps), best_schedule(problem, caps)
        seen["slower"] += (
            free is not None
            and under is not None
            and simulate(problem, under.schedule).step_time_ticks > free.step_time_ticks
        )
        seen["infeasible"] += free is not None and under is None
    assert min(seen[what] for what in ("group", "closed", "start", "wait", "slower")) >= 4
    assert seen["infeasible"] >= 2


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 2))
def test_the_pass_over_the_compute_keeps_the_plan(seed: int) -> None:
    """Whatever the policy: what search places is where the plan wants it, before anything is
    judged.
    """
    problem, _ = case(seed)
    small = problem_arrays(problem)
    pricer = Pricer(Instance(problem=problem, arrays=small))
    for policy in (*JUST_IN_TIME, *policies(small)):
        program = construct(
            pricer, pricer.partition_of(pricer.tables.plan_groups.leader), policy, Caps()
        )
        assert (
            verify(problem, expand(Instance(problem=problem, arrays=small), program), Caps()) == ()
        )


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_bounds_hold_where_every_bucket_is_closed(seed: int) -> None:
    """The exact prices of closed buckets in the linear program are no more than what schedules
    pay.
    """
    rng = random.Random(70_000 + seed)
    problem = named(random_problem(rng, max_collectives=6, max_compute=3))
    names: dict[int, list[str]] = {}
    for c in problem.collectives:
        if c.may_share:
            names.setdefault(c.key, []).append(re.escape(c.module))
    rules = tuple(Rule(match="|".join(mine), group=True, closed=True) for mine in names.values())
    try:
        problem = restricted(problem, Plan(rules))
    except (
        InputError
    ):  # the members of a group wait for each other, or are needed before all are ready
        return
    small, best = problem_arrays(problem), best_schedule(problem, Caps())
    assert best is not None
    assert lp_bound(Instance(problem=problem, arrays=small)).ticks <= best.step_time_ticks
