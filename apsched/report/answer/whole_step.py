"""The kept parameters of a step, for a person and for a program."""

from typing import Any, TextIO

from apsched.quantities import show_bytes, show_gap, show_us
from apsched.report.answer.first import LESS_MEMORY, SLOWER
from apsched.report.answer.kept_words import kept_count, no_choice
from apsched.report.console import console, plain_table
from apsched.units import ticks_to_us
from apsched.whole_step.choices import kept_in_node, kept_whole
from apsched.whole_step.joint_graph.step import JointChoice
from apsched.whole_step.pair import SolvedChoice
from apsched.whole_step.search import ExcludedChoice, StepAnswer, TooLargeChoice

_ABOUT_THE_LEAST = 0.01
"""Choices that need at most so much more than the least memory count as equal to it."""


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
        **kept_figures(best),
        "bound_us": ticks_to_us(answer.bound.ticks),
        "bound_source": answer.bound.source,
        "gap": answer.gap,
        "memory_cap_bytes": answer.cap_bytes,
        "baselines": {name: kept_figures(choice) for name, choice in answer.baselines.items()},
        "excluded": {
            name: {
                **size_of(choice),
                "bound_us": ticks_to_us(choice.bound.ticks),
                "bound_source": choice.bound.source,
            }
            for name, choice in answer.excluded.items()
        },
        "too_large": {name: size_of(choice) for name, choice in answer.too_large.items()},
        "tried": [kept_figures(choice) for choice in answer.tried],
        "frontier": [
            {**kept_figures(choice), "kept": sorted(choice.kept)} for choice in answer.frontier
        ],
    }


def kept_figures(choice: SolvedChoice) -> dict[str, Any]:
    """Return the figures of a choice for ``--json``."""
    forward, backward = (result.step_time_us for result in choice.results)
    return {
        **size_of(choice),
        "forward_us": forward,
        "backward_us": backward,
        "step_time_us": ticks_to_us(choice.step_ticks) if choice.fits else None,
        "peak_memory_bytes": choice.peak_bytes if choice.fits else None,
        "fits": choice.fits,
    }


def size_of(
    choice: SolvedChoice | ExcludedChoice | TooLargeChoice | JointChoice,
) -> dict[str, int]:
    """Return number and bytes of the kept parameters for ``--json``."""
    return {
        "num_kept": len(kept_whole(choice.kept)),
        "num_in_node": len(kept_in_node(choice.kept)),
        "kept_bytes": choice.kept_bytes,
    }


def print_kept(answer: StepAnswer, stream: TextIO) -> None:
    """Print the choices that people make beside the one found, and the parameters that it keeps."""
    figures = ("kept", "kept bytes", "forward ms", "backward ms", "step ms", "peak memory")
    table = plain_table("choice", *figures, "fits", right=figures)
    for name, choice in answer.baselines.items():
        table.add_row(name, *kept_cells(choice))
    for name, excluded in answer.excluded.items():
        time = f">= {ticks_to_us(excluded.bound.ticks) / 1000:,.3f}"
        table.add_row(name, *_unsolved_cells(excluded, time, "not solved"))
    for name, too_large in answer.too_large.items():
        table.add_row(name, *_unsolved_cells(too_large, "", "no"))
    table.add_row("apsched", *kept_cells(answer.best))
    out = console(stream)
    out.print(table)
    for line in kept_lines(answer):
        out.print(line, markup=False)
    out.print()


def kept_cells(choice: SolvedChoice) -> list[str]:
    """Return the cells of a choice in a table: number and bytes of kept parameters, time of
    forward, of backward and of the step, peak memory, and whether it fits.
    """
    figures = kept_figures(choice)
    times = (figures[key] for key in ("forward_us", "backward_us", "step_time_us"))
    return [
        kept_count(figures["num_kept"], figures["num_in_node"]),
        show_bytes(choice.kept_bytes),
        *("" if us is None else f"{us / 1000:,.3f}" for us in times),
        show_bytes(choice.peak_bytes) if choice.fits else "",
        "yes" if choice.fits else "no",
    ]


