"""The binding resource at each point of a frontier, and the cap from which more bucketing no longer
pays.

A resource binds if more of it would make the step shorter:

- **memory** where a looser cap of the same frontier is known to be faster by more than the time
  slack; at the loosest cap, where a gather does not fit and a stall follows;
- else, or behind it, the owner of most of the critical path: **compute**, the **network of a
  group** (its transfers, head and tail included) or **launches, copies, casts** on the compute
  stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from apsched.options_table import FLAG_OF_CAP
from apsched.quantities import show_bytes, show_us
from apsched.study.rows import Point

MEMORY = "memory"
COMPUTE = "compute"
LAUNCHES = "launches, copies, casts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The binding resource at one point."""

    resource: str
    """:data:`MEMORY` or ``largest``."""
    largest: str
    """The largest owner of the critical path: :data:`COMPUTE`, :data:`LAUNCHES` or ``network of
    group NAME``.
    """
    share: float
    """The share of the step time that it owns."""
    full_at: str | None
    """The step where the next gather does not fit and a stall follows."""

    def __str__(self) -> str:
        largest = f"{self.largest} {100 * self.share:.0f} %"
        return f"{MEMORY}, {largest}" if self.resource == MEMORY else largest


def needs_text(point: Point) -> str:
    """Return the least values of the caps at ``point`` that have a schedule, each by its option;
    empty if they are not known.
    """
    least = (point.outcome.report.get("infeasibility") or {}).get("least", {})
    return "; ".join(
        f"{FLAG_OF_CAP[name]} needs {show_bytes(value) if name.endswith('bytes') else value}"
        for name, value in least.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Neighbouring points of a frontier where the same binds."""

    resource: str
    first: Point
    last: Point


def binding(point: Point, looser: Sequence[Point] = ()) -> Binding:
    """Return the binding resource at ``point``, which has a schedule; ``looser`` are the points of
    its frontier under looser caps.
    """
    path: Mapping[str, Any] = point.outcome.report.get("rests_on") or {}
    owners = {COMPUTE: path.get("compute_us", 0.0), LAUNCHES: path.get("launches_copies_us", 0.0)}
    for transfer in path.get("transfers", ()):
        name = f"network of group {transfer['group']}"
        owners[name] = owners.get(name, 0.0) + transfer["us"]
    largest = max(owners, key=lambda name: owners[name])
    full_at = path.get("memory_full_at")
    limited = any(faster(other, point) for other in looser) if looser else full_at is not None
    return Binding(
        resource=MEMORY if limited and point.outcome.memory_cap_bytes is not None else largest,
        largest=largest,
        share=owners[largest] / (sum(owners.values()) or 1.0),
        full_at=full_at,
    )


def bindings(points: Sequence[Point]) -> tuple[Binding, ...]:
    """Return the binding resource at each of ``points``, which have schedules and ascending
    caps.
    """
    return tuple(binding(point, points[k + 1 :]) for k, point in enumerate(points))


def stretches(points: Sequence[Point]) -> tuple[Stretch, ...]:
    """Return the stretches of binding resources: neighbouring points with one binding resource, as
    one stretch.
    """
    named = zip((found.resource for found in bindings(points)), points, strict=True)
    runs = [
        (resource, [point for _, point in run])
        for resource, run in groupby(named, key=lambda pair: pair[0])
    ]
    return tuple(Stretch(resource=resource, first=run[0], last=run[-1]) for resource, run in runs)


def binds_text(points: Sequence[Point]) -> str:
    """Return in a line which resource binds where."""
    texts = [f"{s.resource} {_range(s)}" for s in stretches(points)]
    return f"binds: {'; '.join(texts)}" if texts else ""


def _range(stretch: Stretch) -> str:
    first, last = (cap_text(point) for point in (stretch.first, stretch.last))
    if first == last:
        return f"at {first}" if first != "none" else "without a cap"
    return f"from {first} " + ("on" if last == "none" else f"to {last}")


def cap_text(point: Point) -> str:
    """Return the memory cap of a point in words."""
    return (
        "none"
        if point.outcome.memory_cap_bytes is None
        else show_bytes(point.outcome.memory_cap_bytes)
    )


def faster(one: Point, other: Point) -> bool:
    """Return whether ``one`` is faster than ``other`` by more than the time slack, which a search
    may give away.
    """
    slack = float(one.described.get("time_slack") or 0.0)
    return one.outcome.step_ticks is not None and one.outcome.step_ticks < (1 - slack) * (
        other.outcome.step_ticks or 0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketing:
    """The points of a frontier where buckets pay, and the point from which more of them no longer
    do.
    """

    num_points: int
    with_buckets: tuple[Point, ...]
    """Points whose schedules have buckets."""
    largest_bytes: int
    """The largest bucket of any of them."""
    stops: Point | None
    """From here on more bucketing no longer pays: under no looser cap are fewer launches faster by
    more than the time slack. ``None`` where nothing has buckets.
    """
    without_us: float | None
    """No schedule without buckets is faster (proven); ``None`` where an older version answered."""

    def proven_us(self, point: Point) -> float:
        """Return the least time that buckets save at ``point``, against every schedule without
        them.
        """
        return max(0.0, (self.without_us or 0.0) - (point.step_time_us or 0.0))


def bucketing(points: Sequence[Point]) -> Bucketing:
    """Return the points where buckets pay; ``points`` have schedules and ascending caps."""
    having = tuple(point for point in points if bucket_bytes(point))
    tighter = tuple(takewhile(lambda point: _more_pays(point, points), points))
    return Bucketing(
        num_points=len(points),
        with_buckets=having,
        largest_bytes=max((bucket_bytes(point) for point in having), default=0),
        stops=points[len(tighter)] if having else None,
        without_us=max(
            (point.outcome.report.get("without_buckets_us") or 0.0 for point in points), default=0.0
        )
        or None,
    )


def _more_pays(point: Point, points: Sequence[Point]) -> bool:
    """Return whether fewer launches under a looser cap are faster."""
    looser = points[points.index(point) + 1 :]
    return any(
        (other.outcome.num_launches or 0) < (point.outcome.num_launches or 0)
        and faster(other, point)
        for other in looser
    )


def bucketing_text(points: Sequence[Point]) -> str:
    """Return one line with the caps at which buckets pay, the least that they save, and the cap
    from which more buckets no longer pay.
    """
    found = bucketing(points)
    if not points:
        return ""
    if not found.with_buckets or found.stops is None:
        return "buckets pay nowhere: no schedule found has one"
    text = f"buckets pay at {len(found.with_buckets)} of {found.num_points} caps"
    if len(found.with_buckets) < found.num_points:
        bare = [cap_text(point) for point in points if not bucket_bytes(point)]
        text += f"; not at {bare[0]}" + (f" to {bare[-1]}" if len(bare) > 1 else "")
    text += f"; the largest that pays anywhere has {show_bytes(found.largest_bytes)}"
    best = min(points, key=lambda point: point.outcome.step_ticks or 0)
    if found.without_us and found.proven_us(best) > 0:
        text += f"; no step without buckets is below {show_us(found.without_us)} (proven)"
    if len(points) > 1:
        fewest, most = (
            pick(point.outcome.num_launches or 0 for point in points[points.index(found.stops) :])
            for pick in (min, max)
        )
        several = f"{fewest} to {most}" if fewest < most else f"{fewest}"
        launches = f"{several} launch{'es' * (most != 1)}"
        from_there = (
            "without a cap"
            if found.stops.outcome.memory_cap_bytes is None
            else f"from {cap_text(found.stops)} on"
        )
        where = "already at the tightest cap" if found.stops is points[0] else from_there
        text += f"; more bucketing no longer pays {where} ({launches})"
    return text


def bucket_bytes(point: Point) -> int:
    """Return the size of the largest bucket at ``point``; 0 without buckets."""
    return int((point.outcome.report.get("chosen") or {}).get("bucket_bytes") or 0)
