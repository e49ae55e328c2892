"""Memory against step time: a frontier, point by point and as a whole, from saved answers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from apsched.study.report.binding import bucketing, stretches
from apsched.study.rows import Point

GIB = 2**30
DEFAULT_SLOWDOWN = "2%"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The least memory with which a step is at most as long as the limit, as far as it is known: at
    most ``peak_memory_bytes``, and more than ``refuted_bytes``.
    """

    step_limit_us: float
    peak_memory_bytes: int
    step_time_us: float
    refuted_bytes: int | None
    """With this cap no schedule is as fast (proven); ``None`` where nothing is refuted."""
    slower_bytes: int | None
    """The loosest cap below the peak whose schedule is slower, though nothing refutes that one is
    as fast; ``None`` where there is none.
    """
    slower_us: float | None
    """The step time of that schedule."""


def fitting(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points with a schedule, by ascending caps."""
    return ascending([point for point in points if point.outcome.step_ticks is not None])


def ascending(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points by ascending caps."""
    return tuple(
        sorted(
            points,
            key=lambda p: (
                float("inf") if p.outcome.memory_cap_bytes is None else p.outcome.memory_cap_bytes
            ),
        )
    )


def needed_bytes(point: Point) -> int:
    """Return the cap of a point, or without one the peak of its schedule."""
    cap = point.outcome.memory_cap_bytes
    return point.outcome.peak_memory_bytes or 0 if cap is None else cap


def prices_ms_per_gib(points: Sequence[Point]) -> tuple[float | None, ...]:
    """Return for each point the ms of step time gained by each GiB between it and the point before;
    ``None`` for the first.
    """
    prices: list[float | None] = [None]
    for tighter, looser in pairwise(points):
        gib = (needed_bytes(looser) - needed_bytes(tighter)) / GIB
        faster_ms = ((tighter.step_time_us or 0.0) - (looser.step_time_us or 0.0)) / 1000
        prices.append(faster_ms / gib if gib > 0 else None)
    return tuple(prices[: len(points)])


def least_memory(points: Sequence[Point], slowdown: float) -> LeastMemory | None:
    """Return the least memory with which a step is at most ``slowdown`` slower than the fastest of
    ``points``.
    """
    points = fitting(points)
    if not points:
        return None
    limit = min(point.step_time_us or 0.0 for point in points) * (1 + slowdown)
    enough = [point for point in points if (point.step_time_us or 0.0) <= limit]
    best = min(
        enough, key=lambda point: (point.outcome.peak_memory_bytes or 0, point.step_time_us or 0.0)
    )
    peak_bytes = best.outcome.peak_memory_bytes or 0
    refuted_bytes = max((needed_bytes(p) for p in points if p.bound_us > limit), default=None)
    slower = max(
        (p for p in points if (refuted_bytes or 0) < needed_bytes(p) < peak_bytes),
        key=needed_bytes,
        default=None,
    )
    return LeastMemory(
        step_limit_us=limit,
        peak_memory_bytes=peak_bytes,
        step_time_us=best.step_time_us or 0.0,
        refuted_bytes=refuted_bytes,
        slower_bytes=None if slower is None else needed_bytes(slower),
        slower_us=None if slower is None else slower.step_time_us,
    )


def frontier_json(points: Sequence[Point], slowdown: float) -> dict[str, Any] | None:
    """Return the frontier of ``points``, which have schedules and ascending caps; ``None`` where
    there is none.
    """
    least = least_memory(points, slowdown)
    if least is None:
        return None
    found = bucketing(points)
    return {
        "prices_ms_per_gib": [
            {"point_id": p.point_id, "price": price}
            for p, price in zip(points, prices_ms_per_gib(points), strict=True)
        ],
        "least_memory": {"slowdown": slowdown, **asdict(least)},
        "binds": [
            {
                "resource": stretch.resource,
                "from_cap_bytes": stretch.first.outcome.memory_cap_bytes,
                "to_cap_bytes": stretch.last.outcome.memory_cap_bytes,
            }
            for stretch in stretches(points)
        ],
        "bucketing": {
            "pays_at": [point.point_id for point in found.with_buckets],
            "largest_bucket_bytes": found.largest_bytes,
            "no_more_pays_from": found.stops.point_id if found.stops else None,
            "without_buckets_us": found.without_us,
            "proven_saving_us": [
                {"point_id": point.point_id, "us": found.proven_us(point)} for point in points
            ],
        },
    }
