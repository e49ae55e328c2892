"""A step of several micro-batches in a row, for a person and for a program."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from apsched.names import IN_NODE, NEXT, SUM, SUM_SHARDS, mark_of, name_of
from apsched.pipeline.rate import StepRate
from apsched.quantities import show_bytes, show_gap, show_us
from apsched.report.answer.first import whole_step_lines
from apsched.report.answer.kept_words import kept_count, kept_in_words, no_choice, summed_count
from apsched.report.console import console, plain_table
from apsched.units import ticks_to_us
from apsched.whole_step.accumulation.search import AccumulationAnswer
from apsched.whole_step.accumulation.step import SolvedAccumulation
from apsched.whole_step.choices import Choice

SECTIONS = {
    "": "kept from forward to backward",
    IN_NODE: "resharded in their node",
    NEXT: "gathered until the next micro-batch",
    SUM: "gradients reduced once",
    SUM_SHARDS: "shards of gradients all-reduced once",
}
"""Mark of an entry -> its meaning."""


def accumulation_json(answer: AccumulationAnswer) -> dict[str, Any]:
    """Return the step for ``--json``: its micro-batches, the choice, its figures, and the choices
    that were solved.
    """
    best = answer.best
    return {
        "num_micro_batches": answer.num_micro_batches,
        "choice": sorted(best.kept),
        "entries": list(answer.entries),
        "micro_batches": [
            {
                "count": pair.count,
                "graphs": [result.problem.name for result in pair.results],
                "step_time_us": [result.step_time_us for result in pair.results],
                "beside_bytes": list(pair.beside_bytes),
            }
            for pair in best.pairs
        ],
        **accumulation_figures(best),
        "bound_us": ticks_to_us(answer.bound.ticks),
        "bound_source": answer.bound.source,
        "gap": answer.gap,
        "memory_cap_bytes": answer.cap_bytes,
        "baselines": {
            name: accumulation_figures(solved) for name, solved in answer.baselines.items()
        },
        "excluded": {
            name: {**_counts(excluded.kept), "bound_us": ticks_to_us(excluded.bound_ticks)}
            for name, excluded in answer.excluded.items()
        },
        "tried": [{**accumulation_figures(s), "choice": sorted(s.kept)} for s in answer.tried],
    }


def accumulation_figures(solved: SolvedAccumulation) -> dict[str, Any]:
    """Return the figures of a choice for ``--json``."""
    return {
        **_counts(solved.kept),
        "step_time_us": ticks_to_us(solved.step_ticks) if solved.fits else None,
        "peak_memory_bytes": solved.peak_bytes if solved.fits else None,
        "fits": solved.fits,
    }


def _counts(choice: Choice) -> dict[str, int]:
    marks = [mark_of(entry) for entry in choice]
    return {
        "num_kept": marks.count(""),
        "num_in_node": marks.count(IN_NODE),
        "num_held": marks.count(NEXT),
        "num_summed": marks.count(SUM),
        "num_shards_summed": marks.count(SUM_SHARDS),
    }


def print_accumulation(answer: AccumulationAnswer, rate: StepRate | None, stream: TextIO) -> None:
    """Print the choices that people make beside the one found, and the step."""
    out = console(stream)
    if answer.baselines:
        figures = ("kept", "stay gathered", "reduced once", "step ms", "peak memory")
        table = plain_table("choice", *figures, "fits", right=figures)
        for name, solved in answer.baselines.items():
            table.add_row(name, *accumulation_cells(solved))
        for name, excluded in answer.excluded.items():
            time = f">= {ticks_to_us(excluded.bound_ticks) / 1000:,.3f}"
            table.add_row(name, *_count_cells(_counts(excluded.kept)), time, "", "not solved")
        table.add_row("apsched", *accumulation_cells(answer.best))
        out.print(table)
    for line in accumulation_lines(answer, rate):
        out.print(line, markup=False)
    out.print()


def accumulation_cells(solved: SolvedAccumulation) -> Sequence[str]:
    """Return the cells of a choice in a table: numbers of parameters kept, gathered until the next
    micro-batch and reduced once, time of the step, peak memory, and whether it fits.
    """
    figures = accumulation_figures(solved)
    return (
        *_count_cells(figures),
        f"{figures['step_time_us'] / 1000:,.3f}" if solved.fits else "",
        show_bytes(solved.peak_bytes) if solved.fits else "",
        "yes" if solved.fits else "no",
    )


def _count_cells(counts: Mapping[str, int]) -> Sequence[str]:
    return (
        kept_count(counts["num_kept"], counts["num_in_node"]),
        str(counts["num_held"]),
        summed_count(counts["num_summed"], counts["num_shards_summed"]),
    )


def accumulation_lines(answer: AccumulationAnswer, rate: StepRate | None) -> tuple[str, ...]:
    """Return the step as text: its time and bound, its micro-batches, and the choice."""
    best, several = answer.best, answer.num_micro_batches
    if not best.fits:
        why = no_choice(best.least_bytes, answer.cap_bytes)
        return (f"step of {several} micro-batches: {why}",)
    step_us = ticks_to_us(best.step_ticks)
    whole = rate and replace(
        rate, num_samples=several * rate.num_samples, model_us=several * rate.model_us
    )
    names = {mark: [name_of(e) for e in answer.entries if mark_of(e) == mark] for mark in SECTIONS}
    return (
        f"step of {several} micro-batches: {show_us(step_us)}, bound"
        f" {show_us(ticks_to_us(answer.bound.ticks))} ({answer.bound.source}), gap"
        f" {show_gap(answer.gap)}; peak of the step {show_bytes(best.peak_bytes)}, cap"
        f" {show_bytes(answer.cap_bytes)}",
        *(f"  {line}" for line in whole_step_lines(best.results, whole, step_us)),
        *_micro_batch_lines(best),
        *(
            f"  {words}: {kept_in_words(chosen, names[mark])}"
            for mark, words in SECTIONS.items()
            if (chosen := [name_of(e) for e in best.kept if mark_of(e) == mark])
        ),
    )


def no_choice_fits(answer: AccumulationAnswer) -> str:
    """Return the memory that the step is known to need if no choice fits, and the cap to try."""
    least = answer.best.least_bytes
    return (
        f"step of {answer.num_micro_batches} micro-batches: expected a memory cap of at least"
        f" {show_bytes(least)}, found {show_bytes(answer.cap_bytes)}. The graphs and the gradients"
        f" of micro-batches before fit these bytes; try --memory-cap {least}"
    )


def _micro_batch_lines(best: SolvedAccumulation) -> list[str]:
    found, first = [], 1
    for pair in best.pairs:
        last = first + pair.count - 1
        which = f"micro-batch {first}" if last == first else f"micro-batches {first} to {last}"
        times = " + ".join(
            f"{result.problem.name} {show_us(result.step_time_us or 0.0)}"
            for result in pair.results
        )
        found.append(f"  {which}: {times}" + (" each" if last > first else ""))
        first = last + 1
    return found
