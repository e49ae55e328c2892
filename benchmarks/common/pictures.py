"""Timelines of schedules, one over the other."""

from pathlib import Path

from matplotlib import pyplot

from apsched.problem.problem import Problem
from apsched.report.plots import plot_timeline
from apsched.schedule.result import Scored
from apsched.units import ticks_to_us


def draw_timelines(
    problem: Problem, pair: dict[str, Scored], window: tuple[float, float], file: Path
) -> None:
    """Draw the same share of the longest step of both, one over the other, on one scale."""
    figure, axes = pyplot.subplots(
        len(pair), figsize=(12.0, 4.6), sharex=True, layout="constrained"
    )
    longest = max(map(milliseconds, pair.values()))
    for ax, (title, scored) in zip(axes, pair.items(), strict=True):
        plot_timeline(problem, scored.schedule, ax)
        ax.set_title(
            f"{title}: {milliseconds(scored):.2f} ms, of it"
            f" {scored.exposed_ticks / 1e6:.2f} ms exposed",
            fontsize=9,
        )
        ax.set_xlabel("")
    for ax in axes:
        ax.set_xlim(window[0] * longest, window[1] * longest)
        for text in ax.texts:
            text.set_clip_on(True)
    axes[-1].set_xlabel("time (ms)")
    figure.savefig(file, dpi=110)


def milliseconds(scored: Scored) -> float:
    """Return the step time in milliseconds."""
    return ticks_to_us(scored.step_time_ticks) / 1000
