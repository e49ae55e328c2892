"""Solve under the requested caps, though the search may restrict itself.

If moving compute does not pay, the search keeps it as captured. The claims of the answer are about
the request nevertheless: bounds hold for every order of the compute that the caps allow, and
infeasibility is reported only after those orders were searched, too.
"""

from dataclasses import dataclass, replace
from functools import partial

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource, Scored, SolvedBy, SolveResult
from apsched.schedule.schedule import Schedule
from apsched.schedule.verify import verify
from apsched.solver.answer import Progress, near_enough, scored_start, within_slack
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.relaxed import without_places
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.memory import memory_bound_of_any_order
from apsched.solver.bounds.best import best_bound, search_bound
from apsched.solver.bounds.memory_and_launches import later_bounds
from apsched.solver.bounds.step_time import TimeBound, memory_bound
from apsched.solver.compute_move_cap import moving_where_it_pays
from apsched.solver.infeasible.explain import with_less_memory
from apsched.solver.interleave.interleave import interleaved
from apsched.solver.interleave.least_memory import has_chains, least_known
from apsched.solver.reorder.min_memory import floated_model, is_small, least_memory
from apsched.solver.rungs import is_tight
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.solve import solve as solve_any
from apsched.solver.solve import with_reasons
from apsched.units import ticks_to_us

