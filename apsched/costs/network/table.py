"""Measured times of collectives: nccl-tests output or CSV, several files as one table. No torch
here.

Between two sizes the time is interpolated on logarithmic axes. Below the smallest size it is that
size's time: an upper bound, since a smaller message can be padded, and no point there separates
latency from bandwidth. Above the largest the bandwidth between the last two points goes on. A time
that falls with size is lifted to the largest before it, since a smaller message can always be
padded; where it falls by much, :attr:`CollectiveTable.notes` says so.
"""

import csv
import io
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

from apsched.costs.clusters.cluster import Cluster
from apsched.costs.network.alpha_beta import GroupShape, bus_factor
from apsched.costs.network.nccl_tests import Measurement, check_measurement, parse_nccl_tests
from apsched.errors import InputError
from apsched.kinds import PRICED_KINDS, CollectiveKind

CSV_COLUMNS = ("kind", "group_size", "size_bytes", "time_us")
CSV_COLUMNS_WITH_NODES = ("kind", "group_size", "num_nodes", "size_bytes", "time_us")
_Key = tuple[str, int, int | None]
_NOTED_FALL = 0.1
"""Share of a time by which a larger message may be faster before it is worth a note: less is
noise.
"""
_IMPOSSIBLE = 1.5
"""Times the links' bandwidth that no measurement can show: a unit is wrong, or bytes are counted
otherwise.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    size_bytes: tuple[int, ...]
    time_us: tuple[float, ...]

    def __call__(self, size_bytes: int) -> float:
        sizes, times = self.size_bytes, self.time_us
        if size_bytes <= sizes[0]:
            return times[0]
        if size_bytes > sizes[-1]:
            return self._beyond(size_bytes)
        k = min(bisect_right(sizes, size_bytes) - 1, len(sizes) - 2)
        share = math.log(size_bytes / sizes[k]) / math.log(sizes[k + 1] / sizes[k])
        return times[k] * math.exp(share * math.log(times[k + 1] / times[k]))

    def _beyond(self, size_bytes: int) -> float:
        """Extrapolate with the bandwidth between the last two points, or with the last point's
        where they do not rise.
        """
        sizes, times = self.size_bytes, self.time_us
        us_per_byte = times[-1] / sizes[-1]
        if len(sizes) > 1 and times[-1] > times[-2]:
            us_per_byte = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return times[-1] + (size_bytes - sizes[-1]) * us_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """Times by kind, number of ranks and (if the file has it) number of nodes."""

    sources: tuple[str, ...]
    curves: dict[_Key, _Curve] = field(repr=False)
    notes: tuple[str, ...] = ()
    """Contradictions that are no errors: times that fall with size."""

    def beyond(self, cluster: Cluster) -> tuple[str, ...]:
        """Return a line for each kind and group that is faster than the links of ``cluster`` can
        be: most likely in other units.
        """
        links = (
            cluster.intra_node.busbw_gb_per_s,
            cluster.intra_node.in_switch_all_reduce_busbw_gb_per_s or 0.0,
        )
        lines = []
        for (kind, num_ranks, _), curve in sorted(
            self.curves.items(), key=lambda item: str(item[0])
        ):
            busbw = bus_factor(kind, num_ranks) * curve.size_bytes[-1] / curve.time_us[-1] / 1e3
            if busbw > _IMPOSSIBLE * max(links):
                lines.append(
                    f"{kind} on {num_ranks} ranks: {curve.size_bytes[-1]} bytes in"
                    f" {curve.time_us[-1]:g} us are {busbw:.0f} GB/s of bus bandwidth, more than"
                    f" the links of cluster {cluster.name} carry; check the units (microseconds,"
                    " bytes counted once)"
                )
        return tuple(lines)

    def covers(self, kind: str, shape: GroupShape) -> bool:
        """Say whether the table has this kind on a group of this shape; measurements without a
        shape fit by size alone.
        """
        return self._curve(kind, shape) is not None

    def collective_us(self, kind: str, shape: GroupShape, size_bytes: int) -> float:
        """Return the time in microseconds; ``InputError`` where the table does not cover the kind
        and group.
        """
        curve = self._curve(kind, shape)
        if curve is None:
            raise InputError(
                f"{', '.join(self.sources)}: no {kind} on {shape.num_ranks} ranks of"
                f" {shape.num_nodes} nodes"
            )
        return curve(size_bytes)

    def measured_bytes(self, kind: str, shape: GroupShape) -> tuple[int, ...]:
        """Return the sizes that were measured, in increasing order; none where :meth:`covers` is
        false.
        """
        curve = self._curve(kind, shape)
        return () if curve is None else curve.size_bytes

    def _curve(self, kind: str, shape: GroupShape) -> _Curve | None:
        exact = self.curves.get((kind, shape.num_ranks, shape.num_nodes))
        return exact or self.curves.get((kind, shape.num_ranks, None))


def table_of(measurements: Iterable[Measurement], *sources: str) -> CollectiveTable:
    """Return the table of ``measurements`` that come from ``sources``."""
    points = _points(measurements)
    return CollectiveTable(
        sources=sources,
        curves={key: _curve(of_group) for key, of_group in points.items()},
        notes=tuple(line for key, of_group in points.items() if (line := _falls(key, of_group))),
    )


def load_table(*paths: str | Path) -> CollectiveTable:
    """Return the table in one or more files, each nccl-tests output or CSV.

    The columns of CSV are ``kind,group_size,size_bytes,time_us``, or
    ``kind,group_size,num_nodes,size_bytes,time_us`` where groups of one size lie differently on the
    nodes; without nodes a row counts for a group of that size, however it lies.

    Bytes are counted once: an all-gather by its output, a reduce-scatter by its input, the others
    by their size. Raises ``InputError`` naming file and line when a file cannot be read, has no
    data, or contradicts itself or another.
    """
    if not paths:
        raise InputError("expected at least one file of measured collectives, found none")
    if "" in paths:  # as a path it is the working directory
        raise InputError(
            "the tables of collectives: expected the path of a file, found an empty path; state the"
            " output of nccl-tests, or CSV"
        )
    rows: list[Measurement] = []
    for path in map(Path, paths):
        rows += _read(path)
    return table_of(rows, *map(str, paths))


def _read(path: Path) -> list[Measurement]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise InputError(
            f"cannot read the table of collectives {path}: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected nccl-tests output or CSV, found binary data") from error
    is_csv = path.suffix.lower() == ".csv" or text.lstrip("\ufeff \n").startswith("kind,")
    rows = _parse_csv(text, str(path)) if is_csv else parse_nccl_tests(text, str(path), path.name)
    if not rows:
        raise InputError(
            f"{path}: no measurements found; expected the whole output of an nccl-tests program, "
            f"or CSV with the header {','.join(CSV_COLUMNS)}"
        )
    return rows


def _parse_csv(text: str, where: str) -> list[Measurement]:
    try:
        return _csv_rows(csv.reader(io.StringIO(text.removeprefix("\ufeff"))), where)
    except csv.Error as error:
        raise InputError(
            f"{where}: expected CSV with the header {','.join(CSV_COLUMNS)}; found: {error}"
        ) from None


def _csv_rows(reader: Any, where: str) -> list[Measurement]:
    header = tuple(name.strip() for name in next(reader, []))
    if header not in (CSV_COLUMNS, CSV_COLUMNS_WITH_NODES):
        raise InputError(
            f"{where}, line 1: expected the header {','.join(CSV_COLUMNS)} (or with num_nodes after"
            f" group_size); found {','.join(header)!r}"
        )
    return [
        _csv_row(header, cells, f"{where}, line {reader.line_num}")
        for cells in reader
        if any(cell.strip() for cell in cells)
    ]


def _csv_row(header: tuple[str, ...], cells: list[str], where: str) -> Measurement:
    try:
        values = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        num_nodes = int(values["num_nodes"]) if "num_nodes" in values else None
        num_ranks, size_bytes, time_us = (
            int(values["group_size"]),
            int(values["size_bytes"]),
            float(values["time_us"]),
        )
    except ValueError:
        raise InputError(
            f"{where}: expected {','.join(header)} with whole numbers and a time; found"
            f" {','.join(cells)!r}"
        ) from None
    row = Measurement(
        kind=_priced(values["kind"], where),
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        size_bytes=size_bytes,
        time_us=time_us,
        where=where,
    )
    check_measurement(row)
    if num_nodes is not None and not 1 <= num_nodes <= row.num_ranks:
        raise InputError(
            f"{where}: {row.num_ranks} ranks lie on 1 to {row.num_ranks} nodes; found {num_nodes}"
        )
    return row


def _priced(kind: str, where: str) -> CollectiveKind:
    if kind not in PRICED_KINDS:
        close = get_close_matches(kind, map(str, PRICED_KINDS), n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise InputError(
            f"{where}: expected a kind among {', '.join(PRICED_KINDS)}; found {kind!r}{hint}"
        )
    return CollectiveKind(kind)


def _points(rows: Iterable[Measurement]) -> dict[_Key, list[Measurement]]:
    """Return the measurements of each kind and group by size; ``InputError`` where two of one size
    differ.
    """
    points: dict[_Key, dict[int, Measurement]] = {}
    for row in rows:
        of_group = points.setdefault((row.kind, row.num_ranks, row.num_nodes), {})
        other = of_group.setdefault(row.size_bytes, row)
        if other.time_us != row.time_us:
            raise InputError(
                f"{row.where}: {row.kind} of {row.size_bytes} bytes on {row.num_ranks} ranks takes"
                f" {row.time_us:g} us, but {other.time_us:g} us in {other.where}; keep one of them"
                " (one dtype and one operation)"
            )
    return {
        key: sorted(of_group.values(), key=lambda row: row.size_bytes)
        for key, of_group in points.items()
    }


def _curve(rows: Sequence[Measurement]) -> _Curve:
    return _Curve(
        size_bytes=tuple(row.size_bytes for row in rows),
        time_us=tuple(accumulate((row.time_us for row in rows), max)),
    )


def _falls(key: _Key, rows: Sequence[Measurement]) -> str:
    """Return a note on times that fall with size by more than noise; empty where there are none."""
    largest = accumulate((row.time_us for row in rows), max)
    falls = [
        (1 - row.time_us / before, row)
        for before, row in zip(largest, rows, strict=True)
        if row.time_us < (1 - _NOTED_FALL) * before
    ]
    if not falls:
        return ""
    share, worst = max(falls, key=lambda fall: fall[0])
    return (
        f"{key[0]} on {key[1]} ranks: {len(falls)} of {len(rows)} times fall with size, most at"
        f" {worst.size_bytes} bytes by {share:.0%} ({worst.where}); each is taken as the largest"
        " before it"
    )
