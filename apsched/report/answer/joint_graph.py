"""The kept parameters of one graph of forward and backward, for a person and for a program."""

from typing import Any, TextIO

from apsched.quantities import show_bytes, show_gap, show_us
from apsched.report.answer.kept_words import kept_count, no_choice
from apsched.report.answer.whole_step import keep_json, kept_lines, kept_of, print_kept, size_of
from apsched.report.console import console, plain_table
from apsched.units import ticks_to_us
from apsched.whole_step.joint_graph.step import JointAnswer, JointChoice

_APART = "forward and backward apart:"
_JOINT = "one graph of both:"


def joint_json(answer: JointAnswer) -> dict[str, dict[str, Any]]:
    """Return the entries for ``--json``: ``keep_joint``, the choice, and with ``auto``
    ``keep_apart``, the step of forward and backward apart.
    """
    entry = {
        "kept": sorted(answer.best.kept),
        "parameters": list(answer.names),
        "num_parameters": len(answer.names),
        **choice_figures(answer.best),
        "bound_us": ticks_to_us(answer.bound.ticks),
        "bound_source": answer.bound.source,
        "gap": answer.gap,
        "memory_cap_bytes": answer.cap_bytes,
        "compared": {name: choice_figures(choice) for name, choice in answer.compared.items()},
    }
    apart = {} if answer.apart is None else {"keep_apart": keep_json(answer.apart)}
    return {"keep_joint": entry, **apart}


def print_joint(answer: JointAnswer, stream: TextIO) -> None:
    """Print the step of forward and backward apart, the choices that were compared in one graph of
    both, and the parameters that it keeps.
    """
    out = console(stream)
    if answer.apart is not None:
        out.print(_APART)
        print_kept(answer.apart, stream)
        out.print(_JOINT)
        columns = ("kept", "kept bytes", "step ms", "peak memory")
        table = plain_table("choice", *columns, "fits", right=columns)
        for name, choice in answer.compared.items():
            table.add_row(name, *_cells(choice))
        table.add_row("apsched", *_cells(answer.best))
        out.print(table)
    for line in _own_lines(answer):
        out.print(line, markup=False)
    out.print()


def joint_lines(answer: JointAnswer) -> tuple[str, ...]:
    """Return the choice as text, behind the step of forward and backward apart."""
    apart = () if answer.apart is None else (_APART, *kept_lines(answer.apart), _JOINT)
    return (*apart, *_own_lines(answer))


def _own_lines(answer: JointAnswer) -> tuple[str, ...]:
    best = answer.best
    kept = kept_of(best, len(answer.names))
    if not best.fits:
        return (f"step: {no_choice(best.least_bytes, answer.cap_bytes)}", kept)
    of = "" if answer.apart is not None else " with this choice"
    step = (
        f"step: {show_us(ticks_to_us(best.step_ticks))}, bound{of}"
        f" {show_us(ticks_to_us(answer.bound.ticks))} ({answer.bound.source}), gap"
        f" {show_gap(answer.gap)}; peak {show_bytes(best.peak_bytes)}, cap"
        f" {show_bytes(answer.cap_bytes)}"
    )
    return (step, kept)


def choice_figures(choice: JointChoice) -> dict[str, Any]:
    """Return the figures of a choice for ``--json``; no step time where it does not fit, or its
    bound excludes it.
    """
    return {
        **size_of(choice),
        "step_time_us": ticks_to_us(choice.step_ticks) if choice.fits else None,
        "peak_memory_bytes": choice.peak_bytes if choice.fits else None,
        "bound_us": ticks_to_us(choice.bound_ticks),
        "fits": choice.fits,
        "is_solved": choice.result is not None,
    }


def _cells(choice: JointChoice) -> list[str]:
    figures = choice_figures(choice)
    time = f">= {figures['bound_us'] / 1000:,.3f}"
    if choice.fits:
        time = f"{figures['step_time_us'] / 1000:,.3f}"
    elif choice.result is not None:
        time = ""
    fits = "yes" if choice.fits else "no" if choice.result is not None else "not solved"
    return [
        kept_count(figures["num_kept"], figures["num_in_node"]),
        show_bytes(choice.kept_bytes),
        time,
        show_bytes(choice.peak_bytes) if choice.fits else "",
        fits,
    ]
