"""Small problems: the whole formulation, objective after objective; where compute may move, its
order included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource, Scored, SolvedBy
from apsched.schedule.schedule import Schedule
from apsched.schedule.score import score
from apsched.solver.arrays.problem_arrays import Ints, ProblemArrays
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.cpsat.model import Exact, ExactModel
from apsched.solver.program.evaluate import evaluate
from apsched.solver.program.program import Program
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.min_memory import horizon_ticks
from apsched.solver.reorder.reorder import Moved
from apsched.solver.reorder.split_kernels import Fitting
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.search.late_waits import late_waits
from apsched.solver.search.local_search import Search

_SHARE_OF_ORDER = 0.1
"""Of the budget for each objective, what the whole formulation gets where it decides the order of
the compute, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A schedule to start from."""

    program: Program
    order: Ints | None = None
    """Its compute nodes as captured, in their order; None where that is as captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best schedule of one part of the solver."""

    schedule: Schedule | None
    bound: TimeBound
    solved_by: str
    hint: Hint | None = None
    """The schedule as the whole formulation has it."""
    fastest_ticks: int = 0
    """Step time before later objectives used any slack."""
    limit_ticks: int = 0
    """Step time that the later objectives could cost."""
    peak_bound_bytes: int = 0
    """Of the whole formulation, for schedules within that limit; 0 for none."""
    launches_bound: int = 0
    """Of the whole formulation, for schedules within that limit and the peak found; 0 for none."""
    deterministic_work: float = 0.0

    @property
    def value(self) -> tuple[bool, int]:
        """The lower the better."""
        return self.schedule is None, self.fastest_ticks


def solve_whole(
    at: Fitting,
    caps: Caps,
    options: SolveOptions,
    bound: TimeBound,
    made: tuple[Scored, ...],
    report: Callable[[str, int], None],
) -> Answer:
    """Small problems: the whole formulation; where compute may move, as captured first, and then
    with its order to be decided.
    """
    problem, small, mover, floor = at.problem, at.arrays, at.mover, at.floor
    search = Search(
        problem=problem,
        arrays=small,
        caps=caps,
        report=report,
        max_evaluations=2_000,
        floor_bytes=floor.peak_bytes,
    )
    search.portfolio()
    start = (
        search.program() if search.best is not None else _if_within(floor.as_captured, small, caps)
    )
    hint = Hint(program=start) if start is not None else None
    answer = _solve_exactly(
        problem, small, None, caps, options, bound, made, hint, report, all_orders=mover is None
    )
    if mover is None:
        return answer
    blocks = mover.captured
    lower = floor.lowered_within(caps.memory_cap_bytes) if answer.schedule is None else None
    if lower is not None:
        blocks = lower.blocks
        search = search.around(*mover.moved(blocks), search.max_evaluations)
        search.portfolio()
    hint = answer.hint
    if search.best is not None:
        found = mover.improve(Moved(blocks=blocks, candidate=search.best), caps, bound.ticks)
        if (
            answer.schedule is None
            or found.candidate.figures.step_time_ticks < answer.fastest_ticks
        ):
            around = search.around(*mover.moved(found.blocks), search.max_evaluations)
            around.consider(found.candidate)
            hint = Hint(program=around.program(), order=mover.compute_order(found.blocks))
    elif hint is None:
        lowest = just_in_time(search.problem, search.arrays, caps)
        known = (
            lower.program if lower is not None else None,
            lowest.program if lowest is not None else None,
        )
        start = next(
            (program for program in known if _if_within(program, search.arrays, caps) is not None),
            None,
        )
        hint = Hint(program=start, order=mover.compute_order(blocks)) if start is not None else None
    orders = mover.orders
    less = replace(options, budget=options.budget * _SHARE_OF_ORDER)
    other = _solve_exactly(
        problem,
        small,
        orders,
        caps,
        less,
        bound,
        made,
        hint,
        report,
        all_orders=not orders.keeps_together,
    )
    best = min(other, answer, key=lambda a: a.value)
    return replace(
        best,
        bound=other.bound,
        deterministic_work=answer.deterministic_work + other.deterministic_work,
    )


def _if_within(program: Program | None, small: ProblemArrays, caps: Caps) -> Program | None:
    """Return ``program`` where it keeps the cap on memory."""
    if (
        program is None
        or caps.memory_cap_bytes is None
        or evaluate(small, program).peak_memory_bytes <= caps.memory_cap_bytes
    ):
        return program
    return None


def _solve_exactly(
    problem: Problem,
    small: ProblemArrays,
    orders: Orders | None,
    caps: Caps,
    options: SolveOptions,
    bound: TimeBound,
    made: tuple[Scored, ...],
    hint: Hint | None,
    report: Callable[[str, int], None],
    *,
    all_orders: bool,
) -> Answer:
    """The whole formulation, objective after objective, the order of the compute included where
    there are ``orders``.

    Its bounds count where no order is left out.
    """
    model = ExactModel(problem, small, caps, horizon_ticks(problem, small), orders=orders)

    def minimized(minimize: Callable[..., Exact], start: Hint | None) -> tuple[Exact, Hint | None]:
        exact = minimize(options, start.program if start else None, start.order if start else None)
        found = (
            None
            if exact.program is None
            else Hint(program=exact.program, order=exact.order if orders is not None else None)
        )
        return exact, found

    def moved(p: Hint) -> tuple[Problem, ProblemArrays]:
        return (
            (problem, small)
            if orders is None or p.order is None
            else (orders.problem_of(p.order), orders.arrays_of(p.order))
        )

    def scored(p: Hint) -> Scored:
        there, places = moved(p)
        return score(problem, "", expand(there, places, p.program), caps)

    first, start = minimized(model.minimize_step_time, hint)
    work = first.deterministic_work
    if all_orders and start is not None and first.bound > bound.ticks:
        bound = TimeBound(ticks=first.bound, source=BoundSource.CP_SAT)
    best = start or hint
    if best is None:
        return Answer(
            schedule=None, bound=bound, solved_by=SolvedBy.CP_SAT, deterministic_work=work
        )
    time = scored(best).step_time_ticks
    limit = slack_limit(time, options, made)
    model.limit_step_time(limit)
    later: list[tuple[Callable[..., Exact], Callable[[Hint], None]]] = [
        (
            model.minimize_peak,
            lambda p: model.limit_peak(scored(p).peak_memory_bytes - small.kept_bytes),
        ),
        (model.minimize_launches, lambda p: model.limit_launches(len(p.program.partition.buckets))),
    ]
    if limit > time:
        later.append((model.minimize_step_time, lambda _: None))
    bounds: list[int] = []
    for minimize, then_limit in later:
        exact, found = minimized(minimize, best)
        bounds.append(exact.bound)
        work += exact.deterministic_work
        best = found or best
        then_limit(best)
    report("cp-sat", time)
    there, places = moved(best)
    return Answer(
        schedule=expand(there, places, late_waits(places, best.program, caps)),
        hint=best,
        bound=bound,
        solved_by=SolvedBy.CP_SAT,
        fastest_ticks=time,
        limit_ticks=limit,
        peak_bound_bytes=bounds[0] + small.kept_bytes if all_orders else 0,
        launches_bound=bounds[1] if all_orders else 0,
        deterministic_work=work,
    )


def slack_limit(time_ticks: int, options: SolveOptions, made: tuple[Scored, ...]) -> int:
    """Return the step time that lower memory and fewer launches may cost: never so much that a
    baseline that fits is faster.
    """
    fastest = min((b.step_time_ticks for b in made if b.fits), default=None)
    limit = int(time_ticks * (1 + options.time_slack))
    return limit if fastest is None else max(time_ticks, min(limit, fastest))
