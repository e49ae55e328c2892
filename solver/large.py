"""Large problems: buckets by search, other orders of the compute where it may move, windows that
CP-SAT decides, then the second and third objective within the slack.
"""

from dataclasses import dataclass, replace

import numpy as np

from apsched.config import Caps
from apsched.schedule.result import Scored, SolvedBy
from apsched.solver.answer import Answer, Task, near_enough, slack_limit
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.layers import find_periods
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Ints
from apsched.solver.bounds.best import any_order_bound, fixed_order_bound
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.cpsat.windows.improve import improve
from apsched.solver.program.evaluate import evaluate
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.reorder import ComputeMover, Moved
from apsched.solver.reorder.shorten_tail import MOST_ROUNDS, with_shorter_tail
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.search.late_waits import late_waits
from apsched.solver.search.local_search import Search

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
_EVALUATIONS_PER_WORK = 300
"""Evaluations of the search under one memory cap per unit of deterministic work in the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    """How far the search goes."""

    evaluations: int
    enough_ticks: int
    """Step time at which it stops."""
    ladders: tuple[tuple[Caps, ...], ...]


def solve_large(task: Task, like: Scored | None) -> Answer:
    """Return the best schedule that the search finds; the buckets of ``like`` are tried, too."""
    at, options = task.fitting, task.options
    bound = _bound_where_cut(task)
    effort = _Effort(
        evaluations=max(1, int(options.budget * _EVALUATIONS_PER_WORK)),
        enough_ticks=near_enough(bound, options),
        ladders=ladders(at.instance, at.floor.peak_bytes),
    )
    task.report.use.planned = _planned_evaluations(task, effort)
    search, blocks = _begun(task, effort)
    search.portfolio()
    if like is not None:
        search.try_buckets(like.schedule.buckets)
    if search.best is None:
        least = just_in_time(search.instance)
        schedule = expand(search.instance, least.program) if least is not None else None
        return Answer(schedule=schedule, bound=bound, solved_by=SolvedBy.JUST_IN_TIME)
    if at.mover is None:
        search.descend_by_ladders(effort.ladders, effort.evaluations, effort.enough_ticks)
        return _finished(task, bound, search, effort)
    if at.instance.arrays.on_path.any():
        search = _with_best_order(at.mover, blocks, search, effort, options.time_slack)
    else:  # nothing to hide but the end: buckets first, as near as the bound of this order
        as_captured = np.array_equal(blocks, at.mover.captured)
        at_least = fixed_order_bound(at.instance) if as_captured else bound
        enough_ticks = near_enough(at_least, options)
        search.descend_by_ladders(effort.ladders, effort.evaluations, enough_ticks)
    worth = int(search.step_time_ticks * options.time_slack)
    evaluations = effort.evaluations // _SHARE_OF_THE_END
    search = with_shorter_tail(at.mover, search, worth, evaluations, effort.enough_ticks)
    return _finished(task, bound, search, effort)


def _planned_evaluations(task: Task, effort: _Effort) -> int:
    """Return the evaluations of all searches at most; most problems need fewer."""
    each = effort.evaluations
    total = each * (1 + sum(map(len, effort.ladders)))
    if task.fitting.mover is None:
        return total
    if task.fitting.instance.arrays.on_path.any():
        total += each // _SHARE_AS_CAPTURED + 2 * _ROUNDS_OF_ORDERS * (each // 2)
    return total + MOST_ROUNDS * (each // _SHARE_OF_THE_END)


def _bound_where_cut(task: Task) -> TimeBound:
    """Return the bound that the search stops near: that of the task, or with kernels cut that of
    schedules which cut them, too.
    """
    at = task.fitting
    if not task.is_cut or at.mover is None or at.instance.problem.contention is not None:
        return task.bound
    return any_order_bound(at.instance, at.mover.orders)


def _begun(task: Task, effort: _Effort) -> tuple[Search, Ints]:
    """Return a search around the compute as captured, or where its memory is short, around an order
    with a lower peak; and the blocks of that order.
    """
    at = task.fitting
    first = effort.evaluations
    if at.mover is not None and at.instance.arrays.on_path.any():
        first = max(1, first // _SHARE_AS_CAPTURED)
    search = Search(
        instance=at.instance,
        report=task.report,
        max_evaluations=first,
        floor_bytes=at.floor.peak_bytes,
        use=task.report.use,
    )
    if at.mover is None:
        return search, np.zeros(0, dtype=np.int64)
    lower = at.floor.lowered_within(at.instance.caps.memory_cap_bytes)
    if lower is None:
        return search, at.mover.captured
    return search.around(at.mover.moved(lower.blocks), first), lower.blocks


def _with_best_order(
    mover: ComputeMover, blocks: Ints, search: Search, effort: _Effort, slack: float
) -> Search:
    """Return the best search of those around ``blocks`` and around better orders of the compute."""
    search.improve(effort.enough_ticks)
    moved = _with_compute_moved(mover, blocks, search, effort)
    if moved.step_time_ticks <= search.step_time_ticks * _WORTH_MOVING:
        return moved
    if moved.step_time_ticks > effort.enough_ticks:
        # buckets around the compute as captured may be worth as much
        search = search.around(search.instance, effort.evaluations)
        search.portfolio()
        search.descend_by_ladders(effort.ladders, effort.evaluations, effort.enough_ticks)
        again = _with_compute_moved(mover, blocks, search, effort)
        moved = min(moved, again, key=lambda s: s.step_time_ticks)
    # what is within the slack is soon lost where costs are wrong
    return search if moved.step_time_ticks * (1 + slack) >= search.step_time_ticks else moved


def _with_compute_moved(
    mover: ComputeMover, blocks: Ints, search: Search, effort: _Effort
) -> Search:
    """Return the search around the best order of the compute that is found; ``search``, around
    ``blocks``, where none is better.
    """
    best = search
    for _ in range(_ROUNDS_OF_ORDERS):
        assert best.best is not None
        start = Moved(blocks=blocks, candidate=best.best)
        found = mover.improve(start, search.instance.caps, effort.enough_ticks)
        if np.array_equal(found.blocks, blocks):
            break
        blocks = found.blocks
        around = search.around(mover.moved(blocks), effort.evaluations // 2)
        around.consider(found.candidate)
        around.portfolio()
        around.improve(effort.enough_ticks)
        assert around.best is not None
        if best.step_time_ticks <= around.step_time_ticks:
            break
        best = around
    return best


def _finished(task: Task, bound: TimeBound, search: Search, effort: _Effort) -> Answer:
    """Return the answer: windows decided, then lower memory and fewer launches within the slack."""
    options = task.options
    improved = improve(
        search.pricer,
        search.instance.caps,
        search.program(),
        replace(options, budget=options.budget * _SHARE_OF_WINDOWS),
        stop_at_ticks=effort.enough_ticks,
    )
    time = evaluate(search.instance.arrays, improved.program).step_time_ticks
    task.report("windows", time)
    limit = slack_limit(time, options, task.made)
    program, solved_by = improved.program, SolvedBy.WINDOWS
    if search.best is not None and search.best.figures.step_time_ticks <= limit:
        search.lower_memory(limit)
        search.fewer_launches(limit)
        program, solved_by = search.program(), SolvedBy.SEARCH
    return Answer(
        schedule=expand(search.instance, late_waits(search.instance, program)),
        bound=bound,
        solved_by=solved_by,
        fastest_ticks=time,
        limit_ticks=limit,
        deterministic_work=improved.deterministic_work,
    )


def ladders(instance: Instance, floor_bytes: int) -> tuple[tuple[Caps, ...], ...]:
    """Return caps tighter than the stated ones, the tightest first: the search under looser caps
    includes that under tighter ones.

    In prefetch a third and two thirds of the cap; in memory the floor, and one and three layers of
    gathered weights above it, whatever the cap.
    """
    arrays, caps = instance.arrays, instance.caps
    gathered = [
        sum(
            int(arrays.output_bytes[row[0]])
            for row in period.collectives
            if arrays.kind[row[0]] == ALL_GATHER and not arrays.on_path[row[0]]
        )
        for period in find_periods(arrays)
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
