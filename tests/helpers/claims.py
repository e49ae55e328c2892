"""Random problems with caps, and what of an answer's claims is false: judged by all schedules that
``verify`` accepts.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import SolveResult, Status
from apsched.schedule.schedule import Schedule
from apsched.solver import solve, solve_requested
from apsched.solver.milp.model import solve_milp
from tests.helpers.problems.random_plans import planned
from tests.helpers.problems.strategies import (
    random_caps,
    random_problem,
    with_coalesced_price,
    with_cuts,
    with_kernels,
)
from tests.helpers.verify_oracle import TooLargeError, find_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenClaim:
    """A claim that a schedule refutes."""

    claim: str
    told: int
    """The claim of the answer; 0 if that is no number."""
    schedule: Schedule


def random_case(
    seed: int, *, max_collectives: int = 3, max_compute: int = 4, **sizes: float
) -> tuple[Problem, Caps]:
    """Return problem and caps of ``seed``: with prologues, epilogues, casts, streams, and by chance
    kernels, cuts, a plan and coalesced forms; ``sizes`` are those of :class:`draft.Draft`.
    """
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=max_collectives, max_compute=max_compute, **sizes)
    if rng.random() < 0.3:
        problem = with_coalesced_price(problem, rng)
    caps = random_caps(rng, problem)
    if rng.random() < 0.25:
        problem = with_kernels(problem, seed)
        if rng.random() < 0.6:
            problem = with_cuts(problem, seed)
    if rng.random() < 0.2:
        problem = planned(rng, problem)
    return problem, replace(caps, max_compute_move=rng.choice((0, 0, 1, 2, 200, None)))


def answer(problem: Problem, caps: Caps, *, as_asked: bool) -> SolveResult:
    """Return the answer whose claims are judged; ``as_asked``: of a search that may keep compute as
    captured where the caps let it move.
    """
    solved = solve_requested if as_asked else solve
    return solved(problem, caps, SolveOptions(time_slack=0.0, budget=2.0))


def judged(seed: int, **sizes: float) -> tuple[SolveResult, list[BrokenClaim]]:
    """Return the answer to the case of ``seed``, and its false claims.

    ``TooLargeError`` where some claim takes too long to judge.
    """
    problem, caps = random_case(seed, **sizes)
    result = answer(problem, caps, as_asked=seed % 2 == 1)
    return result, list(broken_claims(problem, caps, result))


def num_with_true_claims(
    seeds: Iterable[int], wanted: Callable[[Problem], int], **sizes: float
) -> int:
    """Judge the cases of ``seeds`` that have what is ``wanted``, but for those that take too long;
    return their number. ``AssertionError`` for a false claim.
    """
    num_judged = 0
    for seed in seeds:
        if not wanted(random_case(seed, **sizes)[0]):
            continue
        try:
            result, broken = judged(seed, **sizes)
        except TooLargeError:
            continue
        assert broken == [], (seed, result.status, result.bound_source)
        num_judged += 1
    return num_judged


def num_as_pulp_solves_them(
    seeds: Iterable[int], wanted: Callable[[Problem], int], **sizes: float
) -> int:
    """Solve the smaller problems of ``seeds`` that have what is ``wanted`` with PuLP, too; return
    their number. ``AssertionError`` for another step time.
    """
    num_solved = 0
    for seed in seeds:
        problem = random_problem(random.Random(seed), max_collectives=3, max_compute=3, **sizes)
        if not wanted(problem):
            continue
        expected = solve(problem, Caps(), SolveOptions(time_slack=0.0))
        assert expected.best is not None
        assert solve_milp(problem, Caps()).step_time_ticks == expected.best.step_time_ticks, seed
        num_solved += 1
    return num_solved


def broken_claims(problem: Problem, caps: Caps, result: SolveResult) -> Iterator[BrokenClaim]:
    """Yield the claims of ``result`` that some schedule refutes, with the schedule."""
    floor = result.floor_bound_bytes
    yield from _refuted("floor", floor, problem, replace(caps, memory_cap_bytes=floor - 1))
    if result.best is None:
        yield from _refuted_infeasibility(problem, caps, result)
        return
    bound = result.bound_ticks
    claim = "optimal" if result.status is Status.OPTIMAL else "bound"
    yield from _refuted(claim, bound, problem, caps, limit_ticks=bound - 1)
    peak, limit = result.peak_bound_bytes, result.time_limit_ticks
    if peak > floor:
        lower = replace(caps, memory_cap_bytes=peak - 1)
        yield from _refuted("peak", peak, problem, lower, limit_ticks=limit)
    yield from _refuted(
        "launches",
        result.launches_bound,
        problem,
        replace(caps, memory_cap_bytes=result.best.peak_memory_bytes),
        limit_ticks=limit,
        most_launches=result.launches_bound - 1,
    )


def _refuted_infeasibility(
    problem: Problem, caps: Caps, result: SolveResult
) -> Iterator[BrokenClaim]:
    why = result.infeasibility
    assert why is not None
    if why.proven:
        yield from _refuted("infeasible", 0, problem, caps)
        for clash in why.clashes:
            others = {name: None for name in _names() if name not in clash}
            yield from _refuted("clash", 0, problem, replace(caps, **others))
    for relaxed in why.relaxations:
        if relaxed.bound > 0:
            lifted = dict.fromkeys(relaxed.lifted)
            lower = replace(caps, **lifted | {relaxed.cap: relaxed.bound - 1})
            yield from _refuted("relaxation", relaxed.bound, problem, lower)


def _names() -> tuple[str, ...]:
    """Return the caps that an answer can name as clashing."""
    return (
        "memory_cap_bytes",
        "bucket_cap_bytes",
        "max_topo_span",
        "max_prefetch",
        "in_flight_cap_bytes",
    )


def _refuted(
    claim: str, told: int, problem: Problem, caps: Caps, **limits: int
) -> Iterator[BrokenClaim]:
    if (caps.memory_cap_bytes or 0) < 0 or min(limits.values(), default=0) < 0:
        return
    found = find_schedule(problem, caps, **limits)
    if found is not None:
        yield BrokenClaim(claim=claim, told=told, schedule=found)
