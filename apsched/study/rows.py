"""The tables of ``study.sqlite``, and their rows as records; :mod:`apsched.study.store` describes
the tables.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from apsched.atomic_files import one_component
from apsched.errors import InputError
from apsched.schedule.result import SolvedBy, Status
from apsched.study.worker import SOLVED, Outcome
from apsched.units import ticks_to_us

FORMAT = 1
SCHEMA = """
create table if not exists study (format integer not null);
create table if not exists runs (
    run_id text primary key, command text not null, versions text not null,
    began_utc text not null, ended_utc text, points integer
);
create table if not exists graphs (
    graph_id text primary key, name text not null, graph_hash text not null,
    cluster text not null, described text not null, num_nodes integer not null,
    num_collectives integer not null, device_memory_bytes integer, notes text not null,
    file text not null
);
create table if not exists captures (capture_id text primary key, graph_ids text not null);
create table if not exists step_ranges (
    range_id text primary key, floor_bytes integer not null, peak_bytes integer not null
);
create table if not exists points (
    point_id text primary key, graph_id text not null references graphs,
    memory_cap text not null, described text not null, run_id text not null
);
create table if not exists results (
    point_id text primary key references points, status text not null, how text not null,
    memory_cap_bytes integer, step_ticks integer, bound_ticks integer not null,
    bound_source text not null, peak_memory_bytes integer, num_launches integer,
    floor_memory_bytes integer not null, floor_bound_bytes integer not null,
    solved_floor_bytes integer not null, solved_peak_bytes integer, seconds real not null,
    report text not null, schedule text
);
create view if not exists answers as
    select graphs.name as graph, graphs.cluster, points.*,
           results.step_ticks / 1000.0 as step_time_us, results.bound_ticks / 1000.0 as bound_us,
           results.status, results.how, results.memory_cap_bytes, results.peak_memory_bytes,
           results.num_launches, results.floor_memory_bytes, results.seconds, results.schedule
    from points join graphs using (graph_id) join results using (point_id);
