"""Pictures of a schedule: its timeline, and its memory along the order. Needs matplotlib (``pip
install 'apsched[plots]'``).

Each function draws into ``ax`` (a new one where there is none) and returns it. Colours are those of
Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers tell apart; one colour
means one kind in every picture.
"""

from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from apsched.errors import InputError
from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Problem
from apsched.problem.storage_origins import KEPT_ACROSS, storages_of
from apsched.schedule.analysis.moved_compute import moved_compute
from apsched.schedule.memory import lifetimes
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.simulate import Timeline, simulate
from apsched.units import ticks_to_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "compute": "#56B4E9",
    "moved compute": "#332288",
    "copy": "#F0E442",
    "launch": "#000000",
    "exposed": "#FFFFFF",
    CollectiveKind.ALL_GATHER: "#E69F00",
    CollectiveKind.REDUCE_SCATTER: "#009E73",
    CollectiveKind.ALL_REDUCE: "#CC79A7",
    CollectiveKind.ALL_TO_ALL: "#0072B2",
    CollectiveKind.BROADCAST: "#999999",
}
"""Kind of a bar -> its colour. Moved compute is indigo of Paul Tol's muted scheme
(https://sronpersonalpages.nl/~pault/): much darker than other compute, so that it stands out
without colours, too.
"""
_DARK = ("moved compute", CollectiveKind.ALL_TO_ALL, "launch")
"""Kinds with white names in them."""
CAP_COLOR = "#D55E00"
KEPT_COLOR = "#882255"
"""Parameters kept from forward to backward: wine of Paul Tol's muted scheme."""

_HEIGHT = 0.8
_LABEL_POINTS = 7.0
_MOST_WITH_EDGES = 400
"""Bars beyond which the lines between them would hide them."""


class Bar(NamedTuple):
    """One bar of a timeline."""

    kind: str
    row: int
    """0: the compute stream; then one for each process group."""
    begin_us: float
    length_us: float
    labels: tuple[str, ...]
    """Labels for it, the longest first: the first that fits is used."""


def timeline_bars(problem: Problem, schedule: Schedule) -> tuple[Bar, ...]:
    """Return the bars of ``plot_timeline``; bars of no length are left out."""
    timeline = simulate(problem, schedule)
    moved = moved_compute(problem, schedule)
    bars = [_compute_bar(problem, schedule, timeline, k, moved) for k in range(len(schedule.steps))]
    end = timeline.end_ticks[-1] if timeline.end_ticks else 0
    bars.append(
        Bar("exposed", 0, ticks_to_us(end), ticks_to_us(timeline.step_time_ticks - end), ())
    )
    for t in timeline.transfers:
        key = problem.keys[problem.collectives[t.members[0]].key]
        names = (
            " + ".join(_name(problem, c) for c in t.members),
            *((f"{len(t.members)}x",) if len(t.members) > 1 else ()),
        )
        bars.append(
            Bar(
                key.kind,
                1 + t.stream,
                ticks_to_us(t.begin_ticks),
                ticks_to_us(t.end_ticks - t.begin_ticks),
                names,
            )
        )
    return tuple(bar for bar in bars if bar.length_us > 0)


def _compute_bar(
    problem: Problem, schedule: Schedule, timeline: Timeline, k: int, moved: frozenset[int]
) -> Bar:
    step = schedule.steps[k]
    begin, end = timeline.begin_ticks[k], timeline.end_ticks[k]
    kind = _kind_of_step(problem, step)
    labels = (problem.node_names[step.index],) if kind == "compute" else ()
    if kind == "compute" and step.index in moved:
        kind = "moved compute"
    return Bar(kind, 0, ticks_to_us(begin), ticks_to_us(end - begin), labels)


def _kind_of_step(problem: Problem, step: Step) -> str:
    if step.kind in (StepKind.COPY_IN, StepKind.COPY_OUT):
        return "copy"
    if step.kind is StepKind.START or (
        step.kind is StepKind.NODE and problem.kinds[step.index] is NodeKind.START
    ):
        return "launch"
    if step.kind is StepKind.WAIT or problem.kinds[step.index] is NodeKind.WAIT:
        return "exposed"
    return "compute"


def _name(problem: Problem, c: int) -> str:
    collective = problem.collectives[c]
    return collective.module or problem.node_names[collective.start]


def plot_timeline(problem: Problem, schedule: Schedule, ax: "Axes | None" = None) -> "Axes":
    """Draw the timeline: a row for the compute stream and one for each process group; return the
    axes.

    Hatched bars are exposed time: the compute stream stalls, waiting for a collective. Dark bars
    are compute that does not run in the order as captured (the fewest nodes whose moves give this
    order). Bars that are wide enough carry the name of their node, or of the parameters that the
    transfer serves (``4x``: four members). Plots with a shared time axis keep the longest time in
    view.
    """
    ax = _axes(ax, height=1.2 + 0.6 * (1 + len(problem.streams)))
    bars = timeline_bars(problem, schedule)
    end_us = max((bar.begin_us + bar.length_us for bar in bars), default=1.0)
    unit, scale = ("ms", 1e-3) if end_us >= 1e4 else ("us", 1.0)
    right = max(
        end_us * scale, _shared_limit(ax.get_shared_x_axes().get_siblings(ax), ax.get_xlim())
    )
    edge = 0.3 if len(bars) <= _MOST_WITH_EDGES else 0.0
    for kind in _in_legend_order(bar.kind for bar in bars):
        for row in sorted({bar.row for bar in bars if bar.kind == kind}):
            spans = [
                (bar.begin_us * scale, bar.length_us * scale)
                for bar in bars
                if (bar.kind, bar.row) == (kind, row)
            ]
            drawn = ax.broken_barh(
                spans,
                (row - _HEIGHT / 2, _HEIGHT),
                facecolors=COLORS[kind],
                edgecolor="white",
                linewidth=edge,
            )
            drawn.set_label(kind if row == _first(bars, kind) else "")
            if kind == "exposed":
                drawn.set(hatch="////", edgecolor=CAP_COLOR)
    ax.set_xlim(0, right)
    ax.set_ylim(len(problem.streams) + 0.6, -0.6)
    ax.set_yticks(
        range(1 + len(problem.streams)),
        ["compute stream", *(f"group {name}" for name in problem.streams)],
    )
    ax.set_xlabel(f"time ({unit})")
    _write_labels(ax, bars, scale)
    _legend(ax)
    return ax


