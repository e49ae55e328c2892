"""Construct, improve, prove: Problem -> SolveResult."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem, with_contention
from apsched.schedule.result import Scored, SolvedBy, SolveResult
from apsched.schedule.schedule import Schedule
from apsched.schedule.score import score
from apsched.schedule.verify import verify
from apsched.solver.arrays.layers import find_periods
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Ints, ProblemArrays, problem_arrays
from apsched.solver.arrays.relaxed import without_copies, without_places
from apsched.solver.arrays.reordered import may_move
from apsched.solver.baselines import baselines
from apsched.solver.bounds.any_order.bound import moving_bound
from apsched.solver.bounds.contention import shared_bound
from apsched.solver.bounds.linear_program import lp_bound
from apsched.solver.bounds.memory_and_launches import later_bounds
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.step_time import TimeBound, step_time_bound
from apsched.solver.bounds.tighten import tighten
from apsched.solver.cpsat.windows.improve import improve
from apsched.solver.infeasible.explain import explain
from apsched.solver.program.evaluate import evaluate
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.min_memory import is_small, least_memory_with
from apsched.solver.reorder.reorder import ComputeMover, Moved
from apsched.solver.reorder.shorten_tail import with_shorter_tail
from apsched.solver.reorder.split_kernels import Fitting, cut_to_fit
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.search.late_waits import late_waits
from apsched.solver.search.local_search import Search
from apsched.solver.small import Answer, slack_limit, solve_whole
from apsched.units import ticks_to_us

Progress = Callable[[str, float, float], None]
"""Called with the stage, the best step time and the bound, in microseconds (nan where there is none
yet).
"""

_RUNGS_LAYERS = (0, 1, 3)
"""Layers of gathered weights above the floor: memory caps that are searched on the way to any
looser one.
"""
_SHARE_OF_WINDOWS = 0.025
"""Of the budget, for windows that CP-SAT decides."""
_ROUNDS_OF_ORDERS = 2
"""How often other orders of the compute are looked for, each time around the buckets found last."""
_WORTH_MOVING = 0.98
"""Share of the step time as captured up to which moving compute is all that is looked at."""
_SHARE_AS_CAPTURED = 4
"""Where compute may move, one in so many evaluations goes to buckets around it as captured."""
_SHARE_OF_THE_END = 4
"""Of the evaluations, one in so many goes to the buckets at the end, each time it changes."""
_EVALUATIONS_PER_WORK = 200
"""Evaluations of the search under one memory cap per unit of deterministic work in the budget."""


def solve(
    problem: Problem,
    caps: Caps | None = None,
    options: SolveOptions | None = None,
    *,
    progress: Progress | None = None,
    start: Schedule | None = None,
) -> SolveResult:
    """Return the fastest schedule found within ``caps``, with a proven bound.

    ``start`` is a schedule of this graph that was found under other caps. Where it keeps ``caps``
    nothing slower is returned, and where it is so near the bound that the search would stop there,
    nothing is searched; where it does not keep them it is not looked at. Raises InputError for a
    problem that breaks its own specification; caps that nothing keeps are an answer, not an error.
    """
    caps, options = caps or Caps(), options or SolveOptions()
    small = problem_arrays(problem)
    mover = ComputeMover(problem, small) if may_move(problem, caps) else None
    bound = (
        best_bound(problem, small, caps)
        if mover is None
        else moving_bound(problem, small, mover.orders, caps)
    )

    def report(stage: str, best_ticks: int) -> None:
        if progress is not None:
            progress(
                stage,
                ticks_to_us(best_ticks) if best_ticks >= 0 else float("nan"),
                ticks_to_us(bound.ticks),
            )

    if problem.contention is not None:
        bound = max(
            bound, shared_bound(problem, small, caps, in_order=mover is None), key=lambda b: b.ticks
        )

    report("bounds", -1)
    made = baselines(problem, small, caps)
    report("baselines", min((b.step_time_ticks for b in made if b.fits), default=-1))
    floor = least_memory_with(problem, small, mover, caps, options)
    fitting = cut_to_fit(
        Fitting(problem=problem, arrays=small, mover=mover, floor=floor), caps, options
    )
    free = _without_contention(problem, caps, options) if problem.contention is not None else None
    given = (
        score(problem, "start", start, caps)
        if start is not None and not verify(problem, start, caps)
        else None
    )
    if given is not None and given.step_time_ticks <= _good_enough(bound, options):
        time = given.step_time_ticks
        limit_ticks = slack_limit(time, options, made)
        answer = Answer(
            schedule=given.schedule,
            bound=bound,
            solved_by=SolvedBy.START,
            fastest_ticks=time,
            limit_ticks=limit_ticks,
        )
    elif is_small(problem) and problem.contention is None:
        answer = solve_whole(fitting, caps, options, bound, made, report)
    else:
        answer = _solve_by_search(
            fitting,
            caps,
            options,
            _bound_where_cut(fitting, problem, bound, caps),
            made,
            report,
            free,
        )
    if (
        fitting.problem is not problem
    ):  # where kernels are whole, compute is faster: only bounds for all orders hold
        answer = replace(answer, bound=bound, peak_bound_bytes=0, launches_bound=0)
    scored = (
        score(problem, "apsched", answer.schedule, caps) if answer.schedule is not None else None
    )
    if free is not None and (
        scored is None or not scored.fits or free.step_time_ticks < answer.fastest_ticks
    ):
        scored, answer = (
            free,
            replace(
                answer,
                solved_by=f"{answer.solved_by} without contention",
                fastest_ticks=free.step_time_ticks,
            ),
        )
    best = _never_worse(scored, made if given is None else (*made, given))
    if best is None:
        return SolveResult.infeasible(
            explain(fitting.problem, fitting.arrays, caps, options),
            bound_ticks=answer.bound.ticks,
            bound_source=answer.bound.source,
            baselines=made,
            floor_memory_bytes=floor.peak_bytes,
            floor_bound_bytes=floor.bound_bytes,
            solved_by=answer.solved_by,
            deterministic_work=answer.deterministic_work,
        )
    places = small if mover is None else without_places(small)
    later = later_bounds(
        problem,
        places,
        caps,
        best,
        answer.limit_ticks,
        max(floor.bound_bytes, answer.peak_bound_bytes),
    )
    launches = answer.launches_bound if best is scored else 0  # proven for the peak of ``scored``
    return SolveResult.found(
        best,
        bound_ticks=answer.bound.ticks,
        bound_source=answer.bound.source,
        baselines=made,
        floor_memory_bytes=floor.peak_bytes,
        floor_bound_bytes=floor.bound_bytes,
        fastest_ticks=answer.fastest_ticks or best.step_time_ticks,
        time_limit_ticks=later.limit_ticks,
        peak_bound_bytes=later.peak_bytes,
        launches_bound=max(later.launches, launches),
        solved_by=answer.solved_by if best is scored else best.name,
        deterministic_work=answer.deterministic_work,
    )


def _good_enough(bound: TimeBound, options: SolveOptions) -> int:
    """Return the step time at which the search stops: what is left would go to memory and launches
    anyway.
    """
    return int(bound.ticks * (1 + options.time_slack / 2))


def _bound_where_cut(fitting: Fitting, whole: Problem, bound: TimeBound, caps: Caps) -> TimeBound:
    """Return what the search stops near: ``bound``, or with kernels cut that of schedules which cut
    them, too.
    """
    if fitting.problem is whole or fitting.mover is None or whole.contention is not None:
        return bound
    return moving_bound(fitting.problem, fitting.arrays, fitting.mover.orders, caps)


def _without_contention(problem: Problem, caps: Caps, options: SolveOptions) -> Scored | None:
    """Return the answer on the machine without contention, with its figures on the one with it."""
    best = solve(with_contention(problem, None), caps, options).best
    return None if best is None else score(problem, "apsched", best.schedule, caps)


def best_bound(problem: Problem, small: ProblemArrays, caps: Caps) -> TimeBound:
    """Return the best of the combinatorial bounds and those by linear programming."""
    if not problem.collectives:
        return step_time_bound(problem, small, caps)
    problem, small = without_copies(problem, small)
    forced = tighten(small, caps)
    along_paths = path_bound(
        problem, replace(forced, need_slot=small.need_slot), caps
    )  # a reduction waited for sooner is still one
    return max(
        step_time_bound(problem, forced, caps),
        lp_bound(problem, forced, caps),
        along_paths,
        key=lambda b: b.ticks,
    )


def _solve_by_search(
    at: Fitting,
    caps: Caps,
    options: SolveOptions,
    bound: TimeBound,
    made: tuple[Scored, ...],
    report: Callable[[str, int], None],
    like: Scored | None,
) -> Answer:
    """Large problems: portfolio, local moves, other orders of the compute, then the second and
    third objective within the slack.

    The buckets of ``like`` are tried, too.
    """
    problem, small, mover, floor = at.problem, at.arrays, at.mover, at.floor
    evaluations = max(1, int(options.budget * _EVALUATIONS_PER_WORK))
    first = (
        evaluations
        if mover is None or not small.on_path.any()
        else max(1, evaluations // _SHARE_AS_CAPTURED)
    )
    search = Search(
        problem=problem,
        arrays=small,
        caps=caps,
        report=report,
        max_evaluations=first,
        floor_bytes=floor.peak_bytes,
    )
    blocks = mover.captured if mover is not None else None
    if mover is not None and (lower := floor.lowered_within(caps.memory_cap_bytes)) is not None:
        blocks = lower.blocks
        search = search.around(*mover.moved(blocks), first)
    search.portfolio()
    if like is not None:
        search.try_buckets(like.schedule.buckets)
    if search.best is None:
        least = just_in_time(search.problem, search.arrays, caps)
        schedule = (
            expand(search.problem, search.arrays, least.program) if least is not None else None
        )
        return Answer(schedule=schedule, bound=bound, solved_by=SolvedBy.JUST_IN_TIME)
    good_enough = _good_enough(bound, options)
    tighter = ladders(small, caps, floor.peak_bytes)
    if mover is None or blocks is None:
        search.descend_by_ladders(tighter, evaluations, good_enough)
    elif (
        not small.on_path.any()
    ):  # nothing to hide but the end: buckets first, as near as the bound of this order
        at_least = (
            best_bound(problem, small, caps) if np.array_equal(blocks, mover.captured) else bound
        )
        search.descend_by_ladders(tighter, evaluations, _good_enough(at_least, options))
    else:
        search.improve(good_enough)
        moved = _with_compute_moved(mover, blocks, search, evaluations // 2, good_enough)
        if moved.step_time_ticks > search.step_time_ticks * _WORTH_MOVING:
            if (
                moved.step_time_ticks > good_enough
            ):  # buckets around the compute as captured may be worth as much
                search = search.around(search.problem, search.arrays, evaluations)
                search.portfolio()
                search.descend_by_ladders(tighter, evaluations, good_enough)
                again = _with_compute_moved(mover, blocks, search, evaluations // 2, good_enough)
                moved = min(moved, again, key=lambda s: s.step_time_ticks)
            if moved.step_time_ticks * (1 + options.time_slack) >= search.step_time_ticks:
                moved = search  # what is within the slack is soon lost where costs are wrong
        search = moved
    if mover is not None:
        worth = int(search.step_time_ticks * options.time_slack)
        search = with_shorter_tail(
            mover, search, worth, evaluations // _SHARE_OF_THE_END, good_enough
        )
    improved = improve(
        search.pricer,
        caps,
        search.program(),
        replace(options, budget=options.budget * _SHARE_OF_WINDOWS),
        stop_at_ticks=good_enough,
    )
    report("windows", time := evaluate(search.arrays, improved.program).step_time_ticks)
    limit = slack_limit(time, options, made)
    program, solved_by = improved.program, SolvedBy.WINDOWS
    if search.best is not None and search.best.figures.step_time_ticks <= limit:
        search.lower_memory(limit)
        search.fewer_launches(limit)
        program, solved_by = search.program(), SolvedBy.SEARCH
    return Answer(
        schedule=expand(search.problem, search.arrays, late_waits(search.arrays, program, caps)),
        bound=bound,
        solved_by=solved_by,
        fastest_ticks=time,
        limit_ticks=limit,
        deterministic_work=improved.deterministic_work,
    )


def _with_compute_moved(
    mover: ComputeMover, blocks: Ints, search: Search, evaluations: int, good_enough: int
) -> Search:
    """Return the search around the best order of the compute that is found; ``search``, around
    ``blocks``, where none is better.
    """
    best = search
    for _ in range(_ROUNDS_OF_ORDERS):
        assert best.best is not None
        found = mover.improve(Moved(blocks=blocks, candidate=best.best), search.caps, good_enough)
        if np.array_equal(found.blocks, blocks):
            break
        blocks = found.blocks
        around = search.around(*mover.moved(blocks), evaluations)
        around.consider(found.candidate)
        around.portfolio()
        around.improve(good_enough)
        assert around.best is not None
        if best.step_time_ticks <= around.step_time_ticks:
            break
        best = around
    return best


def ladders(small: ProblemArrays, caps: Caps, floor_bytes: int) -> tuple[tuple[Caps, ...], ...]:
    """Return caps tighter than those at hand, the tightest first: what is found under them is found
    under looser ones, too.

    In prefetch a third and two thirds of the cap; in memory the floor, and one and three layers of
    gathered weights above it, whatever the cap.
    """
    gathered = [
        sum(
            int(small.output_bytes[row[0]])
            for row in period.collectives
            if small.kind[row[0]] == ALL_GATHER and not small.on_path[row[0]]
        )
        for period in find_periods(small)
    ]
    memory = sorted({floor_bytes + layers * max(gathered, default=0) for layers in _RUNGS_LAYERS})
    most = 0 if caps.max_prefetch is None else caps.max_prefetch
    prefetch = sorted({most * thirds // 3 for thirds in (1, 2)})
    return (
        tuple(replace(caps, max_prefetch=rung) for rung in prefetch if rung < most),
        tuple(
            replace(caps, memory_cap_bytes=rung)
            for rung in memory
            if caps.memory_cap_bytes is None or rung < caps.memory_cap_bytes
        ),
    )


def _never_worse(scored: Scored | None, made: tuple[Scored, ...]) -> Scored | None:
    """Return ``scored``, or the best baseline that fits where that is faster or ``scored`` breaks a
    cap.
    """
    fitting = [s for s in (scored, *made) if s is not None and s.fits]
    if not fitting:
        return None
    fastest = min(s.step_time_ticks for s in fitting)
    if (
        scored is not None
        and scored.fits
        and scored.step_time_ticks
        <= min((b.step_time_ticks for b in made if b.fits), default=scored.step_time_ticks)
    ):
        return scored
    return next(s for s in fitting if s.step_time_ticks == fastest)
