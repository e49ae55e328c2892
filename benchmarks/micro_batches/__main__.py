"""``python -m benchmarks.micro_batches``: the gain of several micro-batches as one step.

Each case is captured with one micro-batch and with several (two, or the ``--count`` given), and
solved under the memory of the device. Times are per micro-batch: the step of several, divided by
their number. *Once* adds the gradients of all before they are reduced; *each* reduces those of each
micro-batch.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from apsched.atomic_files import write_atomic
from apsched.config import Caps, SolveOptions
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import loaded
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, solve_graph
from apsched.pipeline.sources import SourceRequest
from apsched.pipeline.steps import with_torch_schedulers
from apsched.progress import Progress
from apsched.schedule.result import Score
from apsched.units import ticks_to_us

RESULTS = Path(__file__).parents[1] / "results"
CLUSTER = "h100"
MAX_COMPUTE_MOVE = 200
_TORCH = "inductor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A preset on a mesh."""

    model: str
    mesh: str
    seq_len: int
    num_layers: int | None

    def __str__(self) -> str:
        layers = "all" if self.num_layers is None else self.num_layers
        return f"{self.model}, {self.mesh}, {self.seq_len} tokens, {layers} layers"


CASES = {
    "llama12": Case(model="llama3-8b", mesh="fsdp=8,tp=8", seq_len=8192, num_layers=12),
    "llama": Case(model="llama3-8b", mesh="fsdp=8,tp=8", seq_len=8192, num_layers=None),
    "deepseek8": Case(model="deepseek-v3-16b", mesh="fsdp=64,ep=8", seq_len=4096, num_layers=8),
    "deepseek": Case(model="deepseek-v3-16b", mesh="fsdp=64,ep=8", seq_len=4096, num_layers=None),
    "deepseek2048": Case(
        model="deepseek-v3-16b", mesh="fsdp=64,ep=8", seq_len=2048, num_layers=None
    ),
    "llama70": Case(model="llama3-70b", mesh="fsdp=32,tp=8", seq_len=4096, num_layers=None),
}
SMOKE = Case(model="llama3-debug", mesh="fsdp=2,tp=2", seq_len=4096, num_layers=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One graph of a case; times are of one micro-batch."""

    case: str
    graph: str
    reduce: str
    num_micro_batches: int
    step_us: float
    bound_us: float
    peak_bytes: int
    others_us: dict[str, float]
    """Baselines that fit."""
    solved_by: str
    solve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is run."""

    reduces: tuple[str, ...] = ("once",)
    directions: str = "both"
    count: int = 2
    """Micro-batches of a step."""
    torch: bool = False
    """Torch's own schedulers, too."""
    budget: float = SolveOptions().budget


def rows_of(case: Case, num_micro_batches: int, reduce: str, effort: Effort) -> list[Row]:
    """Return the rows of ``case`` with so many micro-batches."""
    several = num_micro_batches > 1
    request = SourceRequest(
        source=case.model,
        mesh=case.mesh,
        seq_len=case.seq_len,
        num_layers=case.num_layers,
        num_micro_batches=num_micro_batches,
        reduce=reduce if several else None,
    )
    asked = SolveRequest(
        caps=Caps(max_compute_move=MAX_COMPUTE_MOVE), options=SolveOptions(budget=effort.budget)
    )
    progress = Progress(quiet=True)
    rows = []
    with loaded(request, CostChoice(cluster=CLUSTER), effort.directions, progress) as source:
        for graph in source.graphs:
            result = solve_graph(graph, asked, progress)
            if effort.torch:
                result = with_torch_schedulers(graph, result, progress)
            rows.append(_row(case, num_micro_batches, reduce if several else "", result))
            print(f"{case}, {rows[-1].graph}, {num_micro_batches}: {rows[-1]}", file=sys.stderr)
    return rows


def _row(case: Case, n: int, reduce: str, result: Result) -> Row:
    best = result.answer.best
    if best is None:
        raise SystemExit(f"{case}: expected a schedule within the memory of the device, found none")
    known: Iterator[Score] = iter((*result.answer.baselines, *result.others))
    return Row(
        case=str(case),
        graph=result.problem.name,
        reduce=reduce,
        num_micro_batches=n,
        step_us=ticks_to_us(best.step_time_ticks) / n,
        bound_us=result.bound_us / n,
        peak_bytes=best.peak_memory_bytes,
        others_us={b.name: ticks_to_us(b.step_time_ticks) / n for b in known if b.fits},
        solved_by=result.answer.solved_by,
        solve_s=result.seconds["solve"],
    )


def measured(case: Case, effort: Effort) -> list[Row]:
    """Return all rows of ``case``; forward does not depend on when gradients are reduced."""
    rows = rows_of(case, 1, "", effort)
    for reduce in effort.reduces:
        rows += [
            row
            for row in rows_of(case, effort.count, reduce, effort)
            if row.graph == "backward" or reduce == effort.reduces[0]
        ]
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows of several micro-batches beside those of one, as Markdown."""
    lines = [
        "| case | graph | one at a time | in a row | by turns | torch | interleaved | bound | gap |"
        " of one at a time | of in a row | peak of one, of several |",
        "|:--|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    sums: dict[tuple[str, str], list[float]] = {}
    for row in (row for row in rows if row.num_micro_batches > 1):
        one = next(
            r for r in rows if (r.case, r.graph, r.num_micro_batches) == (row.case, row.graph, 1)
        )
        in_a_row = row.others_us.get("in_a_row", row.step_us)
        graph = f"backward, {row.reduce}" if row.graph == "backward" else row.graph
        lines.append(
            f"| {row.case} | {graph} | {_ms(one.step_us)} | {_ms(in_a_row)} |"
            f" {_ms(row.others_us.get('alternating'))} | {_ms(row.others_us.get(_TORCH))} |"
            f" {_ms(row.step_us)} | {_ms(row.bound_us)} | {_gap(row.bound_us, row.step_us)} |"
            f" {_share(row.step_us, one.step_us)} | {_share(row.step_us, in_a_row)} |"
            f" {one.peak_bytes / 2**30:.2f}, {row.peak_bytes / 2**30:.2f} GiB |"
        )
        for reduce in {row.reduce} if row.graph == "backward" else {"once", "each"}:
            both = sums.setdefault((row.case, reduce), [0.0, 0.0, 0.0, 0.0])
            for k, value in enumerate((one.step_us, in_a_row, row.step_us, row.bound_us)):
                both[k] += value
    for (case, reduce), (one_us, row_us, step_us, bound_us) in sums.items():
        if any((r.case, r.reduce, r.graph) == (case, reduce, "backward") for r in rows):
            lines.append(
                f"| {case} | both, {reduce} | {_ms(one_us)} | {_ms(row_us)} | | | {_ms(step_us)} |"
                f" {_ms(bound_us)} | {_gap(bound_us, step_us)} | {_share(step_us, one_us)} |"
                f" {_share(step_us, row_us)} | |"
            )
    return "\n".join(lines)


def _ms(value_us: float | None) -> str:
    return "" if value_us is None else f"{value_us / 1000:.2f}"


def _gap(bound_us: float, step_us: float) -> str:
    return f"{100 * (1 - bound_us / step_us):.1f} %"


def _share(value: float, of: float) -> str:
    return f"{100 * (value / of - 1):+.1f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.micro_batches", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--smoke", action="store_true", help="one small case, less than a minute")
    parser.add_argument("--budget", type=float, default=SolveOptions().budget)
    parser.add_argument("--direction", default="both", choices=("forward", "backward", "both"))
    parser.add_argument("--count", type=int, default=2, metavar="N", help="micro-batches of a step")
    parser.add_argument("--each", action="store_true", help="also reduce each micro-batch's own")
    parser.add_argument("--torch", action="store_true", help="torch's own schedulers, too")
    parser.add_argument("--out", metavar="DIR", default=str(RESULTS), help="for the results")
    parser.add_argument("--name", help="of the results (default: the date and micro-batches)")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.cases) - CASES.keys():
        parser.error(f"expected cases of {', '.join(CASES)}; found {', '.join(sorted(unknown))}")
    if chosen.count < 2:
        parser.error(f"--count: expected at least 2 micro-batches, found {chosen.count}")
    if chosen.smoke:
        return _smoke()
    effort = Effort(
        reduces=("once", "each") if chosen.each else ("once",),
        directions=chosen.direction,
        count=chosen.count,
        torch=chosen.torch,
        budget=chosen.budget,
    )
    rows: list[Row] = []
    out, name = Path(chosen.out), chosen.name or f"{date.today():%Y-%m-%d}-micro-batches"
    out.mkdir(parents=True, exist_ok=True)
    for key in chosen.cases or CASES:
        rows += measured(CASES[key], effort)
        text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
        write_atomic(out / f"{name}.json", text.encode())
        write_atomic(out / f"{name}.md", page(rows, effort).encode())
        print(table(rows), flush=True)
    return 0


def page(rows: Sequence[Row], effort: Effort) -> str:
    """Return the table with a heading and the options that it was made with."""
    return (
        f"# {effort.count} micro-batches\n\nTimes in ms, of one, under the memory of the device;"
        f" cluster {CLUSTER}, budget {effort.budget:g}, --max-compute-move {MAX_COMPUTE_MOVE}.\n\n"
        f"{table(rows)}\n"
    )


def _smoke() -> int:
    """Run the small case; return 0 where the requirements of every run are met, otherwise 1."""
    rows = measured(SMOKE, Effort(torch=True, budget=0.5))
    print(table(rows))
    wrong = [
        f"{row.graph}: {name} is faster"
        for row in rows
        for name, step_us in row.others_us.items()
        if step_us < row.step_us
    ]
    forward = {row.num_micro_batches: row for row in rows if row.graph == "forward"}
    if forward[2].step_us >= forward[2].others_us["in_a_row"]:
        wrong.append("forward: interleaving gains nothing over one micro-batch behind the other")
    for line in wrong:
        print(f"smoke: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
