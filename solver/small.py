"""Small problems: the whole formulation, objective after objective; where compute may move, its
order included.
"""

from collections.abc import Callable
from dataclasses import replace

from apsched.config import SolveOptions
from apsched.schedule.result import BoundSource, Scored, SolvedBy
from apsched.schedule.score import score
from apsched.solver.answer import Answer, Hint, Task, slack_limit
from apsched.solver.arrays.floated import normal_form_is_all
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.cpsat.model import Exact, ExactModel
from apsched.solver.program.evaluate import evaluate
from apsched.solver.program.program import Program
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.min_memory import floated_model, horizon_ticks
from apsched.solver.reorder.reorder import ComputeMover, Moved
from apsched.solver.search.decoder import BudgetUse
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.search.late_waits import late_waits
from apsched.solver.search.local_search import Search

_EVALUATIONS = 2_000
"""Of the search for what the formulation starts from."""
_SHARE_OF_ORDER = 0.1
"""Of the budget for each objective, what the whole formulation gets where it decides the order of
the compute, too.
"""
_SHARE_OF_LATER = 0.2
"""Of the budget, what each later objective gets where the step time was not proven least: its proof
would be about schedules near a step time that may not be the least.
"""

_OBJECTIVES = 4
"""Models that are solved at most: step time, peak, launches, and the step time with these kept."""


def solve_whole(task: Task) -> Answer:
    """Small problems: the whole formulation; where compute may move, as captured first, and then
    with its order to be decided.
    """
    at = task.fitting
    search = Search(
        instance=at.instance,
        report=task.report,
        max_evaluations=_EVALUATIONS,
        floor_bytes=at.floor.peak_bytes,
    )
    search.portfolio()
    start = _if_within(at.floor.as_captured, at.instance)
    if search.best is not None:
        start = search.program()
    hint = Hint(program=start) if start is not None else None
    whole_budgets = _OBJECTIVES * (1 if at.mover is None else 1 + _SHARE_OF_ORDER)
    task.report.use.planned = whole_budgets * task.options.budget
    answer = _solve_exactly(task, None, task.options, hint)
    if at.mover is None:
        return _for_all_schedules(task, task.options, answer)
    hint = _hint_in_some_order(task, at.mover, search, answer)
    less = replace(task.options, budget=task.options.budget * _SHARE_OF_ORDER)
    other = _solve_exactly(task, at.mover.orders, less, hint)
    best = min(other, answer, key=lambda a: a.value)
    best = replace(
        best,
        bound=other.bound,
        deterministic_work=answer.deterministic_work + other.deterministic_work,
    )
    return _for_all_schedules(task, less, best)


def _for_all_schedules(task: Task, options: SolveOptions, answer: Answer) -> Answer:
    """Return ``answer``; where normal form leaves schedules out, with the bound of the whole
    formulation on a relaxation that has them all, if that is closer.
    """
    at, bound = task.fitting.instance, answer.bound
    if normal_form_is_all(at.problem, at.caps):
        return answer
    if answer.schedule is None or answer.fastest_ticks <= bound.ticks:
        return answer
    exact = floated_model(at).minimize_step_time(options, None)
    if bound.ticks < exact.bound <= answer.fastest_ticks:
        bound = TimeBound(ticks=exact.bound, source=BoundSource.CP_SAT)
    work = answer.deterministic_work + exact.deterministic_work
    return replace(answer, bound=bound, deterministic_work=work)


def _hint_in_some_order(
    task: Task, mover: ComputeMover, search: Search, answer: Answer
) -> Hint | None:
    """Return the start of the formulation that decides the order of the compute: ``answer``, as
    captured, or a faster one, or one that fits if that does not.
    """
    caps = task.fitting.instance.caps
    blocks, lower = mover.captured, None
    if answer.schedule is None:
        lower = task.fitting.floor.lowered_within(caps.memory_cap_bytes)
    if lower is not None:
        blocks = lower.blocks
        search = search.around(mover.moved(blocks), search.max_evaluations)
        search.portfolio()
    if search.best is not None:
        start = Moved(blocks=blocks, candidate=search.best)
        found = mover.improve(start, caps, task.bound.ticks)
        is_faster = found.candidate.figures.step_time_ticks < answer.fastest_ticks
        if answer.schedule is not None and not is_faster:
            return answer.hint
        around = search.around(mover.moved(found.blocks), search.max_evaluations)
        around.consider(found.candidate)
        return Hint(program=around.program(), order=mover.compute_order(found.blocks))
    if answer.hint is not None:
        return answer.hint
    lowest = just_in_time(search.instance)
    known = (
        lower.program if lower is not None else None,
        lowest.program if lowest is not None else None,
    )
    for program in known:
        if program is not None and _if_within(program, search.instance) is not None:
            return Hint(program=program, order=mover.compute_order(blocks))
    return None


