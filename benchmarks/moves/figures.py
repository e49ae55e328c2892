"""The required gain of moving compute, and its tables."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from apsched.schedule.result import Status
from benchmarks.common.figures import Verdict, told
from benchmarks.common.grid import COMPUTE_MOVE, TORCH_PEAK
from benchmarks.common.records import CaseRecord, Noise, Row, RunRecord, TorchRun
from benchmarks.common.table import Grid, Report, in_ms

GAP = {"forward": 0.015, "backward": 0.03}
TIME_RATIO = 2.0
_SLACK = 0.001
"""Share of step time that less memory and fewer launches may cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One graph, with the peak of torch's schedule as the cap."""

    case: CaseRecord
    torch: TorchRun
    captured: Row
    """Compute as captured."""
    moved: Row
    more: tuple[Row, ...]
    """Compute moved, with more memory."""
    by_reach: tuple[tuple[int | None, Row], ...] = ()
    """Every cap on moves, and the row solved under it."""

    @property
    def told(self) -> str:
        """Which graph this is."""
        return f"{self.case.case}, {self.moved.direction}"

    @property
    def ratio(self) -> float:
        """Step time over that of torch's schedule."""
        return self.moved.step_ticks / self.torch.step_ticks

    @property
    def must(self) -> float:
        """Return the required value of that ratio."""
        return ratio_limit(self.case.model, self.moved.direction)

    @property
    def time_ratio(self) -> float | None:
        """Processor time of solve + write-back over that with compute as captured."""
        return (
            self.moved.cpu_s / self.captured.cpu_s
            if self.captured.solved and self.captured.cpu_s > 0
            else None
        )

    @property
    def over_captured(self) -> float | None:
        """Step time over that with compute as captured, where that keeps the same cap."""
        return self.moved.step_ticks / self.captured.step_ticks if self.captured_fits else None

    @property
    def captured_fits(self) -> bool:
        """Whether a schedule within the peak of torch's is known with compute as captured."""
        return self.captured.solved and self.captured.peak_bytes <= self.torch.peak_bytes


def ratio_limit(model: str, direction: str) -> float:
    """Return the required ratio of step time to that of torch's schedule."""
    if "deepseek" in model:
        return 0.95
    return 0.88 if direction == "backward" else 1.0


def pairs(run: RunRecord) -> Iterator[Pair]:
    """Yield every graph that was solved with moves."""
    for case in run.cases:
        for torch in case.torch:
            rows = [row for row in case.rows if row.direction == torch.direction]
            here = {row.max_compute_move: row for row in rows if row.cap == TORCH_PEAK}
            if {0, COMPUTE_MOVE} <= here.keys() and here[COMPUTE_MOVE].solved:
                yield Pair(
                    case=case,
                    torch=torch,
                    captured=here[0],
                    moved=here[COMPUTE_MOVE],
                    more=tuple(row for row in rows if row.cap != TORCH_PEAK),
                    by_reach=tuple(sorted(here.items(), key=lambda item: item[0] or 0)),
                )


def verdicts(run: RunRecord) -> tuple[Verdict, ...]:
    """Return the verdict on every figure."""
    found = tuple(pairs(run))
    return (
        _finished(run),
        _within_peak(run),
        _each(
            found,
            "step time over torch's, at the peak of torch's schedule",
            "≤ 0.88 FSDP x TP backward, ≤ 0.95 DeepSeek, ≤ 1 elsewhere",
            lambda p: p.ratio,
            lambda p: p.must,
            _out_of_reach,
        ),
        _each(
            found,
            "proven gap with moves",
            "≤ 3 % backward, ≤ 1.5 % forward",
            lambda p: p.moved.gap,
            lambda p: GAP[p.moved.direction],
            _open_side,
        ),
        _each(
            found,
            "processor time of solve + write-back over that without moves",
            f"≤ {TIME_RATIO:g}",
            lambda p: p.time_ratio,
            lambda _: TIME_RATIO,
            lambda _: "",
        ),
        _each(
            found,
            "step time over that with compute as captured",
            "never slower, but for the slack",
            lambda p: p.over_captured,
            lambda _: 1 + _SLACK,
            lambda _: "",
            always=True,
        ),
        _each(
            found,
            "graph after write-back, exported and simulated again",
            "the claimed figures (0)",
            lambda p: float(not p.moved.round_trip_exact),
            lambda _: 0.0,
            lambda _: "",
            always=True,
        ),
        _each(
            found,
            "mean step time under noise over that with compute as captured",
            "< 1 at 20 % and 50 %",
            _worst_noise_ratio,
            lambda _: 1.0,
            lambda _: "",
        ),
    )