"""
POINTS = (
    "select graph_id, memory_cap, described, run_id, results.* from points join results using"
    " (point_id)"
)
FILE = "study.sqlite"
GRAPHS, SCHEDULES = "graphs", "schedules"
"""Folders of a study."""
IN_STEP = "in_step"
"""Key of the report of a point that has its :class:`InStep`."""
SOLVE, SHORT_SEARCH, ANOTHER_CAP = "solve", "short search", "another cap"
"""The origin of the schedule of a point: a solve under its cap, a short search from the schedules
of other caps, or one of those unchanged.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InStep:
    """The part of a graph in a step under a choice of kept parameters."""

    num_micro_batches: int = 1
    """Micro-batches of the step that run the graph."""
    kept: tuple[str, ...] = ()
    """Entries of the choice."""
    kept_bytes: int = 0
    """Passed from forward to backward."""
    shard_bytes: int = 0
    """Of kept parameters that the graph does not take: alive beside it."""
    gradient_bytes: int = 0
    """Of the micro-batches before: alive beside the graph."""

    @property
    def beside_bytes(self) -> int:
        """Bytes of the step that are alive all the time beside the graph."""
        return self.shard_bytes + self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """A graph at some costs."""

    graph_id: str
    name: str
    graph_hash: str
    cluster: str
    described: Mapping[str, Any]
    num_nodes: int
    num_collectives: int
    device_memory_bytes: int | None
    notes: tuple[str, ...]
    file: str
    in_step: InStep = field(default_factory=InStep)
    """Of a capture, or of a point: the row itself serves several."""
    apart: "tuple[GraphRow, ...]" = ()
    """Of a capture of one graph of forward and backward: both apart, as far as they are known."""
    places: tuple[int, ...] = ()
    """Of one of these: as :attr:`apsched.pipeline.load.LoadedGraph.places`."""

    def __post_init__(self) -> None:
        _check_inside(self.file, GRAPHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A question and its answer."""

    point_id: str
    graph: GraphRow
    memory_cap: str
    """As it was stated."""
    described: Mapping[str, Any]
    """All other options, by the names that ``--vary`` takes."""
    outcome: Outcome
    """Without its schedule, which is in the file ``schedule``."""
    run_id: str
    """The first run with this question."""
    schedule: str | None
    """Name of the schedule file, from the directory of the study."""

    def __post_init__(self) -> None:
        one_component(self.point_id, f"{FILE}: name of a point")
        if self.schedule is not None:
            _check_inside(self.schedule, SCHEDULES)

    @property
    def schedule_from(self) -> str | None:
        """:data:`SOLVE`, :data:`SHORT_SEARCH` or :data:`ANOTHER_CAP`; ``None`` without a
        schedule.
        """
        if self.outcome.step_ticks is None:
            return None
        if self.outcome.report.get("solved_by") == SolvedBy.ANOTHER_CAP:
            return ANOTHER_CAP
        return SOLVE if self.outcome.how == SOLVED else SHORT_SEARCH

    @property
    def step_time_us(self) -> float | None:
        """Step time of the schedule found."""
        return None if self.outcome.step_ticks is None else ticks_to_us(self.outcome.step_ticks)

    @property
    def bound_us(self) -> float:
        """No schedule is faster."""
        return ticks_to_us(self.outcome.bound_ticks)

    @property
    def gap(self) -> float | None:
        """(step time - bound) / step time."""
        return None if not self.step_time_us else 1 - self.bound_us / self.step_time_us


def graph_row(row: tuple[Any, ...]) -> GraphRow:
    """Return a row of ``graphs`` as a record."""
    (
        graph_id,
        name,
        graph_hash,
        cluster,
        described,
        num_nodes,
        num_collectives,
        memory,
        notes,
        file,
    ) = row
    says = json.loads(described)
    return GraphRow(
        graph_id=graph_id,
        name=name,
        graph_hash=graph_hash,
        cluster=cluster,
        described=says,
        num_nodes=num_nodes,
        num_collectives=num_collectives,
        device_memory_bytes=memory,
        notes=tuple(json.loads(notes)),
        file=file,
        in_step=_in_step_of_older(says.get("kept", {})),
    )


def in_step_of(says: Mapping[str, Any]) -> InStep:
    """Return the record that ``says`` is, as JSON has it."""
    return InStep(**{**says, "kept": tuple(says["kept"])})


def _in_step_of_older(kept: Mapping[str, Any]) -> InStep:
    """Return the part in the step as a graph of a study of an older version has it."""
    return InStep(
        kept=tuple(kept.get("names", ())),
        kept_bytes=kept.get("bytes", 0),
        shard_bytes=kept.get("shard_bytes", 0),
    )


def point_of(graph: GraphRow, joined: tuple[Any, ...]) -> Point:
    """Return a row of :data:`POINTS` as a record, about ``graph``."""
    _, memory_cap, described, run_id, *row = joined
    point_id, status, how, cap, step, bound, source, peak, launches, *more = row
    floor, floor_bound, solved_floor, solved_peak, seconds, report, schedule = more
    outcome = Outcome(
        status=Status(status),
        how=how,
        memory_cap_bytes=cap,
        step_ticks=step,
        bound_ticks=bound,
        bound_source=source,
        peak_memory_bytes=peak,
        num_launches=launches,
        floor_memory_bytes=floor,
        floor_bound_bytes=floor_bound,
        report=json.loads(report),
        solved_floor_bytes=solved_floor,
        solved_peak_bytes=solved_peak,
        schedule=None,
        seconds=seconds,
    )
    assert (step is None) == (outcome.status == Status.INFEASIBLE)
    in_step = outcome.report.get(IN_STEP)
    return Point(
        point_id=point_id,
        graph=replace(graph, in_step=in_step_of(in_step)) if in_step else graph,
        memory_cap=memory_cap,
        described=json.loads(described),
        outcome=outcome,
        run_id=run_id,
        schedule=schedule,
    )


def _check_inside(file: str, folder: str) -> None:
    """Raise ``InputError`` where ``file``, which a study names, does not lie in ``folder`` of
    it.
    """
    head, _, name = str(file).partition("/")
    if head != folder:
        raise InputError(
            f"{FILE}: expected a file in {folder}/, found {file!r}; do not trust a study"
            " from an unknown source"
        )
    one_component(name, f"{FILE}: file in {folder}/")
