"""A study on disk: a directory with ``study.sqlite``, graph files and schedule files.

Tables, each a plain list that a report or pandas reads:

- ``graphs``: one row a graph at some costs: where it comes from (``described``: JSON, as typed),
  its size, its file;
- ``captures``: which graphs a source gave with some options, so that nothing is captured twice;
- ``step_ranges``: the least memory and the peak of whole steps, where ranges of memory caps begin
  and end;
- ``points``: one row a question: a graph, a memory cap, all other options (``described``: JSON);
- ``results``: its answer: figures in microseconds and bytes, ``report`` (JSON, as ``apsched solve
  --json`` says of a graph);
- ``runs``: one row a run: its command, versions, begin, end and number of points.

Files are written before the row that names them, and a row is written whole: a stop at any moment
loses at most the work in flight. Several processes may write: rows have unique names, the better of
two answers to one question stays, and writers wait for each other.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from apsched.atomic_files import write_atomic
from apsched.errors import InputError
from apsched.study.rows import (
    FILE,
    FORMAT,
    GRAPHS,
    POINTS,
    SCHEDULES,
    SCHEMA,
    GraphRow,
    Point,
    graph_row,
    in_step_of,
    point_of,
)
from apsched.study.worker import Outcome, better_of

_BUSY_SECONDS = 60.0


class Store:
    """One study on disk."""

    def __init__(self, directory: Path, *, create: bool = False) -> None:
        self.directory = directory
        self._new_folders: list[Path] = []
        self._is_new = False
        path = directory / FILE
        if not create and not path.is_file():
            raise InputError(
                f"{directory}: expected the directory of a study, found no {FILE} in it; `apsched"
                " study SOURCE -o DIR` makes one"
            )
        if create:
            self._create()
        with self._open() as db:
            found = db.execute("select format from study").fetchone()
            if found is None or found[0] > FORMAT:
                raise InputError(
                    f"{path}: expected a study of format {FORMAT} or older, found"
                    f" {found and found[0]}; update apsched"
                )

    def _create(self) -> None:
        """Make the study, unless it is there; where that fails, nothing of it stays."""
        directory = self.directory
        folders = [directory / GRAPHS, directory / SCHEDULES, directory, *directory.parents]
        self._new_folders = [folder for folder in folders if not folder.exists()]
        self._is_new = not (directory / FILE).exists()
        try:
            for folder in (GRAPHS, SCHEDULES):
                (directory / folder).mkdir(parents=True, exist_ok=True)
            with self._open() as db:
                db.executescript(SCHEMA)
                db.execute(
                    "insert into study select ? where not exists (select * from study)", (FORMAT,)
                )
        except BaseException:
            self._remove_new()
            raise

    def remove_if_empty(self) -> None:
        """Remove the study if this object made it, and no run but one has used it, and no capture
        and no point is in it.
        """
        with self._open() as db:
            graphs = [file for (file,) in db.execute("select file from graphs")]
            parts = (f"(select count(*) from {table})" for table in ("captures", "points"))
            (num_kept,) = db.execute(f"select {' + '.join(parts)}").fetchone()
            (num_runs,) = db.execute("select count(*) from runs").fetchone()
        if num_kept == 0 and num_runs <= 1:
            self._remove_new(graphs)

    def _remove_new(self, graphs: Sequence[str] = ()) -> None:
        files = [f"{FILE}{ending}" for ending in ("", "-wal", "-shm", "-journal")]
        for file in (*files, *graphs) if self._is_new else ():
            (self.directory / file).unlink(missing_ok=True)
        for new in self._new_folders:
            with suppress(OSError):
                new.rmdir()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        path = self.directory / FILE
        try:
            with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as db:
                db.execute("pragma journal_mode = wal")
                db.execute("pragma foreign_keys = on")
                with db:
                    yield db
        except sqlite3.OperationalError as error:
            raise InputError(
                f"{path}: cannot read or write the study: {error}; answers that were saved before"
                " are complete: the same command resumes it"
            ) from None
        except sqlite3.DatabaseError as error:
            raise InputError(f"{path}: expected the file of a study, found: {error}") from None

    # graphs

    def add_graph(self, row: GraphRow, content: bytes) -> None:
        """Keep a graph and its file; one that is there stays."""
        path = self.directory / row.file
        if not path.is_file():
            write_atomic(path, content)
        about = (
            row.graph_id,
            row.name,
            row.graph_hash,
            row.cluster,
            _json(row.described),
            row.num_nodes,
            row.num_collectives,
        )
        values = (*about, row.device_memory_bytes, _json(row.notes), row.file)
        with self._open() as db:
            db.execute(f"insert or ignore into graphs values ({_marks(values)})", values)

    def graph(self, graph_id: str) -> GraphRow | None:
        """Return a graph; ``None`` where it or its file is not there."""
        with self._open() as db:
            found = db.execute("select * from graphs where graph_id = ?", (graph_id,)).fetchone()
        row = graph_row(found) if found else None
        return row if row is not None and (self.directory / row.file).is_file() else None

    def graph_content(self, row: GraphRow) -> bytes:
        """Return the content of a graph's file."""
        return (self.directory / row.file).read_bytes()

    def add_capture(self, capture_id: str, rows: Sequence[GraphRow]) -> None:
        """Remember which graphs a source gave, each with its part in the step, and with forward and
        backward apart.
        """
        content = [
            (row.graph_id, asdict(row.in_step), [(one.graph_id, one.places) for one in row.apart])
            for row in rows
        ]
        self.copy_capture((capture_id, _json(content)))

    def copy_capture(self, row: tuple[str, str]) -> None:
        """Keep a row of :meth:`captures` of another study."""
        with self._open() as db:
            db.execute("insert or replace into captures values (?, ?)", row)

    def capture(self, capture_id: str) -> tuple[GraphRow, ...] | None:
        """Return the graphs that a source gave; ``None`` where they are not there."""
        with self._open() as db:
            found = db.execute(
                "select graph_ids from captures where capture_id = ?", (capture_id,)
            ).fetchone()
        rows = []
        for one in json.loads(found[0]) if found else ():
            # a study of an older version has less
            graph_id, in_step, halves, *_ = (one, {}, []) if isinstance(one, str) else (*one, [])
            row, *apart = map(self.graph, (graph_id, *(half_id for half_id, _ in halves)))
            known = [half for half in apart if half is not None]
            if row is None or len(known) < len(apart):
                return None
            placed = (
                replace(half, places=tuple(places))
                for half, (_, places) in zip(known, halves, strict=True)
            )
            in_step = in_step_of(in_step) if in_step else row.in_step
            rows.append(replace(row, in_step=in_step, apart=tuple(placed)))
        return tuple(rows) if found else None

    def add_step_range(self, range_id: str, floor_bytes: int, peak_bytes: int) -> None:
        """Remember the least memory of a step, and the peak of the fastest one."""
        with self._open() as db:
            db.execute(
                "insert or replace into step_ranges values (?, ?, ?)",
                (range_id, floor_bytes, peak_bytes),
            )

    def step_range(self, range_id: str) -> tuple[int, int] | None:
        """Return the least memory of a step and the peak of the fastest; ``None`` where they are
        not known.
        """
        with self._open() as db:
            found = db.execute(
                "select floor_bytes, peak_bytes from step_ranges where range_id = ?", (range_id,)
            ).fetchone()
        return (found[0], found[1]) if found else None

    # points

    def add_result(
        self,
        point_id: str,
        graph_id: str,
        memory_cap: str,
        described: Mapping[str, Any],
        run_id: str,
        outcome: Outcome,
    ) -> None:
        """Save an answer; of two to one question the better part of each
        (:func:`apsched.study.worker.better_of`).
        """
        schedule = f"{SCHEDULES}/{point_id}.schedule.json" if outcome.schedule is not None else None
        with self._open() as db:
            db.execute("begin immediate")
            known = self._whole_point(db, point_id)
            kept = outcome if known is None else better_of(known.outcome, outcome)
            if known is not None and kept == known.outcome:
                return
            if kept.schedule is not None:
                write_atomic(self.directory / f"{schedule}", kept.schedule)  # before its row
            elif known is not None:
                schedule = known.schedule
            db.execute(
                "insert or ignore into points values (?, ?, ?, ?, ?)",
                (point_id, graph_id, memory_cap, _json(described), run_id),
            )
            values = (
                point_id,
                kept.status,
                kept.how,
                kept.memory_cap_bytes,
                kept.step_ticks,
                kept.bound_ticks,
                kept.bound_source,
                kept.peak_memory_bytes,
                kept.num_launches,
                kept.floor_memory_bytes,
                kept.floor_bound_bytes,
                kept.solved_floor_bytes,
                kept.solved_peak_bytes,
                kept.seconds,
                _json(kept.report),
                schedule,
            )
            db.execute(f"insert or replace into results values ({_marks(values)})", values)

    def points(self, point_ids: frozenset[str] | None = None) -> tuple[Point, ...]:
        """Return the points with these names, or all, in the order of their names."""
        with self._open() as db:
            graphs = {row[0]: graph_row(row) for row in db.execute("select * from graphs")}
            rows = db.execute(f"{POINTS} order by point_id").fetchall()
        found = (point_of(graphs[row[0]], row) for row in rows)
        return tuple(point for point in found if point_ids is None or point.point_id in point_ids)

    def point(self, point_id: str) -> Point | None:
        """Return one point; ``None`` where it has no answer, or one whose schedule file is lost or
        broken: it is solved again.
        """
        with self._open() as db:
            return self._whole_point(db, point_id)

    def _whole_point(self, db: sqlite3.Connection, point_id: str) -> Point | None:
        point = self._point(db, point_id)
        if point is not None and point.schedule is not None:
            try:
                json.loads(self.schedule_content(point))
            except (OSError, ValueError):
                return None
        return point

    def _point(self, db: sqlite3.Connection, point_id: str) -> Point | None:
        row = db.execute(f"{POINTS} where point_id = ?", (point_id,)).fetchone()
        if row is None:
            return None
        return point_of(
            graph_row(db.execute("select * from graphs where graph_id = ?", (row[0],)).fetchone()),
            row,
        )

    def schedule_content(self, point: Point) -> bytes:
        """Return the content of the schedule file of a point that has one."""
        assert point.schedule is not None
        return (self.directory / point.schedule).read_bytes()

    # runs

    def begin_run(
        self, run_id: str, command: Mapping[str, Any], versions: Mapping[str, str], now_utc: str
    ) -> None:
        """Record the run and its command."""
        with self._open() as db:
            db.execute(
                "insert into runs values (?, ?, ?, ?, null, null)",
                (run_id, _json(command), _json(versions), now_utc),
            )

    def end_run(self, run_id: str, now_utc: str, num_points: int) -> None:
        """Note that a run ended, with how many points."""
        with self._open() as db:
            db.execute(
                "update runs set ended_utc = ?, points = ? where run_id = ?",
                (now_utc, num_points, run_id),
            )

    def commands(self) -> dict[str, Mapping[str, Any]]:
        """Return the arguments of each run, by its name."""
        return {row[0]: json.loads(row[1]) for row in self.runs()}

    def captures(self) -> tuple[tuple[str, str], ...]:
        """Return the rows of ``captures``, by the names of the captures."""
        with self._open() as db:
            return tuple(db.execute("select * from captures order by capture_id").fetchall())

    def step_ranges(self) -> tuple[tuple[str, int, int], ...]:
        """Return the arguments of :meth:`add_step_range`, of each."""
        with self._open() as db:
            tables = {name for (name,) in db.execute("select name from sqlite_master")}
            if "step_ranges" not in tables:  # a study of an older version
                return ()
            return tuple(db.execute("select * from step_ranges order by range_id").fetchall())

    def copy_run(self, row: tuple[Any, ...]) -> None:
        """Keep a run of another study."""
        with self._open() as db:
            db.execute(f"insert or ignore into runs values ({_marks(row)})", row)

    def runs(self) -> tuple[tuple[Any, ...], ...]:
        """Return the rows of ``runs``, the first first."""
        with self._open() as db:
            return tuple(db.execute("select * from runs order by began_utc, run_id").fetchall())


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _marks(values: tuple[Any, ...]) -> str:
    return ", ".join("?" * len(values))
