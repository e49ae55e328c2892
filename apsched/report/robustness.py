"""Step times of schedules over sampled costs, for people and for programs."""

from dataclasses import asdict

from rich.table import Table

from apsched.report.console import plain_table
from apsched.units import ticks_to_us
from apsched.what_if.robustness import Robustness


def robustness_json(found: Robustness) -> dict[str, object]:
    """Return the object for ``--json``."""
    return {
        **asdict(found.options),
        "candidates": found.num_candidates,
        "chosen": found.chosen.name,
        "schedules": {
            s.name: {
                "step_time_us": ticks_to_us(s.step_time_ticks),
                "mean_us": ticks_to_us(s.mean_ticks),
                "worst_us": ticks_to_us(s.worst_ticks),
                "worst_slower": s.slower,
            }
            for s in found.spreads
        },
    }


def robustness_table(found: list[tuple[str, Robustness]]) -> Table:
    """Return the step times of each schedule of each graph, as a table for people; ``found`` has
    the names of graphs.
    """
    figures = ("as priced ms", "mean ms", "worst ms", "worst above as priced")
    table = plain_table("graph", "schedule", *figures, right=figures)
    for name, robustness in found:
        for first, s in enumerate(robustness.spreads):
            ticks = (s.step_time_ticks, s.mean_ticks, s.worst_ticks)
            cells = [f"{ticks_to_us(t) / 1000:,.3f}" for t in ticks]
            table.add_row(
                name if first == 0 else "",
                s.name,
                *cells,
                f"{100 * s.slower:.2f} %",
                end_section=s is robustness.spreads[-1],
            )
    return table


def robustness_line(found: Robustness) -> str:
    """Return in one line the gain over the schedule for the stated costs."""
    options, chosen, priced = found.options, found.chosen, found.as_priced
    text = (
        f"  {options.count} scenarios, noise {options.noise:g}: in the worst of them"
        f" {100 * chosen.slower:.2f} % slower than priced"
    )
    if chosen == priced:
        return (
            f"{text}; of {found.num_candidates} candidates the schedule that believes the costs is"
            f" best by {options.measure} step time"
        )
    pairs = {
        "mean": (chosen.mean_ticks, priced.mean_ticks),
        "worst": (chosen.worst_ticks, priced.worst_ticks),
    }
    gain, cost = (
        1 - pairs[options.measure][0] / pairs[options.measure][1],
        chosen.step_time_ticks / priced.step_time_ticks - 1,
    )
    return (
        f"{text}, against {100 * priced.slower:.2f} % for the schedule that believes the costs;"
        f" {100 * gain:.2f} % faster by {options.measure} step time, for"
        f" {100 * cost:.2f} % as priced"
    )
