"""What ``--json`` of a study says of a frontier as a whole."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from apsched.study.binds import bucketing, stretches
from apsched.study.frontier import least_memory, prices_ms_per_gib
from apsched.study.store import Point


def frontier_json(points: Sequence[Point], slowdown: float) -> dict[str, Any] | None:
    """Return the frontier of ``points``, which have schedules and ascending caps; ``None`` where there is none."""
    least = least_memory(points, slowdown)
    if least is None:
        return None
    found = bucketing(points)
    return {
        "prices_ms_per_gib": [{"point_id": p.point_id, "price": price} for p, price in zip(points, prices_ms_per_gib(points), strict=True)],
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
            "proven_saving_us": [{"point_id": point.point_id, "us": found.proven_us(point)} for point in points],
        },
    }
