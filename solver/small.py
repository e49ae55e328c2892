"""Small problems: the search, then the whole formulation from its answer, objective after
objective; where compute may move, its order included.
"""

from dataclasses import replace

from apsched.config import SolveOptions
from apsched.schedule.result import BoundSource, SolvedBy
from apsched.solver.answer import Answer, Hint, Task, slack_limit
from apsched.solver.arrays.floated import normal_form_is_all
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.formulation import Formulation
from apsched.solver.large import Climb, climbed
from apsched.solver.program.evaluate import evaluate
from apsched.solver.program.program import Program
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.min_memory import floated_model
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.search.front import Found
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.search.late_waits import late_waits

_SHARE_OF_ORDER = 0.1
"""Share of the budget of an objective for the formulation that also decides the order of the
compute.
"""
_SHARE_OF_LATER = 0.2
"""Share of the budget for each later objective where the step time is not proven least: its proof
would be about schedules near a step time that may not be the least.
"""

_OBJECTIVES = 4
"""Models that are solved at most: step time, peak, launches, and the step time with these kept."""


def solve_whole(task: Task) -> Answer:
    """Return the answer of the whole formulation, which starts from that of the search; where
    compute may move, as captured first, and then with its order to be decided.
    """
    at = task.fitting
    cap_bytes = at.instance.caps.memory_cap_bytes
    search = climbed(task)
    search_ticks = search.fastest_ticks(cap_bytes) or 0
    whole_budgets = _OBJECTIVES * (1 if at.mover is None else 1 + _SHARE_OF_ORDER)
    task.report.use.restart(whole_budgets * task.options.budget)
    hint = _hint_as_captured(task, search)
    answer = _solve_exactly(task, search, None, task.options, hint)
    if at.mover is None:
        answer = replace(answer, search_ticks=search_ticks)
        return _for_all_schedules(task, task.options, answer)
    hint = _hint_in_some_order(task, at.mover, search, answer)
    less = replace(task.options, budget=task.options.budget * _SHARE_OF_ORDER)
    other = _solve_exactly(task, search, at.mover, less, hint, than=answer)
    best = min(other, answer, key=lambda a: a.value)
    best = replace(
        best,
        bound=other.bound,
        search_ticks=search_ticks,
        solved_by=_solved_by(other, answer),
        deterministic_work=answer.deterministic_work + other.deterministic_work,
    )
    return _for_all_schedules(task, less, best)


def _solved_by(other: Answer, answer: Answer) -> str:
    """Return the method behind the better of both, of which ``other`` started from ``answer``."""
    if other.value > answer.value or other.solved_by == SolvedBy.SEARCH:
        return answer.solved_by
    return other.solved_by


def _for_all_schedules(task: Task, options: SolveOptions, answer: Answer) -> Answer:
    """Return ``answer``; where normal form leaves schedules out, with the bound of the whole
    formulation on a relaxation that has them all, if that is closer.
    """
    at, bound = task.fitting.instance, answer.bound
    if normal_form_is_all(at.problem, at.caps):
        return answer
    if answer.schedule is None or answer.fastest_ticks <= bound.ticks:
        return answer
    model = floated_model(at)
    if model is None:
        return answer
    exact = model.minimize_step_time(options, None)
    if bound.ticks < exact.bound <= answer.fastest_ticks:
        bound = TimeBound(ticks=exact.bound, source=BoundSource.CP_SAT)
    work = answer.deterministic_work + exact.deterministic_work
    return replace(answer, bound=bound, deterministic_work=work)


def _hint_as_captured(task: Task, search: Climb) -> Hint | None:
    """Return the fastest schedule of the search with the compute as captured, or else the one with
    the least memory; ``None`` where neither fits.
    """
    at = task.fitting
    found = search.base.front.fastest(at.instance.caps.memory_cap_bytes)
    if found is not None:
        return _hint(search, found, None)
    program = _if_within(at.floor.as_captured, at.instance)
    return Hint(program=program) if program is not None else None


def _hint_in_some_order(
    task: Task, mover: ComputeMover, search: Climb, answer: Answer
) -> Hint | None:
    """Return the start of the formulation that decides the order of the compute: the fastest
    schedule of the search or ``answer``, as captured, or one that fits if neither does.
    """
    at = task.fitting
    cap_bytes = at.instance.caps.memory_cap_bytes
    found = search.fastest(cap_bytes)
    is_slower = found is None or found.candidate.figures.step_time_ticks >= answer.fastest_ticks
    if answer.hint is not None and is_slower:
        return answer.hint
    if found is not None:
        return _hint(search, found, mover)
    lower = at.floor.lowered_within(cap_bytes)
    instance = at.instance if lower is None else mover.moved(lower.blocks)
    order = None if lower is None else mover.compute_order(lower.blocks)
    least = just_in_time(instance)
    for program in (
        lower.program if lower is not None else None,
        least.program if least is not None else None,
    ):
        if program is not None and _if_within(program, instance) is not None:
            return Hint(program=program, order=order)
    return None


def _hint(search: Climb, found: Found, mover: ComputeMover | None) -> Hint:
    """Return ``found`` as a start; with ``mover`` in its order of the compute."""
    around = search.around(found, search.task.fitting.instance.caps, 1)
    around.consider(found.candidate)
    return Hint(program=around.program(), order=_order_of(found.instance, mover))