def _finished(run: RunRecord) -> Verdict:
    misses = [
        f"{case.case}: did not finish ({case.message or 'interrupted'})"
        for case in run.cases
        if not case.finished
    ]
    misses += [
        f"{case.case}, {torch.direction}, torch: {torch.message}"
        for case in run.cases
        for torch in case.torch
        if torch.message
    ]
    rows = [(case, row) for case in run.cases for row in case.rows]
    misses += [f"{told(case, row)}: {row.message}" for case, row in rows if row.status == "failed"]
    found = f"{len(rows)} in {len(run.cases)} cases"
    return Verdict(
        figure="solved and checked by verify",
        must="all",
        found=found,
        misses=tuple(misses),
        always=True,
    )


def _within_peak(run: RunRecord) -> Verdict:
    rows = [
        (
            case,
            row,
            next(torch.peak_bytes for torch in case.torch if torch.direction == row.direction),
        )
        for case in run.cases
        for row in case.rows
        if row.cap == TORCH_PEAK and row.max_compute_move == COMPUTE_MOVE
    ]
    misses = [
        f"{told(case, row)}: {row.message}"
        for case, row, _ in rows
        if row.status == Status.INFEASIBLE
    ]
    misses += [
        f"{told(case, row)}: {row.peak_bytes - peak} bytes more than the {peak} of torch's"
        for case, row, peak in rows
        if row.solved and row.peak_bytes > peak
    ]
    found = f"{len(rows) - len(misses)} of {len(rows)}"
    return Verdict(
        figure="schedules within the peak of torch's",
        must="all",
        found=found,
        misses=tuple(misses),
        measured=bool(rows),
    )


def _each(
    found: Sequence[Pair],
    figure: str,
    must: str,
    value: Callable[[Pair], float | None],
    limit: Callable[[Pair], float],
    why: Callable[[Pair], str],
    *,
    always: bool = False,
) -> Verdict:
    known = [(pair, ratio) for pair in found if (ratio := value(pair)) is not None]
    misses = tuple(
        f"{pair.told}: {ratio:.4f}, must be {limit(pair):g}{why(pair)}"
        for pair, ratio in known
        if ratio > limit(pair)
    )
    said = f"{min(r for _, r in known):.4f} to {max(r for _, r in known):.4f}" if known else ""
    return Verdict(
        figure=figure, must=must, found=said, misses=misses, measured=bool(known), always=always
    )


def _out_of_reach(pair: Pair) -> str:
    """Say whether any schedule could meet the ratio that this one misses."""
    least = pair.moved.bound_ticks / pair.torch.step_ticks
    if least > pair.must:
        return (
            f"; no schedule can: the bound ({pair.moved.bound_source}) is {least:.4f} of torch's"
            " step time"
        )
    return f"; the bound ({pair.moved.bound_source}) allows {least:.4f}"


def _open_side(pair: Pair) -> str:
    """Say which side is known to be at fault: the bound where it rests on less than the cap, the
    schedule where more memory is faster.
    """
    faster = [
        row
        for row in pair.more
        if row.solved and row.step_ticks < pair.moved.step_ticks * (1 - _SLACK)
    ]
    said = f" (bound from {pair.moved.bound_source}, {in_ms(pair.moved.exposed_ticks)} ms exposed)"
    if not faster:
        return f"{said}; which side is not known"
    best = min(faster, key=lambda row: row.step_ticks)
    return (
        f"{said}; {best.cap} takes {in_ms(best.step_ticks)} ms: memory is short, of which"
        " the bound knows too little"
    )


def _noise(row: Row, waits: str, sigma: float) -> Noise | None:
    return next(
        (noise for noise in row.noise if (noise.waits, noise.sigma) == (waits, sigma)), None
    )


def _worst_noise_ratio(pair: Pair) -> float | None:
    ratios: list[float] = []
    if not pair.captured_fits:
        return None
    for noise in pair.moved.noise:
        other = _noise(pair.captured, noise.waits, noise.sigma)
        if noise.waits == "as solved" and other is not None:
            ratios.append(noise.mean_ticks / other.mean_ticks)
    return max(ratios, default=None)


def _step_grid(run: RunRecord) -> Grid:
    headings = (
        *(
            "case",
            "direction",
            "bound from",
            "cap GiB",
            "torch ms",
            "captured ms",
            "moved ms",
            "moved / torch",
            "must",
            "bound ms",
            "gap %",
        ),
        *("exposed ms", "peak GiB", "nodes moved", "by at most", "time s", "/ captured"),
    )
    return Grid(
        title="Moved compute at the peak of torch's schedule",
        headings=headings,
        rows=tuple(map(_step_row, pairs(run))),
        num_left=3,
    )


def _step_row(pair: Pair) -> tuple[str, ...]:
    moved, captured = pair.moved, pair.captured
    return (
        *(
            pair.case.case,
            moved.direction,
            moved.bound_source,
            _gib(moved.memory_cap_bytes),
            in_ms(pair.torch.step_ticks),
        ),
        *(
            (
                in_ms(captured.step_ticks) + (" +" if not pair.captured_fits else "")
                if captured.solved
                else captured.status
            ),
        ),
        in_ms(moved.step_ticks),
        *(
            f"{pair.ratio:.4f}",
            f"{pair.must:g}",
            in_ms(moved.bound_ticks),
            f"{100 * moved.gap:.2f}",
            in_ms(moved.exposed_ticks),
        ),
        *(
            _gib(moved.peak_bytes),
            f"{moved.moved_nodes}",
            f"{moved.compute_move}",
            f"{moved.cpu_s:.1f}",
        ),
        "" if pair.time_ratio is None else f"{pair.time_ratio:.2f}",
    )


