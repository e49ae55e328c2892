"""The frontier in a report: memory against step time, with bounds, the baselines, and the point of
this run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from apsched.artifacts.solved_run import SolvedGraph
from apsched.quantities import show_bytes, show_us
from apsched.report.binding import shares
from apsched.report.page.table import table
from apsched.schedule.result import AS_CAPTURED, Score
from apsched.units import ticks_to_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A baseline at a point of a frontier."""

    name: str
    step_ticks: int
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One memory cap and the answer under it."""

    name: str
    """Of the point in its study; empty for the schedule of a run."""
    cap_bytes: int | None
    peak_bytes: int
    step_ticks: int
    bound_ticks: int
    num_launches: int
    bucket_bytes: int
    """Of the largest bucket."""
    baselines: tuple[Baseline, ...]
    price_ms_per_gib: float | None
    """The gain from the GiB between the cap before and this one."""
    binds: str
    saved_us: float
    """The least time that buckets save here (proven)."""
    mark: str = ""
    """Of a schedule that no solve under this cap found: a sign; the legend explains it."""

    @property
    def needed_bytes(self) -> int:
        """The cap, or without one the peak."""
        return self.peak_bytes if self.cap_bytes is None else self.cap_bytes

    @property
    def best_baseline(self) -> Baseline | None:
        """The fastest baseline that fits."""
        return min((b for b in self.baselines if b.fits), key=lambda b: b.step_ticks, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """The least memory with a known schedule for a step so much slower than the fastest."""

    share: float
    limit_us: float
    peak_bytes: int
    step_us: float
    refuted_bytes: int | None
    """With this cap no schedule is as fast (proven)."""
    slower_bytes: int | None
    """The loosest cap between the two; its schedule is slower, which is not proven to be so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """One graph under one setting, along its memory caps."""

    graph: str
    title: str
    points: tuple[FrontierPoint, ...]
    """By ascending caps; the last may be without one."""
    sentences: tuple[str, ...] = ()
    """The sentences about it as a whole."""
    slowdowns: tuple[Slowdown, ...] = ()
    floor_bytes: int = 0
    """The least cap under which a schedule is known."""
    legend: str = ""
    """The legend of the marks of its points."""
    beside_bytes: int = 0
    """Bytes of kept shards that the graph does not take; all bytes of its points count them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoint:
    """The point of the run that the report is about."""

    graph: str
    title: str
    point: FrontierPoint


def point_of(graph: SolvedGraph, beside_bytes: int = 0) -> FrontierPoint:
    """Return the point that the schedule of ``graph`` is, with ``beside_bytes`` alive beside it."""
    result = graph.result
    best = result.best
    assert best is not None
    largest = max(shares(result), key=lambda share: share.ticks, default=None)
    cap_bytes, scores = result.caps.memory_cap_bytes, (*result.answer.baselines, *result.others)
    return FrontierPoint(
        name="",
        cap_bytes=None if cap_bytes is None else cap_bytes + beside_bytes,
        peak_bytes=best.peak_memory_bytes + beside_bytes,
        step_ticks=best.step_time_ticks,
        bound_ticks=result.answer.bound_ticks,
        num_launches=best.num_launches,
        bucket_bytes=result.chosen.bucket_bytes if result.chosen else 0,
        baselines=tuple(_baseline(score, beside_bytes) for score in scores),
        price_ms_per_gib=None,
        binds=largest.label if largest else "",
        saved_us=0.0,
    )


def one_point_text(point: FrontierPoint) -> str:
    """Return a frontier of one point as a sentence."""
    cap = (
        "no memory cap" if point.cap_bytes is None else f"memory cap {show_bytes(point.cap_bytes)}"
    )
    text = (
        f"One point is known: {show_us(ticks_to_us(point.step_ticks))} with a peak of"
        f" {show_bytes(point.peak_bytes)} ({cap}); no schedule under this cap is faster than"
        f" {show_us(ticks_to_us(point.bound_ticks))} (proven)"
    )
    if (best := point.best_baseline) is not None:
        step = show_us(ticks_to_us(best.step_ticks))
        text += f"; the best baseline that fits, {best.name}, takes {step}"
    return f"{text}."


def _baseline(score: Score, beside_bytes: int) -> Baseline:
    return Baseline(
        name=score.name,
        step_ticks=score.step_time_ticks,
        peak_bytes=score.peak_memory_bytes + beside_bytes,
        fits=score.fits,
    )


def frontier_data(
    frontiers: Sequence[Frontier], run_points: Sequence[RunPoint]
) -> list[dict[str, Any]]:
    """Return the data of the pictures: one for each graph, exact in ticks and bytes."""
    return [
        {
            "graph": name,
            "lines": [
                {
                    "title": line.title,
                    "floor": line.floor_bytes,
                    "points": [_point(point) for point in line.points],
                }
                for line in frontiers
                if line.graph == name
            ],
            "here": [
                {"title": one.title, **_point(one.point)} for one in run_points if one.graph == name
            ],
        }
        for name in graph_names(frontiers, run_points)
    ]


def graph_names(frontiers: Sequence[Frontier], run_points: Sequence[RunPoint]) -> tuple[str, ...]:
    """Return the graphs, each once."""
    return tuple(
        dict.fromkeys([*(one.graph for one in run_points), *(line.graph for line in frontiers)])
    )


def _point(point: FrontierPoint) -> dict[str, Any]:
    return {
        "cap": point.cap_bytes,
        "peak": point.peak_bytes,
        "step": point.step_ticks,
        "bound": point.bound_ticks,
        "launches": point.num_launches,
        "bucket": point.bucket_bytes,
        "price": point.price_ms_per_gib,
        "binds": point.binds,
        "mark": point.mark,
        "baselines": [[b.name, b.step_ticks, b.peak_bytes, b.fits] for b in point.baselines],
    }


def frontier_tables(
    graph: str, frontiers: Sequence[Frontier], run_points: Sequence[RunPoint]
) -> str:
    """Return a table of all points of each frontier of ``graph``, and the sentences about it as a
    whole.
    """
    parts = [
        _part(
            line,
            [one for one in run_points if one.graph == graph and one.title in ("", line.title)],
        )
        for line in frontiers
        if line.graph == graph
    ]
    return "\n".join(parts)


def _part(line: Frontier, run_points: Sequence[RunPoint]) -> str:
    own_points = [one.point for one in run_points]
    shown = sorted(
        [*line.points, *own_points],
        key=lambda p: (p.cap_bytes is None, p.needed_bytes, p.name == ""),
    )
    rows = [_row(point) for point in shown]
    best = next((k for k, point in enumerate(shown) if point in own_points), -1)
    caption = f"{_captured(shown)}ms per GiB: the gain from the memory between two caps"
    heads = (
        "memory cap",
        "step time",
        "bound",
        "gap",
        "peak",
        "launches",
        "largest bucket",
        "ms per GiB",
    )
    points = table(
        (*heads, "best baseline that fits", "binds"), rows, caption=caption, text=(9,), best=best
    )
    items = "".join(f"<li>{escape(text)}</li>" for text in line.sentences)
    if any(point.mark for point in line.points):
        items += f"<li>{escape(line.legend)}</li>"
    title = f"<h4>{escape(line.title)}</h4>" if line.title != line.graph else ""
    return (
        f"{title}\n{f'<ul>{items}</ul>' if items else ''}\n<div"
        f" class=wide>{points}</div>\n{_slowdowns(line)}"
    )


def _captured(points: Sequence[FrontierPoint]) -> str:
    """Return the step time of the order as captured; every point has it among its baselines."""
    found = next((b for point in points for b in point.baselines if b.name == AS_CAPTURED), None)
    return (
        f"as captured: {show_us(ticks_to_us(found.step_ticks))}, peak"
        f" {show_bytes(found.peak_bytes)}; "
        if found
        else ""
    )


def _row(point: FrontierPoint) -> tuple[str, ...]:
    best = point.best_baseline
    cap = "none" if point.cap_bytes is None else show_bytes(point.cap_bytes)
    return (
        cap if point.name else f"{cap} (this run)",
        f"{show_us(ticks_to_us(point.step_ticks))} {point.mark}".rstrip(),
        show_us(ticks_to_us(point.bound_ticks)),
        f"{100 * (1 - point.bound_ticks / point.step_ticks):.2f} %" if point.step_ticks else "",
        show_bytes(point.peak_bytes),
        f"{point.num_launches}",
        show_bytes(point.bucket_bytes) if point.bucket_bytes else "no buckets",
        "" if point.price_ms_per_gib is None else f"{point.price_ms_per_gib:,.3f}",
        f"{show_us(ticks_to_us(best.step_ticks))} {best.name}" if best else "none fits",
        point.binds,
    )


def _slowdowns(line: Frontier) -> str:
    if not line.slowdowns:
        return ""
    rows = [
        (
            f"{100 * found.share:g} %",
            show_us(found.limit_us),
            show_bytes(found.peak_bytes),
            show_us(found.step_us),
            "" if found.refuted_bytes is None else show_bytes(found.refuted_bytes),
            "" if found.slower_bytes is None else show_bytes(found.slower_bytes),
        )
        for found in line.slowdowns
    ]
    head = (
        "slower than the fastest",
        "step time at most",
        "memory that is enough",
        "its step time",
        "not enough (proven)",
        "not enough (not proven)",
    )
    caption = "The smallest memory for a given slowdown"
    return f'<div class="wide">{table(head, rows, caption=caption)}</div>'
