"""The raw numbers of a run, as they stand in its JSON file; derived figures are not stored."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from apsched.atomic_files import write_atomic
from apsched.errors import InputError
from apsched.schedule.result import Status

FORMAT = "apsched-benchmark-solver"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A schedule that people have today."""

    name: str
    step_ticks: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """One schedule under durations that are not those of the model."""

    waits: str
    """Where its waits stand: ``as solved``, ``when done`` or ``at the end``."""
    sigma: float
    """Sigma of the lognormal factor on each node and each transfer."""
    mean_ticks: int
    worst_ticks: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One graph solved under one memory cap."""

    direction: str
    cap: str
    memory_cap_bytes: int | None
    status: str
    """``optimal``, ``feasible``, ``infeasible``, or ``failed`` (``message`` says how)."""
    message: str = ""
    step_ticks: int = 0
    fastest_ticks: int = 0
    """The least step time found, before the slack was spent on memory and launches."""
    bound_ticks: int = 0
    bound_source: str = ""
    solved_by: str = ""
    exposed_ticks: int = 0
    peak_bytes: int = 0
    peak_bound_bytes: int = 0
    num_launches: int = 0
    launches_bound: int = 0
    baselines: tuple[Baseline, ...] = ()
    round_trip_exact: bool = False
    solve_cpu_s: float = 0.0
    solve_wall_s: float = 0.0
    write_back_cpu_s: float = 0.0
    write_back_wall_s: float = 0.0
    deterministic_work: float = 0.0
    max_compute_move: int | None = 0
    """Cap on moves of compute nodes, in places."""
    moved_nodes: int = 0
    """The fewest compute nodes that have to move to make this order."""
    compute_move: int = 0
    """Places by which the one moved that moved furthest."""
    noise: tuple["Noise", ...] = ()
    least_cap_bytes: int = 0
    """Where nothing fits: the least memory cap with a known schedule; 0 for none."""

    @property
    def solved(self) -> bool:
        """Whether there is a schedule."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    @property
    def gap(self) -> float:
        """(step time - bound) / step time."""
        return (self.step_ticks - self.bound_ticks) / self.step_ticks if self.step_ticks else 0.0

    @property
    def fastest_gap(self) -> float:
        """(least step time found - bound) / least step time found."""
        return (
            (self.fastest_ticks - self.bound_ticks) / self.fastest_ticks
            if self.fastest_ticks
            else 0.0
        )

    @property
    def peak_gap(self) -> float:
        """(peak - bound on it) / peak, at that step time and the slack."""
        return (
            (self.peak_bytes - self.peak_bound_bytes) / self.peak_bytes if self.peak_bytes else 0.0
        )

    @property
    def launches_gap(self) -> float:
        """(launches - bound on them) / launches, at that step time, the slack and that peak."""
        return (
            (self.num_launches - self.launches_bound) / self.num_launches
            if self.num_launches
            else 0.0
        )

    @property
    def cpu_s(self) -> float:
        """Processor time of solve + write-back."""
        return self.solve_cpu_s + self.write_back_cpu_s

    @property
    def wall_s(self) -> float:
        """Wall time of solve + write-back."""
        return self.solve_wall_s + self.write_back_wall_s

    @property
    def best_baseline(self) -> Baseline | None:
        """The fastest baseline that fits the cap."""
        return min((b for b in self.baselines if b.fits), key=lambda b: b.step_ticks, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRun:
    """The schedule of one of torch's schedulers for a graph."""

    direction: str
    name: str
    message: str = ""
    """Why there is nothing; empty where there is."""
    step_ticks: int = 0
    peak_bytes: int = 0
    num_launches: int = 0
    cpu_s: float = 0.0
    """Processor time of torch's pass alone."""
    wall_s: float = 0.0
    ours: Row | None = None
    """Solved with the peak of torch's graph as the memory cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize:
    """One graph of a case."""

    direction: str
    num_nodes: int
    num_collectives: int
    compute_ticks: int
    """Time of the compute nodes whose order is fixed: every schedule spends it."""
    layer_bytes: int
    """Gathered weights of one layer."""
    floor_bytes: int
    """The least feasible memory that is known."""
    floor_bound_bytes: int
    """No schedule needs less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident memory of the process of a case, in bytes."""

    torch_bytes: int
    """Memory held right before the solver was called on the case: Python, torch and the captured
    graphs, without the solver's libraries and compiled code, which the solve of a small graph had
    loaded.
    """
    solver_peak_bytes: int
    """The most, from then until everything under the four caps was solved and written back."""
    torch_pass_peak_bytes: int = 0
    """The most while torch's schedulers ran, afterwards; 0 where they did not."""

    @property
    def above_torch_bytes(self) -> int:
        """Return the memory of the solve above that of torch."""
        return self.solver_peak_bytes - self.torch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """One graph solved again in another process."""

    direction: str
    cap: str
    how: str
    """``1 core`` or ``2 cores under load``."""
    same_bytes: bool
    message: str = ""
    """Why it could not be compared; empty where it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """Everything about one case."""

    case: str
    model: str
    mesh: str
    seq_len: int
    commit: str
    finished: bool = False
    message: str = ""
    """Why it did not finish."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of everything."""
    warm_up_cpu_s: float = 0.0
    """Processor time of solving a small graph beforehand: imports, and compiling (or loading code
    compiled before).
    """
    graphs: tuple[GraphSize, ...] = ()
    rows: tuple[Row, ...] = ()
    torch: tuple[TorchRun, ...] = ()
    memory: Memory | None = None
    again: tuple[Again, ...] = ()

    def graph(self, direction: str) -> GraphSize:
        """Return the graph of ``direction``."""
        return next(graph for graph in self.graphs if graph.direction == direction)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All cases of a run, with its date and environment."""

    date: str
    environment: Mapping[str, str]
    cases: tuple[CaseRecord, ...] = field(default=())

    def with_case(self, record: CaseRecord) -> "RunRecord":
        """Return the run with ``record`` in place of an earlier one of that case."""
        return replace(self, cases=(*(c for c in self.cases if c.case != record.case), record))


def save_run(path: Path, run: RunRecord) -> None:
    """Write ``run``, whole or not at all."""
    _save(path, {"format": FORMAT, "version": VERSION, **asdict(run)})


def load_run(path: Path) -> RunRecord:
    """Return the run in ``path``; ``InputError`` names a file that holds none."""
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError(f"format {data['format']!r} version {data['version']!r}")
        return RunRecord(
            date=data["date"],
            environment=data["environment"],
            cases=tuple(_case(case) for case in data["cases"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: expected the numbers of a run ({FORMAT}, version {VERSION}), found {error};"
            " run it again"
        ) from None


def save_case(path: Path, record: CaseRecord) -> None:
    """Write the record of a case so far."""
    _save(path, asdict(record))


def load_case(path: Path) -> CaseRecord:
    """Return the record that the process of a case wrote."""
    return _case(json.loads(path.read_bytes()))


def _save(path: Path, data: Mapping[str, Any]) -> None:
    write_atomic(path, (json.dumps(data, indent=1) + "\n").encode())


def _case(data: dict[str, Any]) -> CaseRecord:
    return CaseRecord(
        **data
        | {
            "graphs": tuple(GraphSize(**graph) for graph in data["graphs"]),
            "rows": tuple(_row(row) for row in data["rows"]),
            "torch": tuple(
                TorchRun(**run | {"ours": _row(run["ours"]) if run["ours"] else None})
                for run in data["torch"]
            ),
            "memory": Memory(**data["memory"]) if data["memory"] else None,
            "again": tuple(Again(**again) for again in data["again"]),
        }
    )


def _row(data: dict[str, Any]) -> Row:
    return Row(
        **data
        | {
            "baselines": tuple(Baseline(**baseline) for baseline in data["baselines"]),
            "noise": tuple(Noise(**noise) for noise in data.get("noise", ())),
        }
    )
