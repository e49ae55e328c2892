"""The kept parameters of a step, for a person and for a program."""

from collections.abc import Sequence
from typing import Any, TextIO

from apsched.quantities import show_bytes, show_us
from apsched.report.answer.kept_words import kept_count, kept_in_words
from apsched.report.table import console, plain_table
from apsched.units import ticks_to_us
from apsched.whole_step.choices import kept_in_node, kept_whole
from apsched.whole_step.one_more import MoreMemory
from apsched.whole_step.pair import SolvedChoice
from apsched.whole_step.search import StepAnswer

APART = "forward and backward apart; the graph of both keeps the same parameters:"
"""Heading of the step whose choice a joint graph makes."""


def keep_json(answer: StepAnswer) -> dict[str, Any]:
    """Return the step for ``--json``: the kept parameters, its figures, and the choices that were
    solved.
    """
    best = answer.best
    return {
        "kept": sorted(best.kept),
        "parameters": list(answer.names),
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
        "num_kept": len(kept_whole(choice.kept)),
        "num_in_node": len(kept_in_node(choice.kept)),
        "kept_bytes": choice.kept_bytes,
        "forward_us": forward,
        "backward_us": backward,
        "step_time_us": ticks_to_us(choice.step_ticks) if choice.fits else None,
        "peak_memory_bytes": choice.peak_bytes if choice.fits else None,
        "fits": choice.fits,
    }


def print_kept(answer: StepAnswer, stream: TextIO) -> None:
    """Print the choices that people make beside the one found, and the parameters that it keeps."""
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
        kept_count(figures["num_kept"], figures["num_in_node"]),
        show_bytes(choice.kept_bytes),
        *("" if us is None else f"{us / 1000:,.3f}" for us in times),
        show_bytes(choice.peak_bytes) if choice.fits else "",
        "yes" if choice.fits else "no",
    ]


def frontier_json(answers: Sequence[StepAnswer]) -> list[dict[str, Any]]:
    """Return the step under each of several memory caps for ``--json``."""
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
    """Print memory and step time under each cap, with the kept parameters."""
    figures = ("memory cap", "peak memory", "step ms", "bound ms", "kept", "kept bytes")
    table = plain_table(*figures, "kept parameters", right=figures)
    for answer in answers:
        best = answer.best
        count, size, _, _, step, peak, _ = _cells(best)
        bound = f"{ticks_to_us(answer.bound.ticks) / 1000:,.3f}"
        kept = kept_in_words(best.kept, answer.names) if best.fits else "no schedule fits"
        table.add_row(show_bytes(answer.cap_bytes), peak, step, bound, count, size, kept)
    out = console(stream)
    out.print(table)
    out.print()


def kept_lines(answer: StepAnswer) -> tuple[str, ...]:
    """Return the step as text: its time and bound, and the kept parameters."""
    best = answer.best
    if not best.fits:
        return ("step: no choice fits the memory cap",)
    whole, in_node = kept_whole(best.kept), kept_in_node(best.kept)
    again = answer.num_parameters - len(best.kept)
    parts = f"; {len(in_node)} resharded in their node" if in_node else ""
    by_rule = f" ({answer.num_by_rule} as rules of the plan say)" if answer.num_by_rule else ""
    return (
        f"step: {show_us(ticks_to_us(best.step_ticks))}, bound"
        f" {show_us(ticks_to_us(answer.bound.ticks))} ({answer.bound.source}), gap"
        f" {100 * answer.gap:.3f} %; peak {show_bytes(best.peak_bytes)} with all"
        f" parameters, cap {show_bytes(answer.cap_bytes)}",
        f"  kept from forward to backward: {len(whole)} of {answer.num_parameters} parameters"
        f"{parts}, {show_bytes(best.kept_bytes)}; {again} gathered again{by_rule}",
        "  memory against step time, of the choices solved: "
        + "; ".join(
            f"{show_bytes(choice.peak_bytes)} {show_us(ticks_to_us(choice.step_ticks))}"
            f" ({_count_in_words(choice)})"
            for choice in answer.frontier
        ),
    )


def _count_in_words(choice: SolvedChoice) -> str:
    in_node = kept_in_node(choice.kept)
    return f"{len(kept_whole(choice.kept))} kept" + (f", {len(in_node)} in node" if in_node else "")


def more_memory_json(found: MoreMemory) -> dict[str, Any]:
    """Return the figures of a step with more memory for ``--json``."""
    return {
        "more_bytes": found.more_bytes,
        "memory_cap_bytes": found.more.cap_bytes,
        **_figures(found.more.best),
        "bound_us": ticks_to_us(found.more.bound.ticks),
        "gain_us": ticks_to_us(found.gain_ticks),
        "proven_gain_us": ticks_to_us(found.proven_ticks),
        "possible_gain_us": ticks_to_us(found.possible_ticks),
        "also_kept": sorted(found.also_kept),
        "no_longer_kept": sorted(found.no_longer_kept),
    }


def more_memory_lines(found: MoreMemory) -> tuple[str, ...]:
    """Return the gain from more memory in words."""
    now, more = found.now, found.more
    caps = f"memory cap {show_bytes(now.cap_bytes)} -> {show_bytes(more.cap_bytes)}"
    possible = f"at most {show_us(ticks_to_us(found.possible_ticks))}"
    if not found.gain_ticks:
        gain = f"no gain found; {possible}" if found.possible_ticks else "gains nothing (proven)"
        return (f"one more {show_bytes(found.more_bytes)} ({caps}): {gain}",)
    share = 100 * found.gain_ticks / now.best.step_ticks
    if found.proven_ticks:
        possible = f"at least {show_us(ticks_to_us(found.proven_ticks))}, {possible}"
    size = show_bytes(abs(more.best.kept_bytes - now.best.kept_bytes))
    changes = [
        f"{len(names)} {verb} ({kept_in_words(names, now.names)})"
        for verb, names in (("more kept", found.also_kept), ("again", found.no_longer_kept))
        if names
    ]
    less = "less" if more.best.kept_bytes < now.best.kept_bytes else "more"
    return (
        f"one more {show_bytes(found.more_bytes)} ({caps}):"
        f" -{show_us(ticks_to_us(found.gain_ticks))} ({share:.2f} %), proven:"
        f" {possible}",
        f"  {', '.join(changes)}: {size} {less}" if changes else "  the same parameters are kept",
    )
