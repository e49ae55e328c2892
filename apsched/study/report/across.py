"""The frontiers of a study side by side: the gain from buckets along another axis than memory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from apsched.quantities import show_us
from apsched.study.report.binding import bucket_bytes, bucketing, faster
from apsched.study.report.frontier import fitting
from apsched.study.rows import Point

BUCKET_CAP = "bucket_cap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One graph under one setting, along its memory caps."""

    labels: Mapping[str, str]
    """Values of the axes other than memory."""
    graph: str
    points: tuple[Point, ...]
    expected: int
    """The number of points when all is done."""

    @property
    def title(self) -> str:
        """The graph and the axes in one line."""
        return ", ".join([self.graph, *(f"{name} {value}" for name, value in self.labels.items())])

    @property
    def fastest(self) -> Point | None:
        """The point with the shortest step; the one under the tightest cap of equals."""
        return min(
            fitting(self.points), key=lambda point: point.outcome.step_ticks or 0, default=None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Along:
    """Frontiers of one graph that differ in one axis only, in the order in which its values were
    stated.
    """

    axis: str
    title: str
    """The graph, and the values of the other axes."""
    lines: tuple[Line, ...]


def alongs(lines: Sequence[Line]) -> tuple[Along, ...]:
    """Return every two or more frontiers that differ in one axis only, of graphs with
    collectives.
    """
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        for axis in line.labels:
            others = {name: value for name, value in line.labels.items() if name != axis}
            title = Line(labels=others, graph=line.graph, points=(), expected=0).title
            if line.fastest is not None:
                found.setdefault((axis, title), []).append(line)
    return tuple(
        Along(axis=axis, title=title, lines=tuple(lines))
        for (axis, title), lines in found.items()
        if len(lines) > 1 and any(p.graph.num_collectives for line in lines for p in line.points)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The gain from buckets at the fastest point of one value of an axis."""

    value: str
    num_launches: int
    num_collectives: int
    saved_us: float
    """At least, against every schedule without buckets (proven)."""
    bucketed: bool


def worths(along: Along) -> tuple[Worth, ...]:
    """Return the gain from buckets along an axis."""
    return tuple(
        Worth(
            value=line.labels[along.axis],
            num_launches=point.outcome.num_launches or 0,
            num_collectives=point.graph.num_collectives,
            saved_us=bucketing((point,)).proven_us(point),
            bucketed=bucket_bytes(point) > 0,
        )
        for line in along.lines
        if (point := line.fastest) is not None
    )


def stops_at(along: Along) -> str | None:
    """Return the bucket cap from which on larger buckets no longer pay; ``None`` along other
    axes.
    """
    if along.axis != BUCKET_CAP:
        return None
    fastest = [
        (line.labels[along.axis], point)
        for line in along.lines
        if (point := line.fastest) is not None
    ]
    return next(
        value
        for k, (value, point) in enumerate(fastest)
        if not any(faster(other, point) for _, other in fastest[k + 1 :])
    )


def along_json(along: Along) -> dict[str, Any]:
    """Return the same for programs."""
    found = {
        "axis": along.axis,
        "of": along.title,
        "buckets": [asdict(worth) for worth in worths(along)],
    }
    return (
        found
        if along.axis != BUCKET_CAP
        else {**found, "larger_no_longer_pay_from": stops_at(along)}
    )


def along_text(along: Along) -> str:
    """Return the gain from buckets along an axis: launches, and the proven saving, at the fastest
    point of each value.
    """
    found = worths(along)
    parts = [
        f"{worth.value}: {worth.num_launches} launch{'es' * (worth.num_launches != 1)} of"
        f" {worth.num_collectives}"
        + (f", at least {show_us(worth.saved_us)} saved" if worth.saved_us > 0 else "")
        for worth in found
    ]
    text = f"buckets along {along.axis} ({along.title}): {'; '.join(parts)}"
    if (stops := stops_at(along)) is not None:
        return f"{text}; larger ones no longer pay from {stops} on"
    bare = [worth.value for worth in found if not worth.bucketed]
    if not bare:
        return f"{text}; they pay at each"
    if len(bare) == len(found):
        return f"{text}; they pay nowhere"
    return f"{text}; they do not pay at {', '.join(bare)}"
