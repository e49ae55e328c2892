"""The least period of a layer, and the exact curve of its memory against its period.

The period is proven from both sides: no stream can do with less than its load, and a period that CP-SAT refutes is too short, as are all
below it (what waits longer has every longer period, too). Where the load is reached, which it mostly is, no search is needed.
"""

from dataclasses import dataclass
from itertools import pairwise

from apsched.config import Caps
from apsched.errors import InputError
from apsched.problem import Problem
from apsched.solver.compact import compact
from apsched.solver.loop_body import loop_body
from apsched.solver.modulo import LayerModel, ModuloSchedule, load_bound, serial_ticks
from apsched.solver.periods import Period, find_period

_FIRST_STEP = 0.005
"""Share of the load by which a period that is not found is raised at first; then twice as much, and so on."""
_RESOLUTION = 0.001
"""Share of the period that bisection leaves open."""
_CURVE_STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares by which the periods of the curve are longer than the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastPeriod:
    """The shortest period of a layer within the caps."""

    schedule: ModuloSchedule | None
    """Of that period, with the least memory that was found; None where none was found."""
    bound_ticks: int
    """No schedule of the layer has a shorter period."""
    bound_bytes: int
    """No schedule of that period needs less memory."""
    deterministic_work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One point of the curve of memory against period."""

    period_ticks: int
    peak_memory_bytes: int
    """Alive at most in the layer that leaves least room, with what the caller keeps."""
    bound_bytes: int
    """No schedule of this period needs less; equal to the peak where that is proven."""
    num_launches: int
    """Of collectives that can move, in one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodCurve:
    """What one layer costs, for all depths."""

    period: Period
    compute_ticks: int
    """Compute of one layer."""
    least: LeastPeriod
    points: tuple[CurvePoint, ...]
    """By period, ascending; each point needs less memory than the one before."""


def least_period(model: LayerModel, budget: float) -> LeastPeriod:
    """Return the shortest period within the caps, and the least memory at it, for about ``budget`` of deterministic work."""
    body = model.body
    bound, work = load_bound(body, budget)
    longest = serial_ticks(body)
    best: ModuloSchedule | None = None
    low, limit, step = bound, bound, _FIRST_STEP
    while work < budget:
        answer = model.exists(limit, budget - work)
        work += answer.deterministic_work
        if answer.schedule is not None:
            best = answer.schedule
        elif answer.infeasible:
            bound = low = max(low, limit + 1)
        else:
            low = max(low, limit + 1)  # not refuted: the bound stays
        if best is None:
            if limit >= longest:
                break
            limit, step = min(int(limit * (1 + step)) + 1, longest), 2 * step
        elif best.period_ticks - low <= _RESOLUTION * best.period_ticks:
            break
        else:
            limit = (low + best.period_ticks) // 2
    if best is None:
        return LeastPeriod(schedule=None, bound_ticks=bound, bound_bytes=0, deterministic_work=work)
    answer = model.least_memory(best.period_ticks, max(budget - work, budget / 4))
    return LeastPeriod(
        schedule=answer.schedule or best,
        bound_ticks=bound,
        bound_bytes=answer.bound_bytes,
        deterministic_work=work + answer.deterministic_work,
    )


def period_curve(
    problem: Problem, caps: Caps | None = None, *, budget: float = 40.0, most_gaps: int = 32, reach: int = 2
) -> PeriodCurve | None:
    """Return the least period of the layer that repeats in ``problem``, and the least memory at it and at longer ones; None for no layers.

    The memory cap of ``caps`` holds for all points, the other caps as well. Deterministic: ``budget`` counts work, not seconds.
    """
    if problem.contention is not None:
        raise InputError("contention: one layer for all depths is found without it; leave it out")
    small = compact(problem)
    period = find_period(small)
    if period is None:
        return None
    model = LayerModel(loop_body(problem, small, period, caps or Caps(), reach=reach, most_gaps=most_gaps))
    least = least_period(model, budget / 2)
    compute = sum(site.ticks for site in model.body.sites)
    points = _points(model, least, (budget - least.deterministic_work) / len(_CURVE_STEPS)) if least.schedule is not None else []
    return PeriodCurve(period=period, compute_ticks=compute, least=least, points=tuple(points))


def _points(model: LayerModel, least: LeastPeriod, budget: float) -> list[CurvePoint]:
    assert least.schedule is not None
    shortest = least.schedule
    found = [_point(shortest, least.bound_bytes)]
    for step in _CURVE_STEPS:
        ticks = int(shortest.period_ticks * (1 + step))
        if ticks > serial_ticks(model.body):
            break
        answer = model.least_memory(ticks, budget)
        if answer.schedule is not None:
            found.append(_point(answer.schedule, answer.bound_bytes))
    return [found[0], *(point for before, point in pairwise(found) if point.peak_memory_bytes < before.peak_memory_bytes)]


def _point(schedule: ModuloSchedule, bound_bytes: int) -> CurvePoint:
    return CurvePoint(
        period_ticks=schedule.period_ticks,
        peak_memory_bytes=schedule.peak_memory_bytes,
        bound_bytes=bound_bytes,
        num_launches=len(schedule.buckets),
    )
