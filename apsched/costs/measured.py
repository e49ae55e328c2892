"""Measured costs: times of operations, transfers, launches and copies from a profile or a
measurement. No torch here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TypeVar

from apsched.costs.network.nccl_tests import Measurement
from apsched.costs.network.table import CollectiveTable, table_of
from apsched.errors import InputError
from apsched.kinds import CollectiveKind

_Key = TypeVar("_Key", int, str, CollectiveKind)
SOURCES = ("profile", "measured")
SLOWEST_GB_PER_S, FASTEST_GB_PER_S = 1e-6, 1e6
"""A kilobyte to a petabyte a second. Links are faster than the first, but small messages far apart
in time can show such a slope.
"""
_POINTS_PER_OCTAVE = 4
_FURTHER = 4
"""How far beyond the largest message the fitted bandwidth is laid down, in sizes of it; a table
goes on like that for ever.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The time of one operation on the compute stream."""

    time_us: float
    source: str
    """One of :data:`SOURCES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Times of collectives of one kind on a group of one shape."""

    kind: CollectiveKind
    num_ranks: int
    num_nodes: int
    source: str
    """One of :data:`SOURCES`."""
    points: tuple[tuple[int, float], ...]
    """Bytes, counted once, and microseconds."""
    bytes_per_us: float | None = None
    """Slope of the line fitted to the points, which holds beyond the largest; ``None`` where they
    show none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Costs by operation: they hold for every graph with the same operations on that device."""

    device: str
    """The device of the measurement, as text."""
    cluster: str
    """Name or file of the cluster whose formulas price the rest."""
    compute: Mapping[str, Price] = field(default_factory=dict)
    """Operation (:mod:`apsched.costs.compute.operation`) -> price; that of a start node is the
    price of its launch.
    """
    transfers: tuple[Transfers, ...] = ()
    launch_us: Mapping[CollectiveKind, float] = field(default_factory=dict)
    """Kind of collective -> price of the launch of a bucket of any size."""
    copies: tuple[tuple[int, float], ...] = ()
    """Bytes copied, and microseconds; empty without a measurement of copies."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Symbol -> size, of sizes that depend on data, as a profile has them."""

    @property
    def sources(self) -> frozenset[str]:
        """Those of its times, of :data:`SOURCES`."""
        of_compute = {price.source for price in self.compute.values()}
        return frozenset(of_compute | {transfers.source for transfers in self.transfers})

    @property
    def table(self) -> CollectiveTable:
        """The transfers as a table."""
        return table_of(
            (row for transfers in self.transfers for row in _rows(transfers)), self.device
        )

    def transfer_source(self, kind: str, num_ranks: int, num_nodes: int) -> str | None:
        """Return the source of the times of such collectives; ``None`` if there are none."""
        of_this = (
            t
            for t in self.transfers
            if (t.kind, t.num_ranks, t.num_nodes) == (kind, num_ranks, num_nodes)
        )
        return next((t.source for t in of_this), None)

    def launch_source(self, kind: str) -> str:
        """Return the source of the launch price of a bucket of that kind: that of its transfers."""
        return min((t.source for t in self.transfers if t.kind == kind), default="measured")

    def copy_us(self, size_bytes: int) -> float | None:
        """Return the time of a copy of ``size_bytes``: on a line between the points, beyond them at
        the bandwidth of the last.
        """
        if not self.copies:
            return None
        if size_bytes <= self.copies[0][0]:
            return self.copies[0][1]
        for (less, less_us), (more, more_us) in zip(self.copies, self.copies[1:], strict=False):
            if size_bytes <= more:
                return less_us + (more_us - less_us) * (size_bytes - less) / (more - less)
        last_bytes, last_us = self.copies[-1]
        return last_us * size_bytes / last_bytes


def fitted_bytes_per_us(points: tuple[tuple[int, float], ...]) -> float | None:
    """Return beta of t = alpha + bytes / beta by the median slope over all pairs of points (Theil,
    Sen), within the range of a file of costs; ``None`` where t does not rise.
    """
    slopes = [
        (t1 - t0) / (s1 - s0)
        for k, (s0, t0) in enumerate(points)
        for s1, t1 in points[k + 1 :]
        if s1 != s0
    ]
    us_per_byte = median(slopes) if slopes else 0.0
    if us_per_byte <= 0:
        return None
    return min(max(1 / us_per_byte, SLOWEST_GB_PER_S * 1e3), FASTEST_GB_PER_S * 1e3)


def rising(
    points: Sequence[tuple[int, float]], weights: Sequence[float]
) -> tuple[tuple[int, float], ...]:
    """Return the times that never fall with size and are nearest to ``points`` (weighted least
    squares, by pooling neighbours).

    A pool keeps its weighted sum, so that the same messages take the same time in all.
    """
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, number of points
    for (_, time_us), weight in zip(points, weights, strict=True):
        pools.append((time_us * weight, weight, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] >= pools[-1][0] * pools[-2][1]:
            (sum0, weight0, num0), (sum1, weight1, num1) = pools[-2:]
            pools[-2:] = [(sum0 + sum1, weight0 + weight1, num0 + num1)]
    times = [total / weight for total, weight, num in pools for _ in range(num)]
    return tuple(
        (size_bytes, time_us) for (size_bytes, _), time_us in zip(points, times, strict=True)
    )


def merged(parts: list[MeasuredCosts]) -> MeasuredCosts:
    """Return the median of the costs of several process ranks, point by point; the order of
    ``parts`` does not change the result.

    Every process rank that merges the same parts gets the same costs, and so solves the same
    problem.
    """
    if len({(part.device, part.cluster) for part in parts}) != 1:
        found = ", ".join(sorted({f"{part.device} ({part.cluster})" for part in parts}))
        raise InputError(
            "costs can only be merged where device and cluster are the same; found"
            f" {found or 'none'}"
        )
    operations = sorted({operation for part in parts for operation in part.compute})
    shapes = sorted({(t.kind, t.num_ranks, t.num_nodes) for part in parts for t in part.transfers})
    return MeasuredCosts(
        device=parts[0].device,
        cluster=parts[0].cluster,
        compute={
            operation: _median_price(
                [part.compute[operation] for part in parts if operation in part.compute]
            )
            for operation in operations
        },
        transfers=tuple(_median_transfers(parts, shape) for shape in shapes),
        launch_us=_median_by_key([part.launch_us for part in parts]),
        copies=tuple(_median_by_key([dict(part.copies) for part in parts]).items()),
        sizes={
            symbol: round(size)
            for symbol, size in _median_by_key([part.sizes for part in parts]).items()
        },
    )


def with_known(measured: MeasuredCosts, known: MeasuredCosts) -> MeasuredCosts:
    """Return the costs ``measured``, and those that were ``known`` before of everything that they
    do not have: operations of other graphs, collectives on other groups.
    """
    transfers = {
        (t.kind, t.num_ranks, t.num_nodes): t for t in (*known.transfers, *measured.transfers)
    }
    return replace(
        measured,
        compute={**known.compute, **measured.compute},
        transfers=tuple(transfers[shape] for shape in sorted(transfers)),
        launch_us={**known.launch_us, **measured.launch_us},
        sizes={**known.sizes, **measured.sizes},
    )


def completed(profiled: MeasuredCosts, measured: MeasuredCosts) -> MeasuredCosts:
    """Return the costs of a profile of the job, and measured ones for everything that the profile
    does not have.

    A profile has the times of operations and messages in their places: with late process ranks,
    cold caches, threads that sleep. It has no bucket: beyond its largest message, transfers have
    their measured times. Copies are measured. The launch of a bucket takes at least the time of a
    message's launch in the job, and at least its measured time: gloo's reduce-scatter copies its
    input first.
    """
    by_shape = {(t.kind, t.num_ranks, t.num_nodes): t for t in measured.transfers}
    by_shape |= {
        shape: _longer(t, by_shape.get(shape))
        for t in profiled.transfers
        for shape in [(t.kind, t.num_ranks, t.num_nodes)]
    }
    return MeasuredCosts(
        device=measured.device,
        cluster=measured.cluster,
        compute={**measured.compute, **profiled.compute},
        transfers=tuple(by_shape[shape] for shape in sorted(by_shape)),
        launch_us={
            kind: max(costs.launch_us.get(kind, 0.0) for costs in (profiled, measured))
            for kind in sorted({**measured.launch_us, **profiled.launch_us})
        },
        copies=measured.copies,
        sizes=profiled.sizes,
    )


def _longer(profiled: Transfers, measured: Transfers | None) -> Transfers:
    """Return the points of a profile, and those beyond its largest that were measured."""
    largest = profiled.points[-1][0]
    beyond = (
        [point for point in measured.points if point[0] > largest] if measured is not None else []
    )
    if measured is None or not beyond:
        return profiled
    points = [*profiled.points, *beyond]
    return replace(
        profiled, points=rising(points, [1.0] * len(points)), bytes_per_us=measured.bytes_per_us
    )


def _rows(transfers: Transfers) -> list[Measurement]:
    points = list(transfers.points)
    if transfers.bytes_per_us is not None:
        size, time_us = points[-1]
        points.append((size * _FURTHER, time_us + size * (_FURTHER - 1) / transfers.bytes_per_us))
    return [
        Measurement(
            kind=transfers.kind,
            num_ranks=transfers.num_ranks,
            num_nodes=transfers.num_nodes,
            size_bytes=size_bytes,
            time_us=time_us,
            where=transfers.source,
        )
        for size_bytes, time_us in _on_lines(points)
    ]


def _on_lines(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return ``points`` and, between two that lie far apart, some on the line between them.

    Messages of a job are few and far apart, and the time of a transfer is a line, t = alpha + bytes
    / beta; a table, whose points lie close together, is drawn on logarithmic axes, and would put a
    message between 4 KiB and 1 MiB up to a third too high.
    """
    dense = [points[0]]
    for (less, less_us), (more, more_us) in pairwise(points):
        steps = math.ceil(_POINTS_PER_OCTAVE * math.log2(more / less))
        sizes = (
            sorted(
                {round(less * (more / less) ** (k / steps)) for k in range(1, steps)} - {less, more}
            )
            if steps > 1
            else []
        )
        dense += [
            (size, less_us + (more_us - less_us) * (size - less) / (more - less)) for size in sizes
        ]
        dense.append((more, more_us))
    return dense


def _median_price(prices: list[Price]) -> Price:
    return Price(
        time_us=median(price.time_us for price in prices),
        source=min(price.source for price in prices),
    )


def _median_transfers(
    parts: list[MeasuredCosts], shape: tuple[CollectiveKind, int, int]
) -> Transfers:
    of_shape = [
        t for part in parts for t in part.transfers if (t.kind, t.num_ranks, t.num_nodes) == shape
    ]
    points = tuple(_median_by_key([dict(t.points) for t in of_shape]).items())
    kind, num_ranks, num_nodes = shape
    return Transfers(
        kind=kind,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        source=min(t.source for t in of_shape),
        points=points,
        bytes_per_us=fitted_bytes_per_us(points),
    )


def _median_by_key(tables: Sequence[Mapping[_Key, float]]) -> dict[_Key, float]:
    return {
        key: median(table[key] for table in tables if key in table)
        for key in sorted({key for table in tables for key in table})
    }
