"""A result as Python shows it: in three lines, as text, and with its timeline as HTML."""

from collections.abc import Iterable
from html import escape

from apsched.pipeline.result import Result, Views
from apsched.quantities import show_bytes, show_us
from apsched.report.answer.first import best_baseline, first_lines, no_baseline
from apsched.report.answer.frames import frame_of
from apsched.report.explanation import explain_infeasible
from apsched.report.plots import COLORS, Bar, timeline_bars
from apsched.report.summary import summary_lines

_WIDTH, _ROW, _LEFT = 900, 22, 130
"""Pixels of the timeline, of a row with the space below it, and of the names of rows."""
_GAP = 0.25
"""Pixels below which the space between two bars of a kind is filled: a step has thousands."""


def three_lines(result: Result) -> tuple[str, str, str]:
    """Return step time and bound, memory and launches, and the best baseline that fits."""
    head = f"apsched.Result {result.problem.name}: {result.answer.status}"
    cap = show_bytes(result.caps.memory_cap_bytes)
    if result.best is None or result.step_time_us is None:
        why = result.answer.infeasibility
        return (
            f"{head}, memory cap {cap}",
            f"  {why.message if why else 'no schedule was found'}",
            f"  no schedule is faster than {show_us(result.bound_us)}",
        )
    found = best_baseline(result)
    against = no_baseline([result])
    if found is not None:
        name, us = found
        against = f"best baseline that fits: {name}, {show_us(us)}"
    return (
        f"{head}, {show_us(result.step_time_us)}, bound {show_us(result.bound_us)}, gap"
        f" {100 * result.gap:.2f} %",
        f"  peak {show_bytes(result.best.peak_memory_bytes)}, memory cap {cap},"
        f" {result.best.num_launches} launches",
        f"  {against}",
    )


def summary_text(result: Result) -> str:
    """Return the text of ``apsched solve`` about a graph: the summary and its details."""
    if result.best is None:
        return explain_infeasible(result)
    return "\n".join([*first_lines([result], None), "", *summary_lines(result)])


def as_html(result: Result) -> str:
    """Return the three lines and, where there is a schedule, its timeline as an inline picture."""
    text = f"<pre>{escape(chr(10).join(three_lines(result)))}</pre>"
    if result.schedule is None:
        return text
    return text + _timeline(
        timeline_bars(result.problem, result.schedule), result.problem.streams, result.step_time_us
    )


def _timeline(bars: Iterable[Bar], streams: tuple[str, ...], step_us: float | None) -> str:
    scale = _WIDTH / step_us if step_us else 1.0
    names = ("compute stream", *(f"group {name}" for name in streams))
    spans: dict[tuple[str, int], list[list[float]]] = {}
    for bar in sorted(bars, key=lambda bar: bar.begin_us):
        begin, end = bar.begin_us * scale, (bar.begin_us + bar.length_us) * scale
        known = spans.setdefault((bar.kind, bar.row), [])
        if known and begin - known[-1][1] < _GAP:
            known[-1][1] = max(known[-1][1], end)
        else:
            known.append([begin, end])
    parts = [
        f'<text x="0" y="{_ROW * row + 14}">{escape(name)}</text>' for row, name in enumerate(names)
    ]
    for (kind, row), found in spans.items():
        path = "".join(
            f"M{_LEFT + begin:.2f} {_ROW * row}h{max(end - begin, 0.1):.2f}v16H{_LEFT + begin:.2f}z"
            for begin, end in found
        )
        stroke = ' stroke="#D55E00" stroke-width=".5"' if kind == "exposed" else ""
        parts.append(
            f'<path d="{path}" fill="{COLORS[kind]}"{stroke}><title>{escape(kind)}</title></path>'
        )
    size = f'width="{_LEFT + _WIDTH}" height="{_ROW * len(names)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif"'
        f' font-size="11" role="img" aria-label="timeline">{"".join(parts)}</svg>'
    )


Result.views = Views(
    three_lines=three_lines, summary_text=summary_text, as_html=as_html, frame_of=frame_of
)
