"""The output of a study: one table of all points, and sentences about its frontiers."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from apsched.quantities import show_bytes, show_us
from apsched.report.console import console, print_fitting
from apsched.schedule.result import AS_CAPTURED
from apsched.study.report.across import Line, along_text, alongs
from apsched.study.report.binding import bindings, binds_text, bucketing_text, needs_text
from apsched.study.report.frontier import fitting, least_memory, prices_ms_per_gib
from apsched.study.report.steps import step_text, steps_of
from apsched.study.rows import ANOTHER_CAP, SHORT_SEARCH, Point
from apsched.study.worker import ALONG

_FIRST_OUT = ("captured ms", "launches", "binds", "ms per GiB", "bound ms", "baseline ms")
"""Columns that a narrow terminal does not show, the first first."""
_MARKS = {ANOTHER_CAP: "=", SHORT_SEARCH: "~"}
LEGEND = (
    "how: no sign: solved under this cap; = the schedule of another cap, taken over; ~ a short"
    " search from the schedules of other caps"
)


def print_study(lines: Sequence[Line], slowdown: float, stream: TextIO) -> None:
    """Print every point beside its bound and the best baseline that fits; the price of memory along
    caps.

    Axes other than memory take the place of the order as captured, which is a baseline, too.
    """
    axes = list(dict.fromkeys(name for line in lines for name in line.labels))
    priced = any(len(line.points) > 1 for line in lines)
    wide = not axes
    keeps = any("keep" in point.described for line in lines for point in line.points)
    figures = (
        *("memory cap", "step ms", "bound ms", "gap"),
        *(["captured ms"] if wide else []),
        *("baseline ms", "peak"),
        *(["kept"] if keeps else []),
        "launches",
        *(["ms per GiB"] if priced else []),
    )
    marked = any(mark(point) for line in lines for point in line.points)
    headings = (*axes, "graph", *(["how"] if marked else []), *figures, "binds")
    sections = []
    for line in lines:
        fit = fitting(line.points)
        prices = dict(zip((p.point_id for p in fit), prices_ms_per_gib(fit), strict=True))
        binds = dict(zip((p.point_id for p in fit), bindings(fit), strict=True))
        rows = []
        for k, point in enumerate(line.points):
            first = (
                [line.labels.get(axis, "") for axis in axes] + [line.graph]
                if k == 0
                else [""] * (len(axes) + 1)
            )
            cells = [
                *first,
                *([mark(point)] if marked else []),
                *_cells(point, wide=wide, keeps=keeps),
            ]
            if priced:
                price = prices.get(point.point_id)
                cells.append("" if price is None else f"{price:,.3f}")
            text = str(binds[point.point_id]) if point.point_id in binds else needs_text(point)
            rows.append([*cells, text])
        sections.append(rows)
    out = console(stream)
    print_fitting(out, headings, sections, right=figures, first_out=_FIRST_OUT)
    if marked:
        out.print(LEGEND, markup=False)
    for line in lines:
        if texts := sentences(line, slowdown):
            out.print(f"{line.title}:", markup=False)
        for text in texts:
            out.print(f"  {text}", markup=False)
    for along in alongs(lines):
        out.print(along_text(along), markup=False)
    for step in steps_of(lines):
        out.print(step_text(step), markup=False)


def mark(point: Point) -> str:
    """Return the sign of a schedule that no solve under its cap found; empty for others."""
    return _MARKS.get(point.schedule_from or "", "")


def _cells(point: Point, *, wide: bool, keeps: bool) -> list[str]:
    outcome = point.outcome
    kept = [show_bytes(point.graph.in_step.kept_bytes)] if keeps else []
    cap = "none" if outcome.memory_cap_bytes is None else show_bytes(outcome.memory_cap_bytes)
    if outcome.step_ticks is None:
        return [
            cap,
            "none fits",
            f"{point.bound_us / 1000:,.3f}",
            "",
            *([""] if wide else []),
            "",
            "",
            *kept,
            "",
        ]
    baselines: Mapping[str, Any] = outcome.report["baselines"]
    fit = {name: found["step_time_us"] for name, found in baselines.items() if found["fits"]}
    return [
        cap,
        f"{(point.step_time_us or 0) / 1000:,.3f}",
        f"{point.bound_us / 1000:,.3f}",
        f"{100 * (point.gap or 0):.2f} %",
        *([f"{fit[AS_CAPTURED] / 1000:,.3f}" if AS_CAPTURED in fit else ""] if wide else []),
        f"{min(fit.values()) / 1000:,.3f}" if fit else "none fits",
        show_bytes(outcome.peak_memory_bytes),
        *kept,
        f"{outcome.num_launches}",
    ]


def sentences(line: Line, slowdown: float) -> list[str]:
    """Return the sentences about a frontier as a whole; none for a single point."""
    points = fitting(line.points)
    texts = [f"note: {note}" for note in (line.points[0].graph.notes if line.points else ())]
    if len(points) > 1:
        texts += [
            slowdown_text(points, slowdown),
            binds_text(points),
            bucketing_text(points),
            _cost(points),
        ]
    if len(line.points) < line.expected:
        texts.append(
            f"{len(line.points)} of {line.expected} points; the same command resumes the study"
        )
    return texts


def slowdown_text(points: Sequence[Point], slowdown: float) -> str:
    """Return the least memory for a step that is at most ``slowdown`` slower than the fastest of
    ``points``, and between which bounds it is known.
    """
    least = least_memory(points, slowdown)
    assert least is not None
    text = (
        f"{100 * slowdown:g} % slower than the fastest, {show_us(least.step_limit_us)}:"
        f" {show_bytes(least.peak_memory_bytes)} is enough ({show_us(least.step_time_us)})"
    )
    if least.refuted_bytes is not None:
        text += f", {show_bytes(least.refuted_bytes)} is not (proven)"
    if least.slower_bytes is not None:
        text += (
            f"; with {show_bytes(least.slower_bytes)} the fastest schedule found takes"
            f" {show_us(least.slower_us or 0.0)} (not proven to be the fastest)"
        )
    return text


def _cost(points: Sequence[Point]) -> str:
    """Return the time of the frontier, in solves: the median of those that it made (the first may
    have had code to compile).
    """
    solves = sorted(point.outcome.seconds for point in points if point.outcome.how != ALONG)
    others = sum(point.outcome.seconds for point in points if point.outcome.how == ALONG)
    answered = f"{len(points) - len(solves)} answered from those in {others:.1f} s"
    text = f"{len(points)} points: {len(solves)} solved in {sum(solves):.1f} s, {answered}"
    middle = solves[len(solves) // 2] if solves else 0.0
    return f"{text}; the time of {len(solves) + others / middle:.1f} solves" if middle > 0 else text