_SHARE_OF_BOUND = 0.1
"""Share of the budget for the proof of a bound for all orders by the whole formulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """Bounds for every order of the compute that the caps allow."""

    step: TimeBound
    peak_bytes: int

    @classmethod
    def of(cls, instance: Instance) -> "_Bounds":
        """Return the bounds of ``instance``, which has the compute as captured."""
        orders = Orders(instance)
        return cls(
            step=best_bound(instance, orders),
            peak_bytes=memory_bound_of_any_order(orders, instance.caps.max_compute_move),
        )


def solve_requested(
    problem: Problem,
    caps: Caps | None = None,
    options: SolveOptions | None = None,
    *,
    progress: Progress | None = None,
    start: Schedule | None = None,
    search_alone: bool = False,
) -> SolveResult:
    """As :func:`apsched.solver.solve`; compute stays as captured where moving it does not pay,
    ``start`` moves none, and the memory cap leaves room for that order. Chains that do not depend
    on each other are interleaved where that is faster. ``search_alone`` also leaves out the reasons
    why no schedule fits, and without a memory cap the least memory around other orders of the
    compute: see :func:`completed`.
    """
    caps, options = caps or Caps(), options or SolveOptions()
    if has_chains(problem, caps):
        return _with_chains(problem, caps, options, progress=progress, start=start)
    searched = moving_where_it_pays(problem, caps)
    if start is not None and verify(problem, start, searched) and not verify(problem, start, caps):
        searched = caps
    solve = partial(solve_any, options=options, start=start, search_alone=search_alone)
    explained = not search_alone
    if searched == caps:
        return solve(problem, caps, progress=progress, explained=explained)
    instance = Instance.of(problem, caps)
    if not instance.has_room(memory_bound(instance.arrays)):  # as captured nothing fits
        return solve(problem, caps, progress=progress, explained=explained)
    bounds = _Bounds.of(instance)
    shown = _with_bound(progress, bounds.step)
    at = instance.within(searched)
    near = None if is_small(problem) else search_bound(at)
    found = solve(problem, searched, progress=shown, explained=False, bound=near)
    if found.best is not None:
        found = replace(found, lacks_floor=True)
        if not search_alone or caps.memory_cap_bytes is not None:
            found = _with_floor_of_any_order(instance, options, found, bounds.peak_bytes)
    if found.best is None or _is_short(at, found.floor_memory_bytes):
        moved = solve(problem, caps, progress=progress, explained=explained, bound=bounds.step)
        if found.best is None or (
            moved.best is not None and moved.best.step_time_ticks < found.best.step_time_ticks
        ):
            return moved
    return _claimed(instance, options, found, bounds)


def completed(
    found: SolveResult, problem: Problem, caps: Caps, options: SolveOptions
) -> SolveResult:
    """Return ``found``, an answer of :func:`solve_requested` by the search alone, with the parts
    that are left out there, but for CP-SAT.
    """
    if found.lacks_reasons:
        return with_reasons(found, problem, caps, options)
    if found.lacks_floor:
        instance = Instance.of(problem, caps)
        bound = memory_bound_of_any_order(Orders(instance), caps.max_compute_move)
        return _with_floor_of_any_order(instance, options, found, bound)
    return found


def _is_short(instance: Instance, floor_bytes: int) -> bool:
    """Return whether the memory cap is below the peak of launches just in time: few schedules fit,
    such as a baseline. Where the floor of all orders, ``floor_bytes``, is lower than that peak, a
    cap less than a layer of gathered weights above the peak is short, too.
    """
    if instance.caps.memory_cap_bytes is None:
        return False
    least = just_in_time(instance.without_memory_cap())
    if least is None:
        return False
    if floor_bytes < least.peak_memory_bytes:
        return is_tight(instance, least.peak_memory_bytes)
    return not instance.has_room(least.peak_memory_bytes)


def _with_floor_of_any_order(
    instance: Instance, options: SolveOptions, found: SolveResult, bound_bytes: int
) -> SolveResult:
    """Return ``found``, around the compute as captured, with the least memory that is known around
    any order; that is at least ``bound_bytes``.
    """
    least = found.floor_memory_bytes
    if least > bound_bytes:
        least = min(least, least_memory(instance.problem, instance.caps, options)[0])
    return replace(found, floor_memory_bytes=least, lacks_floor=False)


def _with_bound(progress: Progress | None, bound: TimeBound) -> Progress | None:
    """Return ``progress`` with the ``bound`` of all orders: the search restricts itself to some,
    and the bound of these is no claim.
    """
    if progress is None:
        return None
    bound_us = ticks_to_us(bound.ticks)
    return lambda stage, best_us, _, share: progress(stage, best_us, bound_us, share)


def _with_chains(
    problem: Problem,
    caps: Caps,
    options: SolveOptions,
    *,
    progress: Progress | None,
    start: Schedule | None,
) -> SolveResult:
    """Return the answer to a problem of several chains, with bounds for all orders: as places count
    within a chain, the cap on them bounds no place in the whole.
    """
    alone = replace(problem, chains=())
    instance = Instance.of(problem, replace(caps, max_compute_move=None))
    bounds = _Bounds.of(instance)
    shown = _with_bound(progress, bounds.step)
    in_a_row = solve_requested(alone, caps, options, progress=shown, start=start)
    found = in_a_row
    if in_a_row.best is not None or instance.has_room(bounds.peak_bytes):
        found = interleaved(problem, caps, options, in_a_row, near_enough(bounds.step, options))
    if found.best is None:
        least = least_known(problem, caps, options, bounds.peak_bytes)
        found = found if least is None else _of_least_memory(instance, options, found, least)
        if found.best is None:
            return _with_less_memory(problem, caps, options, found, least, bounds.peak_bytes)
    given = scored_start(Instance.of(problem, caps), start)
    if given is not None and given.step_time_ticks < found.best.step_time_ticks:
        found = replace(found, best=given, solved_by=SolvedBy.START)
        found = within_slack(found, options, given.step_time_ticks)
    return _claimed(instance, options, _with_known_floor(found), bounds)


def _with_known_floor(found: SolveResult) -> SolveResult:
    """Return ``found`` with a floor that is at most the peak of each schedule that it has."""
    peaks = [b.peak_memory_bytes for b in found.baselines if b.fits]
    peaks += [one.peak_memory_bytes for one in found.trade_offs]
    return replace(found, floor_memory_bytes=min([found.floor_memory_bytes, *peaks]))


def _of_least_memory(
    instance: Instance, options: SolveOptions, found: SolveResult, least: Scored
) -> SolveResult:
    """Return ``found``, which has no schedule, with the least memory of merged chains, and that
    schedule, ``least``, as the answer where it fits.
    """
    peak = least.peak_memory_bytes
    found = replace(found, floor_memory_bytes=min(found.floor_memory_bytes, peak))
    if not instance.has_room(peak):
        return found
    found = replace(found, best=least, solved_by=SolvedBy.JUST_IN_TIME)
    return within_slack(found, options, least.step_time_ticks)


def _with_less_memory(
    problem: Problem,
    caps: Caps,
    options: SolveOptions,
    found: SolveResult,
    least: Scored | None,
    floor_bound: int,
) -> SolveResult:
    """Return ``found``, which has no schedule, with the least memory of merged chains in the
    explanation: ``least``, or that without the caps that the explanation lifts.
    """
    assert found.infeasibility is not None
    why = found.infeasibility
    for relaxed in why.relaxations:
        if relaxed.cap == "memory_cap_bytes":
            if relaxed.lifted:
                others = replace(caps, **dict.fromkeys(relaxed.lifted))
                least = least_known(problem, others, options, floor_bound)
            if least is not None:
                why = with_less_memory(why, caps, least.peak_memory_bytes, floor_bound)
    return replace(
        found,
        floor_bound_bytes=min(found.floor_bound_bytes, floor_bound),
        infeasibility=why,
    )


def _claimed(
    instance: Instance, options: SolveOptions, found: SolveResult, bounds: _Bounds
) -> SolveResult:
    """Return ``found``, a schedule with the compute as captured, with the ``bounds`` for all
    orders, or a higher one.
    """
    assert found.best is not None
    bound, work = bounds.step, 0.0
    is_open = instance.problem.contention is None and bound.ticks < found.fastest_ticks
    is_open &= not found.may_improve
    model = floated_model(instance) if is_open else None
    if model is not None:
        less = replace(options, budget=options.budget * _SHARE_OF_BOUND)
        exact = model.minimize_step_time(less, None)
        work = exact.deterministic_work
        if bound.ticks < exact.bound <= found.fastest_ticks:
            bound = TimeBound(ticks=exact.bound, source=BoundSource.CP_SAT)
    floor = min(bounds.peak_bytes, found.floor_memory_bytes)
    anywhere = replace(instance, arrays=without_places(instance.arrays))
    later = later_bounds(anywhere, found.best, found.time_limit_ticks, floor)
    result = SolveResult.found(
        found.best,
        bound_ticks=bound.ticks,
        bound_source=bound.source,
        baselines=found.baselines,
        floor_memory_bytes=found.floor_memory_bytes,
        floor_bound_bytes=floor,
        fastest_ticks=found.fastest_ticks,
        time_limit_ticks=later.limit_ticks,
        peak_bound_bytes=later.peak_bytes,
        launches_bound=later.launches,
        solved_by=found.solved_by,
        deterministic_work=found.deterministic_work + work,
        search_ticks=found.search_ticks,
        trade_offs=found.trade_offs,
    )
    return replace(result, may_improve=found.may_improve, lacks_floor=found.lacks_floor)