def _unsolved_cells(choice: ExcludedChoice | TooLargeChoice, time: str, fits: str) -> list[str]:
    size = size_of(choice)
    return [
        kept_count(size["num_kept"], size["num_in_node"]),
        show_bytes(choice.kept_bytes),
        *("", "", time, "", fits),
    ]


def choice_of_less_memory(answer: StepAnswer) -> str:
    """Return the fastest of the choices that need about the least memory among those that are
    little slower, with its price; an empty text where there is none.
    """
    best = answer.best
    cheaper = [
        choice
        for choice in answer.frontier
        if choice.peak_bytes <= (1 - LESS_MEMORY) * best.peak_bytes
        and choice.step_ticks <= (1 + SLOWER) * best.step_ticks
    ]
    if not cheaper:
        return ""
    enough = (1 + _ABOUT_THE_LEAST) * min(choice.peak_bytes for choice in cheaper)
    near = [choice for choice in cheaper if choice.peak_bytes <= enough]
    least = min(near, key=lambda choice: (choice.step_ticks, choice.peak_bytes))
    slower = 100 * (least.step_ticks / best.step_ticks - 1)
    price = f"{slower:.2f} % slower needs {show_bytes(least.peak_bytes)}"
    if not least.kept:
        return f"{price} with no parameter kept: --keep none"
    return f"{price} with {_count_in_words(least)}: --memory-cap {_in_mib(least.peak_bytes)}"


def does_not_fit(answer: StepAnswer) -> str:
    """Return the memory cap to try where the stated cap is too small for the choice of ``answer``,
    and backward has less of it for its graph, since shards of kept parameters are alive, too; else
    an empty text.
    """
    best = answer.best
    clashes = [result.answer.infeasibility for result in best.results if result.best is None]
    of_memory = all(why is not None and why.caps == ("memory_cap_bytes",) for why in clashes)
    if not (best.beside_bytes and of_memory):
        return ""
    return (
        f"step ({_count_in_words(best)}): the least memory that is known to fit is"
        f" {show_bytes(best.least_bytes)}, more than the cap of {show_bytes(answer.cap_bytes)};"
        f" try --memory-cap {best.least_bytes}, or another --keep"
    )


def _in_mib(size_bytes: int) -> str:
    """Return the memory cap that holds ``size_bytes``, in whole MiB."""
    return f"{-(-size_bytes // 2**20)}MiB"


def kept_lines(answer: StepAnswer) -> tuple[str, ...]:
    """Return the step as text: its time and bound, and the kept parameters."""
    best = answer.best
    if not best.fits:
        return (f"step: {no_choice(best.least_bytes, answer.cap_bytes)}",)
    by_rule = f" ({answer.num_by_rule} as rules of the plan say)" if answer.num_by_rule else ""
    return (
        f"step: {show_us(ticks_to_us(best.step_ticks))}, bound"
        f" {show_us(ticks_to_us(answer.bound.ticks))} ({answer.bound.source}), gap"
        f" {show_gap(answer.gap)}; peak of the step {show_bytes(best.peak_bytes)}"
        f" ({best.peak_graph}) with all parameters, cap {show_bytes(answer.cap_bytes)}",
        f"{kept_of(best, answer.num_parameters)}{by_rule}",
        "  memory against step time, of the choices solved: "
        + "; ".join(
            f"{show_bytes(choice.peak_bytes)} {show_us(ticks_to_us(choice.step_ticks))}"
            f" ({_count_in_words(choice)})"
            for choice in answer.frontier
        ),
    )


def kept_of(choice: SolvedChoice | JointChoice, num_parameters: int) -> str:
    """Return the line on the parameters that ``choice`` keeps, of ``num_parameters``."""
    whole, in_node = kept_whole(choice.kept), kept_in_node(choice.kept)
    parts = f"; {len(in_node)} resharded in their node" if in_node else ""
    return (
        f"  kept from forward to backward: {len(whole)} of {num_parameters} parameters{parts},"
        f" {show_bytes(choice.kept_bytes)}; {num_parameters - len(choice.kept)} gathered again"
    )


def _count_in_words(choice: SolvedChoice) -> str:
    in_node = kept_in_node(choice.kept)
    return f"{len(kept_whole(choice.kept))} kept" + (f", {len(in_node)} in node" if in_node else "")
