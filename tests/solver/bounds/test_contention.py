"""Under contention: bounds hold for every order, and the answer is no slower than any baseline and
than the answer without contention.
"""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.kinds import NodeKind
from apsched.problem.contention import Contention
from apsched.problem.problem import Problem, with_contention
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import solve, solve_with_milp
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.bounds.best import fixed_order_bound
from apsched.solver.bounds.contention import shared_bound
from apsched.solver.program.to_schedule import expand
from tests.helpers.oracle import partitions
from tests.helpers.problems.contended import contended
from tests.helpers.problems.random_programs import random_program
from tests.helpers.problems.random_schedules import random_schedule, step_precedence
from tests.helpers.problems.strategies import layered_problem, random_caps, random_problem

_MOST_ORDERS = 4000
QUICK = SolveOptions(budget=0.2)


def all_schedules(problem: Problem) -> Iterator[Schedule]:
    """Yield every order with every partition, compute as captured; nodes that take no time, and are
    no decision, come when they can.
    """
    for buckets in partitions(problem, Caps()):
        shared = [Bucket(tuple(members)) for members in buckets]
        before = step_precedence(problem, shared)
        for first, second in pairwise(problem.compute_order):
            before[Step(StepKind.NODE, second)].add(Step(StepKind.NODE, first))
        output = Step(StepKind.NODE, problem.num_nodes - 1)
        before[output] = set(before) - {output}
        for steps in _orders(problem, before, (), frozenset()):
            yield Schedule(buckets=tuple(shared), steps=steps)


def _orders(
    problem: Problem, before: dict[Step, set[Step]], done: tuple[Step, ...], seen: frozenset[Step]
) -> Iterator[tuple[Step, ...]]:
    ready = sorted(step for step, earlier in before.items() if step not in seen and earlier <= seen)
    if not ready:
        if len(done) == len(before):
            yield done
        return
    at_once = [
        s
        for s in ready
        if s.kind is StepKind.NODE and problem.kinds[s.index] in (NodeKind.INPUT, NodeKind.VIEW)
    ]
    for step in at_once[:1] or ready:
        yield from _orders(problem, before, (*done, step), seen | {step})


def least_of_all(problem: Problem) -> int | None:
    """Return the least step time of all schedules; None where they are too many to look at."""
    best = None
    for count, schedule in enumerate(all_schedules(problem)):
        if count == _MOST_ORDERS:
            return None
        ticks = simulate(problem, schedule).step_time_ticks
        best = ticks if best is None else min(best, ticks)
    return best


@pytest.mark.parametrize("chunk", range(2))
def test_bounds_and_answers_beside_all_schedules(chunk: int) -> None:
    looked_at = met = 0
    for seed in range(chunk * 40, (chunk + 1) * 40):
        problem = contended(
            random_problem(random.Random(seed), max_collectives=3, max_compute=3), seed
        )
        least = least_of_all(problem)
        if least is None:
            continue
        looked_at += 1
        answer = solve(problem, Caps(), QUICK)
        assert answer.best is not None
        assert answer.bound_ticks <= least
        assert shared_bound(Instance.of(problem), in_order=True).ticks <= least
        assert shared_bound(Instance.of(problem), in_order=False).ticks <= least
        met += answer.best.step_time_ticks <= least
    assert looked_at > 20
    assert met >= 0.8 * looked_at, f"{met} of {looked_at} are the best there is"


def test_bounds_hold_for_any_order_of_many_problems() -> None:
    sharper = 0
    for seed in range(40):
        problem = contended(layered_problem(random.Random(seed), num_layers=1 + seed % 4), seed)
        small = problem_arrays(problem)
        as_captured = shared_bound(Instance(problem=problem, arrays=small), in_order=True).ticks
        any_order = shared_bound(Instance(problem=problem, arrays=small), in_order=False).ticks
        for trial in range(3):
            program = random_program(Pricer(Instance(problem=problem, arrays=small)), trial)
            assert (
                as_captured
                <= simulate(
                    problem, expand(Instance(problem=problem, arrays=small), program)
                ).step_time_ticks
            )
            assert any_order <= simulate(problem, random_schedule(problem, trial)).step_time_ticks
        sharper += as_captured > fixed_order_bound(Instance(problem=problem, arrays=small)).ticks
    assert sharper > 8


@pytest.mark.parametrize("max_compute_move", [0, 4])
def test_never_slower_than_what_is_known(max_compute_move: int) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        problem = contended(random_problem(rng, max_collectives=6, max_compute=5), seed)
        caps = Caps(**{**_fields(random_caps(rng, problem)), "max_compute_move": max_compute_move})
        answer = solve(problem, caps, QUICK)
        free = solve(with_contention(problem, None), caps, QUICK)
        assert (answer.best is None) == (free.best is None)
        if answer.best is None or free.best is None:
            continue
        assert verify(problem, answer.best.schedule, caps) == ()
        assert (
            answer.best.step_time_ticks == simulate(problem, answer.best.schedule).step_time_ticks
        )
        assert answer.bound_ticks <= answer.fastest_ticks <= answer.best.step_time_ticks
        assert answer.fastest_ticks <= simulate(problem, free.best.schedule).step_time_ticks
        assert all(
            answer.best.step_time_ticks <= known.step_time_ticks
            for known in answer.baselines
            if known.fits
        )
    assert solve(problem, caps, QUICK) == answer


def _fields(caps: Caps) -> dict[str, int | None]:
    return {name: getattr(caps, name) for name in Caps.__dataclass_fields__}


def test_what_does_not_know_contention_refuses_it() -> None:
    problem = with_contention(random_problem(random.Random(1)), Contention(compute_slowdown=(6, 5)))
    with pytest.raises(InputError, match="MILP does not know"):
        solve_with_milp(problem)
