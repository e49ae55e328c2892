"""What is kept from forward to backward, for a person and for a program."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TextIO

from apsched.names import part_of
from apsched.quantities import show_bytes, show_us
from apsched.report.table import console, plain_table
from apsched.units import ticks_to_us
from apsched.whole_step.pair import SolvedChoice
from apsched.whole_step.search import StepAnswer


def keep_json(answer: StepAnswer) -> dict[str, Any]:
    """Return what ``--json`` says about the step: what is kept, its figures, and the choices that
    were solved.
    """
    best = answer.best
    return {
        "kept": sorted(best.kept),
        "num_parameters": answer.num_parameters,
        "num_by_rule": answer.num_by_rule,
        **_figures(best),
        "bound_us": ticks_to_us(answer.bound.ticks),
        "bound_source": answer.bound.source,
        "gap": answer.gap,
        "memory_cap_bytes": answer.cap_bytes,
        "baselines": {name: _figures(choice) for name, choice in answer.baselines.items()},
        "tried": [_figures(choice) for choice in answer.tried],
        "frontier": [
            {**_figures(choice), "kept": sorted(choice.kept)} for choice in answer.frontier
        ],
    }


def _figures(choice: SolvedChoice) -> dict[str, Any]:
    forward, backward = (result.step_time_us for result in choice.results)
    return {
        "num_kept": len(choice.kept),
        "kept_bytes": choice.kept_bytes,
        "forward_us": forward,
        "backward_us": backward,
        "step_time_us": ticks_to_us(choice.step_ticks) if choice.fits else None,
        "peak_memory_bytes": choice.peak_bytes if choice.fits else None,
        "fits": choice.fits,
    }


def print_kept(answer: StepAnswer, stream: TextIO) -> None:
    """Print the choices that people make beside the one found, and what that keeps."""
    figures = ("kept", "kept bytes", "forward ms", "backward ms", "step ms", "peak memory")
    table = plain_table("choice", *figures, "fits", right=figures)
    for name, choice in (*answer.baselines.items(), ("apsched", answer.best)):
        table.add_row(name, *_cells(choice))
    out = console(stream)
    out.print(table)
    for line in kept_lines(answer):
        out.print(line, markup=False)
    out.print()


def _cells(choice: SolvedChoice) -> list[str]:
    figures = _figures(choice)
    times = (figures[key] for key in ("forward_us", "backward_us", "step_time_us"))
    return [
        str(len(choice.kept)),
        show_bytes(choice.kept_bytes),
        *("" if us is None else f"{us / 1000:,.3f}" for us in times),
        show_bytes(choice.peak_bytes) if choice.fits else "",
        "yes" if choice.fits else "no",
    ]


def frontier_json(answers: Sequence[StepAnswer]) -> list[dict[str, Any]]:
    """Return what ``--json`` says of the step under each of several memory caps."""
    return [
        {
            "memory_cap_bytes": answer.cap_bytes,
            **_figures(answer.best),
            "bound_us": ticks_to_us(answer.bound.ticks),
            "gap": answer.gap,
            "kept": sorted(answer.best.kept),
        }
        for answer in answers
    ]


def print_frontier(answers: Sequence[StepAnswer], stream: TextIO) -> None:
    """Print memory and step time under each cap, with what is kept."""
    figures = ("memory cap", "peak memory", "step ms", "bound ms", "kept", "kept bytes")
    table = plain_table(*figures, "what is kept", right=figures)
    for answer in answers:
        best = answer.best
        _, size, _, _, step, peak, _ = _cells(best)
        bound = f"{ticks_to_us(answer.bound.ticks) / 1000:,.3f}"
        kept = kept_in_words(best.kept, answer.names) if best.fits else "no schedule fits"
        count = str(len(best.kept))
        table.add_row(show_bytes(answer.cap_bytes), peak, step, bound, count, size, kept)
    out = console(stream)
    out.print(table)
    out.print()


def kept_in_words(kept: Iterable[str], names: Sequence[str]) -> str:
    """Return the parameters ``kept`` of ``names`` by block: blocks that are kept whole, and those
    of which a part is.

    >>> kept_in_words(["a.0.w", "a.1.w", "a.2.w"], ["a.0.w", "a.1.w", "a.2.w", "a.2.b", "n.w"])
    'a.0-1; parts of a.2'
    """
    every, some = Counter(map(part_of, names)), Counter(map(part_of, kept))
    whole = _ranges(part for part in every if some[part] == every[part])
    parts = _ranges(part for part in every if 0 < some[part] < every[part])
    found = [", ".join(whole), f"parts of {', '.join(parts)}" if parts else ""]
    return "; ".join(words for words in found if words) or "nothing"


def _ranges(parts: Iterable[str]) -> list[str]:
    """Return ``parts`` in order, blocks that follow each other as one: ``layers.2-5``."""

    def numbered(part: str) -> tuple[str, int]:
        stem, _, number = part.rpartition(".")
        return (stem, int(number)) if stem and number.isdigit() else (part, -1)

    order = sorted(map(numbered, parts))
    found: list[str] = []
    for (stem, _), run in groupby(enumerate(order), key=lambda at: (at[1][0], at[1][1] - at[0])):
        numbers = [number for _, (_, number) in run]
        ends = dict.fromkeys((numbers[0], numbers[-1]))
        found.append(f"{stem}.{'-'.join(map(str, ends))}" if numbers[0] >= 0 else stem)
    return found


def kept_lines(answer: StepAnswer) -> tuple[str, ...]:
    """Return the step in words: its time and bound, and what is kept."""
    best = answer.best
    if not best.fits:
        return ("step: no choice fits the memory cap",)
    again = answer.num_parameters - len(best.kept)
    by_rule = f" ({answer.num_by_rule} as rules of the plan say)" if answer.num_by_rule else ""
    return (
        f"step: {show_us(ticks_to_us(best.step_ticks))}, bound"
        f" {show_us(ticks_to_us(answer.bound.ticks))} ({answer.bound.source}), gap"
        f" {100 * answer.gap:.3f} %; peak {show_bytes(best.peak_bytes)}, cap"
        f" {show_bytes(answer.cap_bytes)}",
        f"  kept from forward to backward: {len(best.kept)} of {answer.num_parameters} parameters,"
        f" {show_bytes(best.kept_bytes)}; {again} gathered again{by_rule}",
        "  memory against step time, of the choices solved: "
        + "; ".join(
            f"{show_bytes(choice.peak_bytes)} {show_us(ticks_to_us(choice.step_ticks))}"
            f" ({len(choice.kept)} kept)"
            for choice in answer.frontier
        ),
    )