def _first(bars: tuple[Bar, ...], kind: str) -> int:
    return min(bar.row for bar in bars if bar.kind == kind)


def _in_legend_order(kinds: Iterable[str]) -> list[str]:
    present = set(kinds)
    return [kind for kind in COLORS if kind in present]


def _write_labels(ax: "Axes", bars: tuple[Bar, ...], scale: float) -> None:
    """Write names into the bars that have room for them."""
    low, high = ax.get_xlim()
    points_per_unit = ax.get_window_extent().width * 72 / ax.figure.dpi / (high - low)
    for bar in bars:
        room = bar.length_us * scale * points_per_unit
        label = next(
            (text for text in bar.labels if 0.62 * _LABEL_POINTS * len(text) + 2 < room), ""
        )
        if label:
            place, color = (
                (bar.begin_us + bar.length_us / 2) * scale,
                "white" if bar.kind in _DARK else "black",
            )
            ax.text(
                place, bar.row, label, ha="center", va="center", fontsize=_LABEL_POINTS, color=color
            )


def plot_memory(
    problem: Problem,
    schedule: Schedule,
    cap_bytes: int | None = None,
    ax: "Axes | None" = None,
    *,
    kept_tensors: Iterable[str] = (),
) -> "Axes":
    """Draw the bytes alive at each step of ``schedule``, with their peak, the bytes that the caller
    keeps, and the cap; return the axes. Bytes of ``kept_tensors``, nodes whose values are kept from
    forward to backward, have a colour of their own.

    The horizontal axis is the order of the schedule, not the clock: memory is a function of the
    order alone.
    """
    ax = _axes(ax, height=3.0)
    live = simulate(problem, schedule).live_bytes
    largest = max(*live, problem.kept_bytes, cap_bytes or 0, 1)
    unit, scale = next(
        (u, s)
        for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
        if largest >= s
    )
    place = range(len(live))
    top = max(
        1.1 * largest / scale, _shared_limit(ax.get_shared_y_axes().get_siblings(ax), ax.get_ylim())
    )
    ax.fill_between(
        place, [b / scale for b in live], step="mid", color=COLORS["compute"], alpha=0.5
    )
    ax.plot(
        place,
        [b / scale for b in live],
        drawstyle="steps-mid",
        color=COLORS[CollectiveKind.ALL_TO_ALL],
        linewidth=1.2,
        label="alive",
    )
    across = storages_of(problem, kept_tensors)
    if across:
        ax.fill_between(
            place,
            [b / scale for b in _alive(problem, schedule, across)],
            step="mid",
            color=KEPT_COLOR,
            alpha=0.75,
            label=KEPT_ACROSS,
        )
    _plot_levels(ax, problem.kept_bytes, cap_bytes, scale, unit)
    if live:
        peak = max(range(len(live)), key=live.__getitem__)
        ax.plot(
            [peak],
            [live[peak] / scale],
            marker="v",
            color="#000000",
            linestyle="none",
            label=f"peak {live[peak] / scale:.4g} {unit}",
        )
    ax.set_xlim(0, max(len(live) - 1, 1))
    ax.set_ylim(0, top)
    ax.set_xlabel("step of the schedule (position in the order)")
    ax.set_ylabel(f"memory ({unit})")
    _legend(ax)
    return ax


def _plot_levels(ax: "Axes", kept_bytes: int, cap_bytes: int | None, scale: int, unit: str) -> None:
    """Draw the bytes that the caller keeps, and the cap, as lines from end to end."""
    if kept_bytes:
        ax.axhline(
            kept_bytes / scale,
            color="#666666",
            linestyle=":",
            linewidth=1.2,
            label="kept by the caller",
        )
    if cap_bytes is not None:
        ax.axhline(
            cap_bytes / scale,
            color=CAP_COLOR,
            linestyle="--",
            linewidth=1.5,
            label=f"cap {cap_bytes / scale:.4g} {unit}",
        )


def _alive(problem: Problem, schedule: Schedule, storages: Collection[int]) -> list[int]:
    """Return the bytes of ``storages`` that are alive at each step."""
    change = [0] * (len(schedule.steps) + 1)
    for life in lifetimes(problem, schedule):
        if life.storage in storages:
            change[life.first] += life.size_bytes
            change[life.last + 1] -= life.size_bytes
    return list(accumulate(change[:-1]))


def _shared_limit(siblings: "list[Axes]", limits: tuple[float, float]) -> float:
    """Return the range of axes that share theirs with others, so that a later picture does not cut
    an earlier one off.
    """
    return limits[1] if len(siblings) > 1 and any(ax.has_data() for ax in siblings) else 0.0


def _legend(ax: "Axes") -> None:
    ax.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False, borderaxespad=0.0
    )


def _axes(ax: "Axes | None", height: float) -> "Axes":
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError:
        raise InputError(
            "pictures need matplotlib, which is not installed; pip install 'apsched[plots]'"
        ) from None
    return pyplot.subplots(figsize=(10.0, height), layout="constrained")[1]
