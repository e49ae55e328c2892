"""The required figures, and a check of the measured ones."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from apsched.config import SolveOptions
from apsched.pipeline.inductor_baseline import INDUCTOR
from benchmarks.common.records import CaseRecord, GraphSize, Row, RunRecord, TorchRun

GAP_EVERYWHERE = 0.01
GAP_IN_HALF = 0.001
MEDIAN_TIME_RATIO, WORST_TIME_RATIO = 1.0, 3.0
GROWTH_EXPONENT = 1.3
MEMORY_ABOVE_TORCH_BYTES = 2 * 10**9

_GROWTH_FAMILY = (
    ("llama3-8b", "fsdp=64"),
    ("llama3-8b", "fsdp=256"),
    ("llama3-70b", "fsdp=256"),
    ("llama3-405b", "fsdp=1024"),
)
"""One architecture, one sharding, one length of sequence: only the number of layers grows."""
_GROWTH_SEQ_LEN = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One figure: the requirement, the value found, and the misses."""

    figure: str
    must: str
    found: str
    misses: tuple[str, ...] = ()
    measured: bool = True
    always: bool = False
    """Must hold in every run, however small."""

    @property
    def word(self) -> str:
        """``pass``, ``missed`` or ``not measured``."""
        if self.misses:
            return "missed"
        return "pass" if self.measured else "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Exponent of processor time against nodes, under one memory cap."""

    cap: str
    exponent: float
    """Over forward and backward graphs together."""
    by_direction: tuple[tuple[str, float], ...]
    least_nodes: int
    most_nodes: int