def _order_of(instance: Instance, mover: ComputeMover | None) -> Ints | None:
    """Return the compute nodes as captured in the order of ``instance``, which ``mover`` made."""
    return None if mover is None else mover.compute_order(mover.blocks_of(instance.problem))


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


def _solve_exactly(
    task: Task,
    search: Climb,
    mover: ComputeMover | None,
    options: SolveOptions,
    hint: Hint | None,
    than: Answer | None = None,
) -> Answer:
    """The whole formulation, objective after objective, from ``hint`` and the schedules of
    ``search``; with ``mover`` the order of the compute included.

    Its bounds count where no schedule is left out. Where the step time is neither proven nor less
    than that of ``than``, only the bound is returned.
    """
    at = task.fitting.instance
    bound, kept_bytes = task.bound, at.arrays.kept_bytes
    no_order_left_out = (mover is None) == (task.fitting.mover is None)
    all_schedules = no_order_left_out and normal_form_is_all(at.problem, at.caps)
    whole = Formulation(at, mover, options, task.report.use)
    best, least = whole.minimized(whole.step_time, hint, bound.ticks)
    if all_schedules and best is not None and least > bound.ticks:
        bound = TimeBound(ticks=least, source=BoundSource.CP_SAT)
    time = None if best is None else whole.scored(best).step_time_ticks
    is_proven = time is not None and time <= least
    if best is None or time is None or not (is_proven or _is_faster(time, than)):
        return Answer(
            schedule=None,
            bound=bound,
            solved_by=SolvedBy.CP_SAT,
            deterministic_work=whole.deterministic_work,
        )
    task.report("cp-sat, step time", time)
    if not is_proven:
        whole.options = replace(options, budget=options.budget * _SHARE_OF_LATER)
    best, time = _smaller_start(task, whole, search, mover, best)
    whole.model.limit_step_time(slack_limit(time, options, task.made))
    best, peak = whole.improved(whole.peak, best)
    time = _still_within_slack(task, whole, best, time)
    task.report("cp-sat, peak", time)
    whole.model.limit_peak(whole.scored(best).peak_memory_bytes - kept_bytes)
    best, launches = whole.improved(whole.launches, best)
    time = _still_within_slack(task, whole, best, time)
    whole.model.limit_launches(len(best.program.partition.buckets))
    if slack_limit(time, options, task.made) > time:
        best, _ = whole.improved(whole.step_time, best, bound.ticks)
        time = _still_within_slack(task, whole, best, time)
    task.report("cp-sat, launches", time)
    moved = whole.moved(best)
    return Answer(
        schedule=expand(moved, late_waits(moved, best.program)),
        hint=best,
        bound=bound,
        solved_by=SolvedBy.CP_SAT if whole.gained else SolvedBy.SEARCH,
        fastest_ticks=time,
        peak_bound_bytes=peak + kept_bytes if all_schedules else 0,
        launches_bound=launches if all_schedules else 0,
        deterministic_work=whole.deterministic_work,
        trade_offs=search.trade_offs(at.caps.memory_cap_bytes),
    )


def _is_faster(time_ticks: int, than: Answer | None) -> bool:
    """Return whether a step time is less than that of ``than``, if that has a schedule."""
    return than is None or than.schedule is None or time_ticks < than.fastest_ticks


def _still_within_slack(task: Task, whole: Formulation, found: Hint, fastest_ticks: int) -> int:
    """Return the least step time, ``fastest_ticks`` or that of ``found``: where a later objective
    found a faster schedule, the next ones keep to the slack of that.
    """
    time = whole.scored(found).step_time_ticks
    if time < fastest_ticks:
        whole.model.limit_step_time(slack_limit(time, task.options, task.made))
    return min(time, fastest_ticks)


def _smaller_start(
    task: Task, whole: Formulation, search: Climb, mover: ComputeMover | None, best: Hint
) -> tuple[Hint, int]:
    """Return the schedule with the least memory of ``best`` and those of the search within the
    slack of the fastest, and the step time of the fastest: the search may find a faster one on its
    way to less memory.
    """
    time = whole.scored(best).step_time_ticks
    front = search if mover is not None else search.base.front
    while True:
        smaller = _smallest(search, mover, slack_limit(time, task.options, task.made))
        found = front.fastest(task.fitting.instance.caps.memory_cap_bytes)
        if found is None or found.candidate.figures.step_time_ticks >= time:
            return _smaller(whole, best, smaller), time
        best, time = _hint(search, found, mover), found.candidate.figures.step_time_ticks


def _smallest(search: Climb, mover: ComputeMover | None, limit_ticks: int) -> Hint | None:
    """Return the schedule of the search with the least memory within a step time; without ``mover``
    of those with the compute as captured.
    """
    if mover is not None:
        found = search.smallest(limit_ticks)
    else:
        found = search.base.front.smallest(limit_ticks)
    if found is None:
        return None
    lower = search.lowered(found, limit_ticks)
    return Hint(program=lower.program(), order=_order_of(lower.instance, mover))


def _smaller(whole: Formulation, best: Hint, other: Hint | None) -> Hint:
    """Return that of both which has less memory, or fewer launches with as much."""

    def value(hint: Hint) -> tuple[int, int]:
        scored = whole.scored(hint)
        return scored.peak_memory_bytes, scored.num_launches

    return best if other is None else min(best, other, key=value)