def _if_within(program: Program | None, instance: Instance) -> Program | None:
    """Return ``program`` where it keeps the cap on memory."""
    cap_bytes = instance.caps.memory_cap_bytes
    if (
        program is None
        or cap_bytes is None
        or evaluate(instance.arrays, program).peak_memory_bytes <= cap_bytes
    ):
        return program
    return None


class _Formulation:
    """The whole formulation of ``instance``; with ``orders``, the order of the compute included.
    Its work counts as ``use`` of the budget.
    """

    def __init__(
        self, instance: Instance, orders: Orders | None, options: SolveOptions, use: BudgetUse
    ) -> None:
        self.instance, self.orders, self.options = instance, orders, options
        self.model = ExactModel(instance, horizon_ticks(instance), orders=orders)
        self.use, self.deterministic_work = use, 0.0

    def minimized(
        self, minimize: Callable[..., Exact], start: Hint | None
    ) -> tuple[Exact, Hint | None]:
        """Return the result of minimizing from ``start``, and that as a hint."""
        program, order = (start.program, start.order) if start is not None else (None, None)
        exact = minimize(self.options, program, order)
        self.deterministic_work += exact.deterministic_work
        self.use.done += exact.deterministic_work
        if exact.program is None:
            return exact, None
        order = exact.order if self.orders is not None else None
        return exact, Hint(program=exact.program, order=order)

    def moved(self, hint: Hint) -> Instance:
        """Return the instance in the order of ``hint``."""
        if self.orders is None or hint.order is None:
            return self.instance
        return self.orders.in_order(hint.order)

    def scored(self, hint: Hint) -> Scored:
        """Return the schedule of ``hint`` with its figures."""
        schedule = expand(self.moved(hint), hint.program)
        return score(self.instance.problem, "", schedule, self.instance.caps)


def _solve_exactly(
    task: Task, orders: Orders | None, options: SolveOptions, hint: Hint | None
) -> Answer:
    """The whole formulation, objective after objective, the order of the compute included where
    there are ``orders``.

    Its bounds count where no schedule is left out.
    """
    at = task.fitting.instance
    bound, kept_bytes = task.bound, task.fitting.instance.arrays.kept_bytes
    no_order_left_out = (orders is None) == (task.fitting.mover is None)
    all_schedules = no_order_left_out and normal_form_is_all(at.problem, at.caps)
    whole = _Formulation(task.fitting.instance, orders, options, task.report.use)
    model = whole.model
    first, start = whole.minimized(model.minimize_step_time, hint)
    if all_schedules and start is not None and first.bound > bound.ticks:
        bound = TimeBound(ticks=first.bound, source=BoundSource.CP_SAT)
    best = start or hint
    if best is None:
        return Answer(
            schedule=None,
            bound=bound,
            solved_by=SolvedBy.CP_SAT,
            deterministic_work=whole.deterministic_work,
        )
    time = whole.scored(best).step_time_ticks
    task.report("cp-sat, step time", time)
    if not first.optimal and time > bound.ticks:
        whole.options = replace(options, budget=options.budget * _SHARE_OF_LATER)
    limit = slack_limit(time, options, task.made)
    model.limit_step_time(limit)
    peak, found = whole.minimized(model.minimize_peak, best)
    best = found or best
    task.report("cp-sat, peak", time)
    model.limit_peak(whole.scored(best).peak_memory_bytes - kept_bytes)
    launches, found = whole.minimized(model.minimize_launches, best)
    best = found or best
    model.limit_launches(len(best.program.partition.buckets))
    if limit > time:
        _, found = whole.minimized(model.minimize_step_time, best)
        best = found or best
    task.report("cp-sat, launches", time)
    moved = whole.moved(best)
    return Answer(
        schedule=expand(moved, late_waits(moved, best.program)),
        hint=best,
        bound=bound,
        solved_by=SolvedBy.CP_SAT,
        fastest_ticks=time,
        limit_ticks=limit,
        peak_bound_bytes=peak.bound + kept_bytes if all_schedules else 0,
        launches_bound=launches.bound if all_schedules else 0,
        deterministic_work=whole.deterministic_work,
    )