def exponent(nodes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return b of seconds = a * nodes^b, by least squares in logarithms; there must be two
    different numbers of nodes.
    """
    slope, _ = np.polyfit(np.log(nodes), np.log(seconds), 1)
    return float(slope)


def gap_on_exposed(row: Row, graph: GraphSize) -> float:
    """Return (step time - bound) / (step time - compute): the distance to the bound, as a share of
    the time that a schedule can change.

    Compute is that of the nodes whose order is fixed; launches, copies, casts of shards and stalls
    make up the rest of the step time.
    """
    beyond = row.step_ticks - graph.compute_ticks
    return (row.step_ticks - row.bound_ticks) / beyond if beyond > 0 else 0.0


def growth(run: RunRecord) -> tuple[Growth, ...]:
    """Return the growth under every cap for which all three sizes of the family were measured."""
    points: dict[str, list[tuple[str, int, float]]] = {}
    models: dict[str, set[str]] = {}
    for case in run.cases:
        if (case.model, case.mesh) in _GROWTH_FAMILY and case.seq_len == _GROWTH_SEQ_LEN:
            for row in case.rows:
                if row.solved and row.cpu_s > 0:
                    points.setdefault(row.cap, []).append(
                        (row.direction, case.graph(row.direction).num_nodes, row.cpu_s)
                    )
                    models.setdefault(row.cap, set()).add(case.model)
    return tuple(_growth(cap, found) for cap, found in points.items() if len(models[cap]) >= 3)


def _growth(cap: str, points: Sequence[tuple[str, int, float]]) -> Growth:
    directions = dict.fromkeys(direction for direction, _, _ in points)
    by_direction = []
    for wanted in directions:
        here = [(nodes, seconds) for direction, nodes, seconds in points if direction == wanted]
        if len({nodes for nodes, _ in here}) >= 2:
            by_direction.append((wanted, exponent([n for n, _ in here], [s for _, s in here])))
    nodes = [n for _, n, _ in points]
    overall = exponent(nodes, [s for _, _, s in points])
    return Growth(
        cap=cap,
        exponent=overall,
        by_direction=tuple(by_direction),
        least_nodes=min(nodes),
        most_nodes=max(nodes),
    )


def time_ratio(case: CaseRecord, row: Row) -> float | None:
    """Return the processor time of solve + write-back over that of ``schedule_overlap_bucketing``
    on the same graph.
    """
    torch_s = next(
        (
            run.cpu_s
            for run in case.torch
            if run.direction == row.direction and run.name == INDUCTOR
        ),
        0.0,
    )
    return row.cpu_s / torch_s if torch_s > 0 and row.solved else None


def verdicts(run: RunRecord) -> tuple[Verdict, ...]:
    """Return the verdict on every figure."""
    return (
        _finished(run),
        _gap(run),
        _gap_in_half(run),
        _never(
            run,
            "step time against each baseline that fits the cap",
            "never slower",
            lambda case, row: (
                f"{b.name} is faster"
                for b in row.baselines
                if b.fits and b.step_ticks < row.step_ticks
            ),
        ),
        _never(
            run,
            "bound against step time",
            "never above",
            lambda case, row: (
                "the bound is above the step time" for _ in range(row.bound_ticks > row.step_ticks)
            ),
        ),
        _never(
            run,
            "graph after write-back, exported and simulated again",
            "the claimed figures",
            lambda case, row: ("not the claimed figures" for _ in range(not row.round_trip_exact)),
        ),
        _monotone(run),
        _against_torch(run),
        _time(run),
        _growth_verdict(run),
        _memory(run),
        _same_bytes(run),
    )


def solved_rows(run: RunRecord) -> Iterator[tuple[CaseRecord, Row]]:
    """Yield every graph and cap of the grid with a schedule."""
    return ((case, row) for case in run.cases for row in case.rows if row.solved)


def told(case: CaseRecord, row: Row) -> str:
    """Return which graph and cap this is."""
    return f"{case.case}, {row.direction}, {row.cap}"


def _finished(run: RunRecord) -> Verdict:
    misses = [
        f"{case.case}: did not finish ({case.message or 'interrupted'})"
        for case in run.cases
        if not case.finished
    ]
    rows = [(case, row) for case in run.cases for row in case.rows]
    misses += [
        f"{told(case, row)}: {row.status}, {row.message}" for case, row in rows if not row.solved
    ]
    found = f"{sum(row.solved for _, row in rows)} of {len(rows)} in {len(run.cases)} cases"
    return Verdict(
        figure="schedules found, checked by verify",
        must="all",
        found=found,
        misses=tuple(misses),
        always=True,
    )


def _gap(run: RunRecord) -> Verdict:
    rows = sorted(solved_rows(run), key=lambda pair: -pair[1].gap)
    misses = [
        f"{told(case, row)}: {100 * row.gap:.3f} % (of exposed time"
        f" {100 * gap_on_exposed(row, case.graph(row.direction)):.1f} %; bound from"
        f" {row.bound_source})"
        for case, row in rows
        if row.gap > GAP_EVERYWHERE
    ]
    found = (
        f"worst {100 * rows[0][1].gap:.3f} %, {len(misses)} of {len(rows)} above" if rows else ""
    )
    must = f"≤ {100 * GAP_EVERYWHERE:g} % in every case"
    return Verdict(
        figure="proven gap on step time",
        must=must,
        found=found,
        misses=tuple(misses),
        measured=bool(rows),
    )


def _gap_in_half(run: RunRecord) -> Verdict:
    gaps = [row.fastest_gap for _, row in solved_rows(run)]
    num_tight = sum(gap <= GAP_IN_HALF for gap in gaps)
    num_tight_after = sum(row.gap <= GAP_IN_HALF for _, row in solved_rows(run))
    found = f"{num_tight} of {len(gaps)} ({num_tight_after} with the slack spent)"
    misses = (f"only {found}",) if 2 * num_tight < len(gaps) else ()
    must = f"≤ {100 * GAP_IN_HALF:g} % in at least half"
    return Verdict(
        figure="proven gap on the least step time found",
        must=must,
        found=found,
        misses=misses,
        measured=bool(gaps),
    )


def _never(
    run: RunRecord, figure: str, must: str, wrong: Callable[[CaseRecord, Row], Iterable[str]]
) -> Verdict:
    rows = list(solved_rows(run))
    misses = tuple(f"{told(case, row)}: {what}" for case, row in rows for what in wrong(case, row))
    found = (
        f"{len(rows) - len(misses)} of {len(rows)}"
        if not misses
        else f"{len(misses)} misses in {len(rows)}"
    )
    return Verdict(
        figure=figure, must=must, found=found, misses=misses, measured=bool(rows), always=True
    )


def _monotone(run: RunRecord) -> Verdict:
    """Compare each cap with the tighter ones on the same graph; time that bought memory or launches
    is no loss.
    """
    slack, misses, num_pairs = SolveOptions().time_slack, [], 0
    for case in run.cases:
        for graph in case.graphs:
            rows = [row for row in case.rows if row.direction == graph.direction and row.solved]
            rows.sort(
                key=lambda row: math.inf if row.memory_cap_bytes is None else row.memory_cap_bytes
            )
            for tighter, row in pairwise(rows):
                num_pairs += 1
                if row.step_ticks - tighter.step_ticks > slack * tighter.step_ticks:
                    misses.append(
                        f"{told(case, row)}: {100 * (row.step_ticks / tighter.step_ticks - 1):.2f}"
                        f" % slower than {tighter.cap}"
                    )
    found = f"{num_pairs - len(misses)} of {num_pairs}"
    must = f"never slower, but for the slack of {100 * slack:g} %"
    return Verdict(
        figure="looser memory cap against tighter",
        must=must,
        found=found,
        misses=tuple(misses),
        measured=num_pairs > 0,
    )


def torch_ratio(run: TorchRun) -> float | None:
    """Return the step time of torch's graph over ours with its peak as the cap."""
    return (
        run.step_ticks / run.ours.step_ticks if run.ours is not None and run.ours.solved else None
    )


def _why_not(run: TorchRun) -> str:
    return (
        f"{run.ours.status}, {run.ours.message}" if run.ours is not None else "no schedule of ours"
    )


def _against_torch(run: RunRecord) -> Verdict:
    ran = [(case, made) for case in run.cases for made in case.torch]
    misses = [
        f"{case.case}, {made.direction}, {made.name}: {made.message}"
        for case, made in ran
        if made.message
    ]
    ratios = [(case, made, torch_ratio(made)) for case, made in ran if not made.message]
    misses += [
        f"{case.case}, {made.direction}, {made.name}: "
        + (_why_not(made) if ratio is None else f"ratio {ratio:.4f}")
        for case, made, ratio in ratios
        if ratio is None or ratio < 1
    ]
    known = [ratio for _, _, ratio in ratios if ratio is not None]
    found = f"torch's step time is {min(known):.4f} to {max(known):.4f} of ours" if known else ""
    return Verdict(
        figure="step time against torch's schedulers, cap = their own peak",
        must="never slower",
        found=found,
        misses=tuple(misses),
        measured=bool(known),
    )


def _time(run: RunRecord) -> Verdict:
    ratios = [
        (case, row, ratio)
        for case, row in solved_rows(run)
        if (ratio := time_ratio(case, row)) is not None
    ]
    if not ratios:
        return Verdict(figure=_TIME, must=_TIME_MUST, found="", measured=False)
    middle, worst = median(ratio for _, _, ratio in ratios), max(ratio for _, _, ratio in ratios)
    misses = [f"median {middle:.2f}"] if middle > MEDIAN_TIME_RATIO else []
    above = sorted(
        ((r, told(case, row)) for case, row, r in ratios if r > WORST_TIME_RATIO), reverse=True
    )
    misses += [f"{where}: {r:.2f}" for r, where in above]
    return Verdict(
        figure=_TIME,
        must=_TIME_MUST,
        found=f"median {middle:.2f}, worst {worst:.2f}",
        misses=tuple(misses),
    )


_TIME = "processor time of solve + write-back over that of schedule_overlap_bucketing"
_TIME_MUST = f"median ≤ {MEDIAN_TIME_RATIO:g}, worst ≤ {WORST_TIME_RATIO:g}"


def _growth_verdict(run: RunRecord) -> Verdict:
    fits = growth(run)
    misses = tuple(
        f"{fit.cap}: {fit.exponent:.2f}" for fit in fits if fit.exponent > GROWTH_EXPONENT
    )
    sizes = f" over {fits[0].least_nodes} to {fits[0].most_nodes} nodes" if fits else ""
    found = ", ".join(f"{fit.cap} {fit.exponent:.2f}" for fit in fits) + sizes
    return Verdict(
        figure="growth of time with nodes",
        must=f"exponent ≤ {GROWTH_EXPONENT:g}",
        found=found,
        misses=misses,
        measured=bool(fits),
    )


def _memory(run: RunRecord) -> Verdict:
    known = [
        (case.memory.above_torch_bytes, case.case) for case in run.cases if case.memory is not None
    ]
    misses = tuple(
        f"{name}: {size / 1e9:.2f} GB" for size, name in known if size > MEMORY_ABOVE_TORCH_BYTES
    )
    found = f"at most {max(known)[0] / 1e9:.2f} GB ({max(known)[1]})" if known else ""
    must = f"≤ {MEMORY_ABOVE_TORCH_BYTES / 1e9:g} GB above the memory of torch"
    return Verdict(
        figure="memory of the process", must=must, found=found, misses=misses, measured=bool(known)
    )


def _same_bytes(run: RunRecord) -> Verdict:
    every = [(case, again) for case in run.cases for again in case.again]
    compared = [(case, again) for case, again in every if not again.message]
    failed = [
        f"{c.case}, {a.direction}, {a.how}: {a.message}"
        for c, a in every
        if a.message and not a.message.startswith("not run")
    ]
    misses = [
        f"{case.case}, {again.direction}, {again.how}: other bytes"
        for case, again in compared
        if not again.same_bytes
    ]
    found = f"{len(compared) - len(misses)} of {len(compared)}"
    return Verdict(
        figure="same input again, on 1 core and on 2 cores under load",
        must="the same schedule file, byte for byte",
        found=found,
        misses=(*misses, *failed),
        measured=bool(compared),
        always=True,
    )
