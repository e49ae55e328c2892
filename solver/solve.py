"""Problem -> SolveResult: bound, baselines, least memory, a small or a large problem, result."""

from dataclasses import replace

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem, with_contention
from apsched.schedule.result import SolveResult
from apsched.schedule.schedule import Schedule
from apsched.solver.answer import (
    Progress,
    Report,
    Task,
    as_given,
    near_enough,
    rescored,
    result_of,
    scored_start,
)
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders, may_move
from apsched.solver.baselines import baselines
from apsched.solver.bounds.best import best_bound
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.infeasible.explain import explain
from apsched.solver.large import solve_large
from apsched.solver.reorder.min_memory import is_small, least_memory_with
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.reorder.split_kernels import Fitting, cut_to_fit
from apsched.solver.small import solve_whole


def solve(
    problem: Problem,
    caps: Caps | None = None,
    options: SolveOptions | None = None,
    *,
    progress: Progress | None = None,
    start: Schedule | None = None,
    search_alone: bool = False,
    explained: bool = True,
    bound: TimeBound | None = None,
) -> SolveResult:
    """Return the fastest schedule found within ``caps``, with a proven bound.

    ``start`` is a schedule of this graph that was found under other caps. Where it keeps ``caps``
    nothing slower is returned, and where it is so near the bound that the search would stop there,
    nothing is searched; where it does not keep them it is not looked at. ``search_alone`` leaves
    CP-SAT out of small problems, but for the least memory. The answer claims ``bound``, and the
    search stops near it; by default it is the best that is known. Raises InputError for a problem
    that breaks its own specification; caps that nothing keeps are an answer, not an error, with the
    reasons where it is ``explained``.
    """
    options = options or SolveOptions()
    instance = Instance.of(problem, caps)
    mover = ComputeMover(instance) if may_move(problem, instance.caps) else None

    if bound is None:
        bound = best_bound(instance, _allowed_orders(instance, mover))
    report = Report(progress=progress, bound=bound)
    report("bounds", None)

    made = baselines(instance)
    report("baselines", min((b.step_time_ticks for b in made if b.fits), default=None))

    whole = _whole(instance, mover, options)
    task = Task(
        whole=whole,
        fitting=cut_to_fit(whole, options),
        options=options,
        bound=bound,
        made=made,
        report=report,
    )

    uncontended = None
    if problem.contention is not None:  # solved twice: without contention is a start, too
        alone = solve(with_contention(problem, None), caps, options, explained=False)
        uncontended = rescored(instance, alone.best)

    given, left_out = scored_start(instance, start), False
    if given is not None and given.step_time_ticks <= near_enough(bound, options):
        answer = as_given(task, given)
    elif problem.contention is None and is_small(problem, None if mover is None else mover.orders):
        left_out = search_alone
        answer = solve_large(task) if search_alone else solve_whole(task)
    else:
        answer = solve_large(task, like=uncontended)
    result = result_of(task, answer, given=given, uncontended=uncontended, explained=explained)
    return replace(result, may_improve=left_out)


def with_reasons(
    found: SolveResult, problem: Problem, caps: Caps, options: SolveOptions
) -> SolveResult:
    """Return ``found``, an answer of :func:`solve` without a schedule and without reasons, with
    the reasons.
    """
    instance = Instance.of(problem, caps)
    mover = ComputeMover(instance) if may_move(problem, caps) else None
    fitting = cut_to_fit(_whole(instance, mover, options), options)
    return replace(found, infeasibility=explain(fitting.instance, options))


def _whole(instance: Instance, mover: ComputeMover | None, options: SolveOptions) -> Fitting:
    floor = least_memory_with(instance, mover, options)
    return Fitting(instance=instance, mover=mover, floor=floor)


def _allowed_orders(instance: Instance, mover: ComputeMover | None) -> Orders | None:
    """Return the orders of the compute that the caps allow, also where the search keeps the one as
    captured; ``None`` where there is only that.
    """
    if mover is not None:
        return mover.orders
    return None if instance.caps.max_compute_move == 0 else Orders(instance)
