"""A step under each of several memory caps, for a person and for a program."""

from collections.abc import Sequence
from typing import Any, TextIO

from apsched.quantities import show_bytes
from apsched.report.answer.accumulation import accumulation_cells, accumulation_figures
from apsched.report.answer.joint_graph import choice_figures
from apsched.report.answer.kept_words import kept_count, told_apart
from apsched.report.answer.whole_step import kept_figures
from apsched.report.console import console, plain_table
from apsched.units import ticks_to_us
from apsched.whole_step.accumulation.search import AccumulationAnswer
from apsched.whole_step.joint_graph.step import JointAnswer
from apsched.whole_step.solve import Answer


def along_caps_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the figures of each answer for ``--json``."""
    return [
        {
            "memory_cap_bytes": answer.cap_bytes,
            **_figures(answer),
            "bound_us": ticks_to_us(answer.bound.ticks),
            "gap": answer.gap,
        }
        for answer in answers
    ]


def _figures(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, AccumulationAnswer):
        return accumulation_figures(answer.best) | {"choice": sorted(answer.best.kept)}
    kept = {"kept": sorted(answer.best.kept)}
    if isinstance(answer, JointAnswer):
        return choice_figures(answer.best) | kept
    return kept_figures(answer.best) | kept


def print_along_caps(answers: Sequence[Answer], stream: TextIO) -> None:
    """Print memory and step time under each cap, with the choice."""
    several = any(isinstance(answer, AccumulationAnswer) for answer in answers)
    choice = ("kept", "stay gathered", "reduced once") if several else ("kept", "kept bytes")
    figures = ("memory cap", "peak memory", "step ms", "bound ms", *choice)
    words = () if several else ("kept parameters",)
    table = plain_table(*figures, *words, right=figures)
    kept = told_apart([answer.best.kept for answer in answers], _names(answers))
    for answer, of_answer in zip(answers, kept, strict=True):
        bound = f"{ticks_to_us(answer.bound.ticks) / 1000:,.3f}"
        table.add_row(show_bytes(answer.cap_bytes), *_cells(answer, bound, of_answer))
    out = console(stream)
    out.print(table)
    out.print()


def _names(answers: Sequence[Answer]) -> Sequence[str]:
    """Return the parameters that may be kept."""
    return next((a.names for a in answers if not isinstance(a, AccumulationAnswer)), ())


def _cells(answer: Answer, bound: str, kept: str) -> tuple[str, ...]:
    """Return the cells of an answer, of whose choice ``kept`` are the words."""
    if isinstance(answer, AccumulationAnswer):
        *counts, step, peak, _ = accumulation_cells(answer.best)
        return peak, step or "does not fit", bound, *counts
    best, figures = answer.best, _figures(answer)
    count = kept_count(figures["num_kept"], figures["num_in_node"])
    size = show_bytes(best.kept_bytes)
    if not best.fits:
        return "", "", bound, count, size, "no schedule fits"
    step = figures["step_time_us"]
    return show_bytes(best.peak_bytes), f"{step / 1000:,.3f}", bound, count, size, kept
