"""The answer to one change of hardware or size as text."""

from collections.abc import Sequence
from typing import Any, TextIO

from apsched.quantities import show_bytes, show_us
from apsched.report.console import console, plain_table
from apsched.study.report.binding import binding, needs_text
from apsched.study.report.what_if import Answer
from apsched.study.rows import Point


def print_answers(text: str, answers: Sequence[Answer], stream: TextIO) -> None:
    """Print now and then for each graph, and below it the proven difference."""
    figures = (
        *("step time ms", "bound ms", "gap", "exposed ms"),
        *("memory cap", "peak memory", "collectives"),
    )
    table = plain_table("graph", "when", *figures, "binds", right=figures)
    for answer in answers:
        table.add_row(answer.now.graph.name, "now", *_cells(answer.now))
        table.add_row("", text, *_cells(answer.then), end_section=True)
    out = console(stream)
    out.print(table)
    out.print()
    for answer in answers:
        out.print(f"{answer.now.graph.name}: {sentence(answer)}", markup=False)
        for note in answer.notes:
            out.print(f"  note: {note}", markup=False)


def sentence(answer: Answer) -> str:
    """Return the answer in a sentence."""
    gain, least, most = answer.gain_us, answer.least_gain_us, answer.most_gain_us
    if answer.verdict == "nothing changes":
        return "no price and no cap changes, so nothing does"
    if gain is None or least is None or most is None:
        needs = "; ".join(
            needs_text(point) for point in (answer.now, answer.then) if point.step_time_us is None
        )
        return f"{answer.verdict}: {needs or 'no cap is known that fits'}"
    share = 100 * abs(gain) / (answer.now.step_time_us or 1.0)
    found = (
        f"{show_us(abs(gain))} ({share:.2f} %) {'shorter' if gain > 0 else 'longer'}"
        if gain
        else "no difference found"
    )
    match answer.verdict:
        case "shorter":
            return (
                f"{found}; proven: at least {show_us(least)} shorter than any schedule of now,"
                f" at most {show_us(most)}"
            )
        case "longer":
            return f"{found}; proven: at least {show_us(-most)} longer than the schedule of now"
        case "not shorter":
            return f"{found}; proven: not shorter than the schedule of now"
        case _:
            return (
                f"{found}; nothing provable: at most {show_us(most)} shorter than the"
                " schedule of now"
            )


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return the answer for programs."""
    return {
        "name": answer.now.graph.name,
        "now": _json(answer.now),
        "then": _json(answer.then),
        "verdict": answer.verdict,
        "gain_us": answer.gain_us,
        "least_gain_us": answer.least_gain_us,
        "most_gain_us": answer.most_gain_us,
        "notes": list(answer.notes),
    }


def _cells(point: Point) -> list[str]:
    outcome = point.outcome
    cap = "none" if outcome.memory_cap_bytes is None else show_bytes(outcome.memory_cap_bytes)
    if outcome.step_ticks is None:
        bound = f"{point.bound_us / 1000:,.3f}"
        return ["none fits", bound, "", "", cap, "", "", needs_text(point)]
    return [
        f"{(point.step_time_us or 0) / 1000:,.3f}",
        f"{point.bound_us / 1000:,.3f}",
        f"{100 * (point.gap or 0):.2f} %",
        f"{outcome.report['exposed_us'] / 1000:,.3f}",
        cap,
        show_bytes(outcome.peak_memory_bytes),
        f"{outcome.num_launches}",
        str(binding(point)),
    ]


def _json(point: Point) -> dict[str, Any]:
    return {
        "point_id": point.point_id,
        "schedule": point.schedule,
        "described": dict(point.described),
        **point.outcome.report,
    }
