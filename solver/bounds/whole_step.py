"""A lower bound on the time of a whole step, over every choice of parameters that are kept from
forward to backward.

    f      forward;  its schedules are those of any choice, with less memory held
    g      backward with every parameter kept: what is left to do whatever the choice; a node has
           its lowest price among the choices that were solved, which is assumed of the others
    i      a parameter that backward gathers again by the collectives C_i, unless it is kept, which
           takes m_i bytes
    y_i    1 where parameter i is kept, 0 where it is gathered again; here anything in between
    M      bytes that are left for kept parameters between forward and backward
    B(.)   the bound on one graph (:mod:`apsched.solver.bounds.best`)
    w_c    bytes of collective c, times the least price of a byte on its stream
    o_c    least work of collective c on the compute stream, alone or in a bucket

    (S1)  sum_i m_i y_i <= M
    (S2)  step >= B(f) + B(g)
    (S3)  step >= B(f) + L_s(g) + sum_i (1 - y_i) sum_{c in C_i on s} w_c          each stream s
    (S4)  step >= B(f) + compute(g) + sum_{c in g} o_c + sum_i (1 - y_i) sum_{c in C_i} o_c

L_s(g) is the least time that the collectives of g keep stream s busy: buckets share no fixed cost
that is counted here, since w_c is linear in bytes. Each of (S3) and (S4) is least over y under (S1)
where the parameters with the most time per byte are kept first, the last one in part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.best import best_bound
from apsched.solver.bounds.step_time import TimeBound, least_rate, least_work
from apsched.units import ALLOCATION_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptItem:
    """A parameter that may be kept."""

    collectives: tuple[int, ...]
    """Of backward as gathered again: what keeping it saves."""
    kept_bytes: int
    """As allocated."""


def seam_bytes(forward: Problem, backward: Problem) -> tuple[int, int]:
    """Return the bytes that forward leaves and those that backward is given, under any schedules,
    where nothing is kept.
    """
    last = forward.num_nodes - 1
    left = sum(s.size_bytes for s in forward.storages if s.kept or s.uses[-1:] == (last,))
    given = sum(s.size_bytes for s in backward.storages if s.kept or s.birth < 0)
    return left, given


def least_prices(problems: Iterable[Problem]) -> dict[str, int]:
    """Return the ticks of each node, by name: the least that one of ``problems`` has, since a
    choice in between may fuse it as either.
    """
    least: dict[str, int] = {}
    for problem in problems:
        for name, ticks in zip(problem.node_names, problem.duration_ticks, strict=True):
            least[name] = min(ticks, least.get(name, ticks))
    return least


def with_prices(problem: Problem, prices: Mapping[str, int]) -> Problem:
    """Return ``problem`` with the ``prices`` of its nodes, in ticks."""
    return replace(problem, duration_ticks=tuple(prices[name] for name in problem.node_names))


def graph_bound(problem: Problem, caps: Caps) -> int:
    """Return B(problem) in ticks, for every order of the compute that ``caps`` allow."""
    instance = Instance.of(problem, caps)
    orders = None if caps.max_compute_move == 0 else Orders(instance)
    return best_bound(instance, orders).ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """Facts about a step for bounds; made by :meth:`of`."""

    forward_ticks: int
    """B(f)."""
    kept_ticks: int
    """B(g)."""
    rows: tuple[tuple[str, float, tuple[float, ...]], ...]
    """(S3) and (S4): what it rests on, the time without parameters, and that of each parameter."""
    kept_bytes: tuple[int, ...]
    """m_i, the least that keeping a parameter adds."""
    free_bytes: int | None
    """M; ``None`` without a memory cap."""

    @classmethod
    def of(
        cls,
        *,
        forward_ticks: int,
        again: Problem,
        kept: Problem,
        items: Sequence[KeptItem],
        caps: Caps,
        free_bytes: int | None,
    ) -> "StepBound":
        """Return the bound of a step whose backward is ``again`` or, with all ``items`` kept,
        ``kept``; ``free_bytes`` is M.
        """
        at = Instance.of(again, caps)
        loose = Instance.of(kept, replace(caps, memory_cap_bytes=None))
        return cls(
            forward_ticks=forward_ticks,
            kept_ticks=graph_bound(kept, loose.caps),
            rows=(*_stream_rows(at, loose, items), _compute_row(at, loose, items)),
            # inside a bucket's buffer, which is rounded up once
            kept_bytes=tuple(max(i.kept_bytes - ALLOCATION_BYTES + 1, 0) for i in items),
            free_bytes=free_bytes,
        )

    def over_choices(self) -> TimeBound:
        """Return the bound over all choices: (S2), (S3) and (S4) under (S1)."""
        rows = [
            (source, fixed + _least_left(values, self.kept_bytes, self.free_bytes))
            for source, fixed, values in self.rows
        ]
        return self._best(rows)

    def of_choice(self, kept: Iterable[int]) -> TimeBound:
        """Return the bound for one choice: the items ``kept``, by index."""
        chosen = set(kept)
        rows = [
            (source, fixed + sum(v for i, v in enumerate(values) if i not in chosen))
            for source, fixed, values in self.rows
        ]
        return self._best(rows)

    def may_fit(self, kept: Iterable[int]) -> bool:
        """Return whether (S1) allows the items ``kept``."""
        return self.free_bytes is None or (sum(self.kept_bytes[i] for i in kept) <= self.free_bytes)

    def _best(self, rows: Sequence[tuple[str, float]]) -> TimeBound:
        source, ticks = max(rows, key=lambda row: row[1])
        if ticks <= self.kept_ticks:
            source, ticks = BoundSource.PATHS, self.kept_ticks
        return TimeBound(ticks=self.forward_ticks + int(ticks), source=source)


def _stream_rows(
    again: Instance, kept: Instance, items: Sequence[KeptItem]
) -> list[tuple[str, float, tuple[float, ...]]]:
    """Return (S3) for each stream."""
    rows = []
    loads, left = _loads(again), _loads(kept)
    for stream, group in enumerate(again.problem.streams):
        on_stream = again.arrays.stream == stream
        kept_streams = [s for s, name in enumerate(kept.problem.streams) if name == group]
        fixed = float(left[kept.arrays.stream == kept_streams[0]].sum()) if kept_streams else 0.0
        values = tuple(
            sum(float(loads[c]) for c in item.collectives if on_stream[c]) for item in items
        )
        rows.append((f"stream of group {group}", fixed, values))
    return rows


def _loads(instance: Instance) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return w_c of each collective, 0 beyond float noise below; one that shares no launch takes
    its own time.
    """
    problem, caps, arrays = instance.problem, instance.caps, instance.arrays
    loads = np.zeros(len(problem.collectives))
    for k, key in enumerate(problem.keys):
        of_key = [c for c, one in enumerate(problem.collectives) if one.key == k]
        sizes = [problem.collectives[c].size_bytes for c in of_key]
        largest = sum(sizes)
        if caps.bucket_cap_bytes is not None:
            largest = min(largest, max(caps.bucket_cap_bytes, max(sizes, default=0)))
        rate = least_rate(key.price, largest)
        for c, size in zip(of_key, sizes, strict=True):
            alone = float(arrays.transfer_ticks[c])
            loads[c] = size * rate if arrays.bucketable[c] else alone
    return loads


def _compute_row(
    again: Instance, kept: Instance, items: Sequence[KeptItem]
) -> tuple[str, float, tuple[float, ...]]:
    """Return (S4)."""
    work = least_work(again)
    fixed = float(kept.arrays.compute_ticks.sum() + least_work(kept).sum())
    values = tuple(sum(float(work[c]) for c in item.collectives) for item in items)
    return BoundSource.COMPUTE, fixed, values


def _least_left(values: Sequence[float], sizes: Sequence[int], free: int | None) -> float:
    """Return the least of ``sum_i (1 - y_i) values_i`` over ``0 <= y <= 1``, ``sum_i sizes_i y_i <=
    free``: the most value per byte first.
    """
    left, total = float("inf") if free is None else float(max(free, 0)), 0.0
    ratio = sorted(zip(values, sizes, strict=True), key=lambda v: -v[0] / max(v[1], 1e-9))
    for value, size in ratio:
        share = 1.0 if size <= left else left / size
        left -= share * size
        total += (1 - share) * value
    return total