def _noise_grid(run: RunRecord) -> Grid:
    headings = (
        "case",
        "direction",
        "compute",
        "waits",
        "model ms",
        "mean ms, 20 %",
        "worst",
        "mean ms, 50 %",
        "worst",
        "peak GiB",
    )
    rows = []
    for pair in pairs(run):
        for compute, row in (("as captured", pair.captured), ("moved", pair.moved)):
            for waits in dict.fromkeys(noise.waits for noise in row.noise):
                small, large = _noise(row, waits, 0.2), _noise(row, waits, 0.5)
                if small is not None and large is not None:
                    told = (pair.case.case, row.direction, compute, waits, in_ms(row.step_ticks))
                    times = (
                        small.mean_ticks,
                        small.worst_ticks,
                        large.mean_ticks,
                        large.worst_ticks,
                    )
                    rows.append((*told, *map(in_ms, times), _gib(small.peak_bytes)))
    return Grid(
        title="The same schedules where durations are not those of the model",
        headings=headings,
        rows=tuple(rows),
        num_left=4,
    )


def _memory_grid(run: RunRecord) -> Grid:
    headings = (
        "case",
        "direction",
        "cap",
        "cap GiB",
        "peak GiB",
        "step ms",
        "over torch's peak",
        "bound ms",
        "gap %",
    )
    rows = []
    for pair in pairs(run):
        for row in (pair.moved, *pair.more) if pair.more else ():
            told = (pair.case.case, row.direction, row.cap, _gib(row.memory_cap_bytes))
            if not row.solved:
                rows.append((*told, row.status, *("",) * 4))
                continue
            ratio = f"{100 * (row.step_ticks / pair.moved.step_ticks - 1):+.2f} %"
            rows.append(
                (
                    *told,
                    _gib(row.peak_bytes),
                    in_ms(row.step_ticks),
                    ratio,
                    in_ms(row.bound_ticks),
                    f"{100 * row.gap:.2f}",
                )
            )
    return Grid(title="The gain from more memory", headings=headings, rows=tuple(rows), num_left=3)


def _reach_grid(run: RunRecord) -> Grid:
    headings = (
        "case",
        "direction",
        "places",
        "step ms",
        "over captured",
        "peak GiB",
        "nodes moved",
        "by at most",
        "time s",
    )
    rows = []
    for pair in pairs(run):
        for reach, row in pair.by_reach if len(pair.by_reach) > 2 else ():
            if not row.solved:
                rows.append((pair.case.case, row.direction, f"{reach}", row.status, *("",) * 5))
                continue
            ratio = (
                f"{row.step_ticks / pair.captured.step_ticks:.4f}" if pair.captured.solved else ""
            )
            told = (
                pair.case.case,
                row.direction,
                f"{reach}",
                in_ms(row.step_ticks),
                ratio,
                _gib(row.peak_bytes),
            )
            rows.append((*told, f"{row.moved_nodes}", f"{row.compute_move}", f"{row.cpu_s:.1f}"))
    return Grid(title="How far compute may move", headings=headings, rows=tuple(rows), num_left=2)


def _gib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 2**30:.2f}"


_PREAMBLE = """\
Made by `python -m benchmarks.moves`; the raw numbers are in the JSON file beside this page, and \
`--table` makes the page from them again.

- **torch** is `schedule_overlap_bucketing` on the same graph at the same costs; its peak is the \
memory cap of both other columns
  (where nothing is known to fit that, but does with 0.1 % more, then the least that does).
  **captured** keeps the compute in its order, **moved** lets each node move by at most 200 \
places among the compute nodes.
  **+**: as captured nothing fits the cap; that time is at more memory, and nothing is compared \
with it.
- **gap** is (step time - bound) / step time; the bound holds for every order of the compute.
- **time** is processor time of solve, check and write-back; **/ captured** is that over the time \
with compute as captured.
- Noise: each node and each transfer lasts its time by a lognormal factor of mean 1, sigma 0.2 \
and 0.5, over ten seeds, the same for all
  schedules of a graph. **as solved** is the schedule of apsched: waits as late as its peak \
allows. **when done**: the same schedule with
  waits where the model says that the transfer is over; **at the end**: waits that only outputs \
need right before the output,
  with any memory."""

MOVES_REPORT = Report(
    title="Moved compute",
    preamble=_PREAMBLE,
    verdicts=verdicts,
    grids=(_step_grid, _noise_grid, _memory_grid, _reach_grid),
)
