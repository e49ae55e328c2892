"""The numbers for people: tables of Markdown, and the same on a terminal."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from apsched.units import ticks_to_us
from benchmarks.common.figures import (
    Verdict,
    gap_on_exposed,
    growth,
    time_ratio,
    torch_ratio,
    verdicts,
)
from benchmarks.common.records import CaseRecord, GraphSize, Row, RunRecord

_WIDTH_OFF_TERMINAL = 280


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One table: a title, headings, and rows of text."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_left: int
    """So many columns from the left are words; the others are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The text of a benchmark about its numbers."""

    title: str
    preamble: str
    verdicts: Callable[[RunRecord], tuple[Verdict, ...]]
    grids: tuple[Callable[[RunRecord], Grid], ...]


def grids(run: RunRecord, report: Report) -> tuple[Grid, ...]:
    """Return all tables of ``run``, the verdicts first."""
    return (_verdict_grid(report.verdicts(run)), *(grid(run) for grid in report.grids))


def markdown(run: RunRecord, notes: str, report: Report) -> str:
    """Return the dated page; ``notes`` are written by hand."""
    missed = [(verdict, miss) for verdict in report.verdicts(run) for miss in verdict.misses]
    tables = (_markdown_grid(grid) for grid in grids(run, report))
    parts = [
        f"# {report.title}, measured on {run.date}",
        report.preamble,
        _environment(run),
        *tables,
    ]
    parts.append(
        "## Misses\n\n"
        + ("\n".join(f"- {v.figure}, {v.must}: {_escaped(miss)}" for v, miss in missed) or "None.")
    )
    if notes.strip():
        parts.append("## Notes\n\n" + notes.strip())
    return "\n\n".join(parts) + "\n"


def print_run(run: RunRecord, stream: TextIO, report: Report) -> None:
    """Print every table of ``run``, and the missed figures."""
    console = Console(
        file=stream, width=None if stream.isatty() else _WIDTH_OFF_TERMINAL, highlight=False
    )
    for grid in reversed(grids(run, report)):  # the verdicts last, where people look
        table = Table(title=grid.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for k, heading in enumerate(grid.headings):
            table.add_column(heading, justify="left" if k < grid.num_left else "right")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)
    for verdict in report.verdicts(run):
        for miss in verdict.misses:
            console.print(f"missed: {verdict.figure}, {verdict.must}: {miss}", markup=False)


_PREAMBLE = """\
Made by `python -m benchmarks.solver`; the raw numbers are in the JSON file beside this page, and \
`--table` makes the page from them
again.

- **gap** is (step time - bound) / step time; **fastest gap** is that of the least step time \
found: the schedule may cost 0.1 % more
  (`time_slack`), for less memory and fewer launches. **of exposed** is (step time - bound) / \
(step time - compute): the same distance as a
  share of the time that a schedule can do anything about. Compute is that of the nodes whose \
order is fixed; launches, copies and
  casts of shards are beyond it.
- **exposed** is the time that the compute stream stalls.
- **floor** is the least memory for which a schedule is known; **layer** is the gathered weights \
of one transformer block (the largest
  one, as allocated; embedding and output are no blocks).
- **peak gap** and **launches gap** are the same for the second and third objective: how far \
memory could be from the least at that step
  time and the slack, and the number of launches from the least at that step time and that peak.
- **baseline** is the fastest baseline that fits the cap; **baseline / ours** its step time over \
ours.
- **time** is processor time (all threads, and processes started) of solve, check by `verify` and \
write-back, so that others on the
  machine do not distort it; wall time is in the JSON. **/ torch** is that over the processor \
time of torch's
  `schedule_overlap_bucketing` on the same graph in the same process; pricing nodes is in \
neither. Imports and compilation are warmed
  up beforehand on a small graph, for both, and reported apart.
- **above torch** is the most resident memory of the process while everything under the caps is \
exported, solved and written back, over
  the memory held right before: Python, torch and the captured graphs, not the libraries and the \
