"""Two studies side by side, and several made one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from apsched.atomic_files import digest
from apsched.errors import InputError
from apsched.names import graph_order, is_graph_name
from apsched.study.rows import Point
from apsched.study.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One question that both studies answer."""

    one: Point
    other: Point

    @property
    def gain(self) -> float | None:
        """By how much the second is shorter, as a share of the first; ``None`` where one has no
        schedule.
        """
        if not self.one.step_time_us or not self.other.step_time_us:
            return None
        return 1 - self.other.step_time_us / self.one.step_time_us

    @property
    def proven(self) -> bool:
        """Whether bounds alone prove which is faster: the slower one's bound lies above the faster
        one's step time.
        """
        if not self.one.step_time_us or not self.other.step_time_us:
            return False
        return (
            self.other.step_time_us < self.one.bound_us
            or self.one.step_time_us < self.other.bound_us
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The answers of two studies to the same questions, and the questions of only one of them."""

    pairs: tuple[Pair, ...]
    only_one: tuple[Point, ...]
    only_other: tuple[Point, ...]


def compared(one: Sequence[Point], other: Sequence[Point], ignored: Sequence[str] = ()) -> Compared:
    """Match points by their options, those in ``ignored`` left out, and their memory cap; graphs
    and versions may differ. Pairs come by graph, then by options, then by ascending memory cap.

    ``InputError`` for an ignored name that no point has, and where points of one study differ in
    nothing else: which of them answers the question of the other study is open.
    """
    names = {name for point in (*one, *other) for name in point.described}
    for name in ignored:
        if name not in names:
            raise InputError(
                f"--ignore: expected one of {', '.join(sorted(names))}; found {name!r}"
            )
    first, second = (_by_question(points, ignored) for points in (one, other))
    return Compared(
        pairs=tuple(
            Pair(one=point, other=second[key])
            for key, point in sorted(first.items(), key=lambda item: _place(item[1]))
            if key in second
        ),
        only_one=tuple(point for key, point in first.items() if key not in second),
        only_other=tuple(point for key, point in second.items() if key not in first),
    )


def merge(sources: Sequence[Store], target: Store) -> int:
    """Bring all graphs, points and files of ``sources`` into ``target``; of two answers to one
    question the better stays.

    Returns how many answers ``target`` has then.
    """
    for source in sources:
        for run in source.runs():
            target.copy_run(run)
        for point in source.points():
            target.add_graph(point.graph, source.graph_content(point.graph))
            content = source.schedule_content(point) if point.schedule is not None else None
            target.add_result(
                point.point_id,
                point.graph.graph_id,
                point.memory_cap,
                point.described,
                point.run_id,
                replace(point.outcome, schedule=content),
            )
        for capture in source.captures():
            capture_id, _ = capture
            for row in source.capture(capture_id) or ():
                for graph in (row, *row.apart):  # graphs apart have no points
                    target.add_graph(graph, source.graph_content(graph))
            target.copy_capture(capture)
        for step_range in source.step_ranges():
            target.add_step_range(*step_range)
    return len(target.points())


def _place(point: Point) -> tuple[Any, ...]:
    """Return the place of a point among others: numbers by size, other options by their text."""
    name, cap = point.graph.name, point.outcome.memory_cap_bytes
    options = [
        (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))
        for value in point.described.values()
    ]
    known = graph_order(name) if is_graph_name(name) else (0, 0)
    return known, name, options, inf if cap is None else cap


def _by_question(points: Sequence[Point], ignored: Sequence[str]) -> dict[str, Point]:
    found = {_question(point, ignored): point for point in points}
    if ignored and len(found) < len({_question(point, ()) for point in points}):
        raise InputError(
            f"--ignore {' '.join(ignored)}: expected options with one value in each study, found"
            f" points that differ in nothing else ({len(points)} points, {len(found)} without these"
            " options); drop --ignore, or compare studies of one value each"
        )
    return found


def _question(point: Point, ignored: Sequence[str]) -> str:
    described = {name: value for name, value in point.described.items() if name not in ignored}
    return digest({"graph": point.graph.name, "memory_cap": point.memory_cap, **described})