compiled code of the solver."""


def _environment(run: RunRecord) -> str:
    known = ", ".join(f"{name} {value}" for name, value in run.environment.items())
    commits = sorted({case.commit for case in run.cases if case.commit})
    made_by = f"; apsched at {', '.join(commits)}" if commits else ""
    wall_s, cpu_s = sum(case.wall_s for case in run.cases), sum(case.cpu_s for case in run.cases)
    return (
        f"{known}{made_by}. {len(run.cases)} cases took {wall_s / 60:.1f} minutes, {cpu_s / 60:.1f}"
        " of processor time."
    )


def _verdict_grid(verdicts: Iterable[Verdict]) -> Grid:
    rows = tuple(
        (v.figure, v.must, v.found, v.word if v.word != "missed" else f"missed ({len(v.misses)})")
        for v in verdicts
    )
    return Grid(
        title="Verdicts",
        headings=("figure", "must reach", "found", "verdict"),
        rows=rows,
        num_left=4,
    )


def _solved_grid(run: RunRecord) -> Grid:
    headings = (
        *("case", "direction", "cap", "status", "bound from", "baseline"),
        *(
            "cap GiB",
            "step ms",
            "bound ms",
            "gap %",
            "fastest gap %",
            "exposed ms",
            "of exposed %",
            "baseline / ours",
        ),
        *("peak GiB", "peak gap %", "launches", "launches gap %", "time s", "/ torch"),
    )
    rows = tuple(_solved_row(case, row) for case in run.cases for row in case.rows)
    return Grid(
        title="Every graph under every memory cap", headings=headings, rows=rows, num_left=6
    )


def _solved_row(case: CaseRecord, row: Row) -> tuple[str, ...]:
    cap_bytes = "" if row.memory_cap_bytes is None else f"{row.memory_cap_bytes / 2**30:.2f}"
    if not row.solved:
        return (
            case.case,
            row.direction,
            row.cap,
            f"{row.status}: {row.message}",
            "",
            "",
            cap_bytes,
            *("",) * 13,
        )
    best, ratio = row.best_baseline, time_ratio(case, row)
    return (
        *(
            case.case,
            row.direction,
            row.cap,
            row.status,
            row.bound_source,
            best.name if best else "none fits",
        ),
        *(
            cap_bytes,
            in_ms(row.step_ticks),
            in_ms(row.bound_ticks),
            f"{100 * row.gap:.3f}",
            f"{100 * row.fastest_gap:.3f}",
        ),
        in_ms(row.exposed_ticks),
        f"{100 * gap_on_exposed(row, case.graph(row.direction)):.1f}",
        f"{best.step_ticks / row.step_ticks:.4f}" if best else "",
        *(
            f"{row.peak_bytes / 2**30:.2f}",
            f"{100 * row.peak_gap:.2f}",
            f"{row.num_launches}",
            f"{100 * row.launches_gap:.1f}",
        ),
        *(f"{row.cpu_s:.1f}", "" if ratio is None else f"{ratio:.2f}"),
    )


def _torch_grid(run: RunRecord) -> Grid:
    headings = (
        "case",
        "direction",
        "torch's pass",
        "peak GiB",
        "torch ms",
        "ours ms",
        "torch / ours",
        "torch s",
        "ours s, median",
        "time, ours / torch",
    )
    rows = []
    for case in run.cases:
        for made in case.torch:
            if made.message:
                rows.append((case.case, made.direction, f"{made.name}: {made.message}", *("",) * 7))
                continue
            ratio, ours_s = (
                torch_ratio(made),
                [row.cpu_s for row in case.rows if row.direction == made.direction and row.solved],
            )
            middle = median(ours_s) if ours_s else 0.0
            ours = made.ours
            rows.append(
                (
                    *(
                        case.case,
                        made.direction,
                        made.name,
                        f"{made.peak_bytes / 2**30:.2f}",
                        in_ms(made.step_ticks),
                    ),
                    (
                        in_ms(ours.step_ticks)
                        if ours is not None and ours.solved
                        else (ours.status if ours is not None else "")
                    ),
                    *(
                        "" if ratio is None else f"{ratio:.4f}",
                        f"{made.cpu_s:.1f}",
                        f"{middle:.1f}",
                    ),
                    f"{middle / made.cpu_s:.2f}" if made.cpu_s > 0 else "",
                )
            )
    return Grid(
        title="torch's schedulers, and ours with the peak of their graph as the cap",
        headings=headings,
        rows=tuple(rows),
        num_left=3,
    )


def _growth_grid(run: RunRecord) -> Grid:
    rows = tuple(
        (
            fit.cap,
            f"{fit.least_nodes} to {fit.most_nodes}",
            f"{fit.exponent:.2f}",
            ", ".join(f"{direction} {value:.2f}" for direction, value in fit.by_direction),
        )
        for fit in growth(run)
    )
    title = (
        "Growth: exponent of time (solve + write-back) against nodes, llama3 8B, 70B, 405B on fsdp,"
        " seq 8192"
    )
    return Grid(
        title=title, headings=("cap", "nodes", "exponent", "by direction"), rows=rows, num_left=1
    )


def _process_grid(run: RunRecord) -> Grid:
    headings = (
        "case",
        "again",
        "nodes",
        "collectives",
        "torch GB",
        "peak, solver GB",
        "above torch GB",
        "peak, torch's passes GB",
        "warm-up s",
        "case, processor min",
        "case, wall min",
    )
    rows = []
    for case in run.cases:
        memory = case.memory
        told = {
            a.how: a.message or ("same bytes" if a.same_bytes else "OTHER BYTES")
            for a in case.again
        }
        sizes = (
            (
                memory.torch_bytes,
                memory.solver_peak_bytes,
                memory.above_torch_bytes,
                memory.torch_pass_peak_bytes,
            )
            if memory
            else ()
        )
        rows.append(
            (
                (
                    case.case
                    if case.finished
                    else f"{case.case} (did not finish: {case.message or 'interrupted'})"
                ),
                ", ".join(f"{how}: {what}" for how, what in told.items()),
                _listed(case, lambda g: g.num_nodes),
                _listed(case, lambda g: g.num_collectives),
                *((f"{size / 1e9:.2f}" for size in sizes) if sizes else ("",) * 4),
                f"{case.warm_up_cpu_s:.1f}",
                f"{case.cpu_s / 60:.1f}",
                f"{case.wall_s / 60:.1f}",
            )
        )
    return Grid(title="Graphs and processes", headings=headings, rows=tuple(rows), num_left=2)


def _listed(case: CaseRecord, number: Callable[[GraphSize], int]) -> str:
    return ", ".join(str(number(graph)) for graph in case.graphs)


def in_ms(ticks: int) -> str:
    return f"{ticks_to_us(ticks) / 1000:.3f}"


def _markdown_grid(grid: Grid) -> str:
    marks = [":--" if k < grid.num_left else "--:" for k in range(len(grid.headings))]
    lines = [_line(grid.headings), _line(marks), *(_line(row) for row in grid.rows)]
    return f"## {grid.title}\n\n" + "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


SOLVER_REPORT = Report(
    title="The solver",
    preamble=_PREAMBLE,
    verdicts=verdicts,
    grids=(_solved_grid, _torch_grid, _growth_grid, _process_grid),
)
