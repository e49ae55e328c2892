"""A lower bound on the time of a whole step, over every choice of parameters that are kept from
forward to backward.

    f      forward;  its schedules are those of any choice, with less memory held
    g      backward with every parameter kept: the work that every choice has; a node has its lowest
           price among the choices that were solved, and the bound assumes that of the others
    i      a parameter that backward gathers again by the collectives C_i, unless it is kept, which
           takes m_i bytes
    y_i    1 where parameter i is kept, 0 where it is gathered again; here anything in between
    M      bytes that are left for kept parameters between forward and backward, and at the compute
           nodes at which all that may be kept are alive if they are kept
    B(.)   the bound on one graph (:mod:`apsched.solver.bounds.best`)
    w_c    bytes of collective c, times the least price of a byte on its stream
    o_c    least work of collective c on the compute stream, alone or in a bucket

    (S1)  sum_i m_i y_i <= M
    (S2)  step >= B(f) + B(g)
    (S3)  step >= B(f) + L_s(g) + sum_i (1 - y_i) sum_{c in C_i on s} w_c          each stream s
    (S4)  step >= B(f) + compute(g) + sum_{c in g} o_c + sum_i (1 - y_i) sum_{c in C_i} o_c
    (S5)  step >= B(f) + l_0 compute(g) + sum_{c in g} e_c + sum_i (1 - y_i) sum_{c in C_i} e_c,
          e_c = min(sum_r l_r alone_rc, sum_r l_r shared_rc)

L_s(g) is the least time that the collectives of g keep stream s busy: buckets share no fixed cost
that is counted here, since w_c is linear in bytes, at the least rate of a bucket of everything that
any choice gathers. (S5) weighs the compute stream (r = 0) and each stream against each other with
weights l that sum to 1, as (R1) and (R2) of :mod:`apsched.solver.bounds.linear_program`: alone_rc
and shared_rc are the costs of c there if it is launched alone or in a bucket. It holds for any
weights; the used weights are duals of the LP for the y that the previous weights give. Each of (S3)
to (S5) is least over y under (S1) where the parameters with the most time per byte are kept first,
the last one in part.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.relaxed import without_copies
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.memory import certainly_alive
from apsched.solver.bounds.best import best_bound
from apsched.solver.bounds.linear_program import Costs, Floats, costs_in_any_bucket, weights_of
from apsched.solver.bounds.step_time import TimeBound, least_work
from apsched.units import ALLOCATION_BYTES

_WEIGHTS = 4
"""Weights tried for (S5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptItem:
    """A parameter that may be kept."""

    collectives: tuple[int, ...]
    """Collectives of backward as gathered again, which a kept parameter saves."""
    kept_bytes: int
    """As allocated."""
    node_bytes: int = 0
    """As allocated if it is resharded in its node; 0 where it cannot be."""


def seam_bytes(forward: Problem, backward: Problem) -> tuple[int, int]:
    """Return the bytes that forward leaves and those that backward is given, under any schedules,
    where nothing is kept.
    """
    last = forward.num_nodes - 1
    left = sum(s.size_bytes for s in forward.storages if s.kept or s.uses[-1:] == (last,))
    given = sum(s.size_bytes for s in backward.storages if s.kept or s.birth < 0)
    return left, given


def bytes_beside(problem: Problem, caps: Caps, kept: Collection[int]) -> int:
    """Return the most bytes, without those of the storages ``kept``, that are alive at one compute
    node in every schedule of ``problem``, of the nodes at which all of ``kept`` are alive in every
    schedule, too; 0 where there is none.
    """
    alive = certainly_alive(Orders(Instance.of(problem, caps)), caps.max_compute_move, kept)
    return int(alive.live_bytes[alive.all_apart].max(initial=0))


def least_prices(
    problems: Iterable[Problem], chains: Mapping[str, Sequence[str]] | None = None
) -> dict[str, int]:
    """Return the ticks of each node, by name: the least that one of ``problems`` has, since a
    choice in between may fuse it as either.

    ``chains`` has the nodes before each node that some problems lack, which may be one kernel with
    it. Where both are, the ticks of the node contain those of its chain; the chain has ticks of its
    own from the problems without that node, at most as many.
    """
    chains = chains or {}
    least: dict[str, int] = {}
    for problem in problems:
        ticks = dict(zip(problem.node_names, problem.duration_ticks, strict=True))
        for name in chains.keys() & ticks.keys():
            ticks[name] += sum(ticks.pop(one) for one in chains[name])
        for name, own in ticks.items():
            least[name] = min(own, least.get(name, own))
    for name in chains.keys() & least.keys():
        if least[name] < sum(least[one] for one in chains[name]):
            least |= dict.fromkeys(chains[name], 0)
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
    """(S3) to (S5): its source, the time without parameters, and that of each parameter."""
    kept_bytes: tuple[int, ...]
    """The least that keeping a parameter adds."""
    free_bytes: int | None
    """M; ``None`` without a memory cap."""
    node_bytes: tuple[int, ...] = ()
    """The least that resharding a parameter in its node adds, or that keeping it adds where it
    cannot be resharded; empty where none can be.
    """

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
        at = without_copies(Instance.of(again, caps))
        caps_of_kept = replace(caps, memory_cap_bytes=None)
        loose = without_copies(Instance.of(kept, caps_of_kept))
        # inside a bucket's buffer, which is rounded up once
        kept_sizes, node_sizes = (
            tuple(max(size - ALLOCATION_BYTES + 1, 0) for size in sizes)
            for sizes in (
                [item.kept_bytes for item in items],
                [item.node_bytes or item.kept_bytes for item in items],
            )
        )
        sizes = tuple(map(min, kept_sizes, node_sizes))
        rows = (*_stream_rows(at, loose, items), _compute_row(at, loose, items))
        return cls(
            forward_ticks=forward_ticks,
            kept_ticks=graph_bound(kept, caps_of_kept),
            rows=(*rows, *_weighed_rows(at, loose, items, sizes, free_bytes)),
            kept_bytes=kept_sizes,
            node_bytes=node_sizes,
            free_bytes=free_bytes,
        )

    @property
    def least_bytes(self) -> tuple[int, ...]:
        """m_i."""
        return tuple(map(min, self.kept_bytes, self.node_bytes or self.kept_bytes))

    @property
    def saved_ticks(self) -> tuple[float, ...]:
        """The time that keeping each parameter saves in that of (S3) to (S5) which is the bound
        over all choices.
        """
        return max(
            self.rows,
            key=lambda row: row[1] + _least_left(row[2], self.least_bytes, self.free_bytes),
        )[2]

    def over_choices(self) -> TimeBound:
        """Return the bound over all choices: (S2) to (S5) under (S1)."""
        rows = [
            (source, fixed + _least_left(values, self.least_bytes, self.free_bytes))
            for source, fixed, values in self.rows
        ]
        return self._best(rows)

    def of_choice(self, kept: Iterable[int]) -> TimeBound:
        """Return the bound for one choice: the items ``kept`` or resharded, by index."""
        chosen = set(kept)
        rows = [
            (source, fixed + sum(v for i, v in enumerate(values) if i not in chosen))
            for source, fixed, values in self.rows
        ]
        return self._best(rows)

    def may_fit(self, kept: Iterable[int], in_node: Iterable[int] = ()) -> bool:
        """Return whether (S1) allows the items ``kept`` and those resharded ``in_node``."""
        total = sum(self.kept_bytes[i] for i in kept) + sum(self.node_bytes[i] for i in in_node)
        return self.free_bytes is None or total <= self.free_bytes

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
    loads, left = (
        np.where(i.arrays.bucketable, c.rate, c.transfer)
        for i, c in ((again, costs_in_any_bucket(again)), (kept, costs_beside(again, kept)))
    )
    for stream, group in enumerate(again.problem.streams):
        on_stream = again.arrays.stream == stream
        fixed = float(left[_on_group(kept, group)].sum())
        values = tuple(
            sum(float(loads[c]) for c in item.collectives if on_stream[c]) for item in items
        )
        rows.append((f"stream of group {group}", fixed, values))
    return rows


def _on_group(instance: Instance, group: str) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return which collectives use the stream of ``group``."""
    streams = [s for s, name in enumerate(instance.problem.streams) if name == group]
    return np.isin(instance.arrays.stream, streams)


def costs_beside(again: Instance, kept: Instance) -> Costs:
    """Return the costs of the collectives of ``kept``, which may share buckets with those that are
    gathered again.
    """
    costs, others = costs_in_any_bucket(kept), costs_in_any_bucket(again)
    per_byte = {
        _identity(again.problem, c): others.rate[c] / size
        for c, size in enumerate(again.arrays.size_bytes)
        if again.arrays.bucketable[c] and size
    }
    rate = costs.rate.copy()
    for c, size in enumerate(kept.arrays.size_bytes):
        rate[c] = min(rate[c], size * per_byte.get(_identity(kept.problem, c), np.inf))
    return replace(costs, rate=rate)


def _identity(problem: Problem, c: int) -> tuple[str, ...]:
    key = problem.keys[problem.collectives[c].key]
    return key.kind, key.group, key.reduce_op, key.dtype, key.device


def _weighed_rows(
    again: Instance,
    kept: Instance,
    items: Sequence[KeptItem],
    sizes: Sequence[int],
    free: int | None,
) -> list[tuple[str, float, tuple[float, ...]]]:
    """Return (S5) for the weights of a few y, the first of which keeps nothing."""
    groups = again.problem.streams
    both = (
        sides(again, costs_in_any_bucket(again), groups),
        sides(kept, costs_beside(again, kept), groups),
    )
    constants = np.zeros(1 + len(groups))
    constants[0] = float(kept.arrays.compute_ticks.sum())
    found: list[tuple[str, float, tuple[float, ...]]] = []
    left = np.ones(len(items))  # 1 - y
    for _ in range(_WEIGHTS):
        share = np.zeros(len(again.problem.collectives))
        for item, part in zip(items, left, strict=True):
            share[list(item.collectives)] = part
        alone, shared = (
            np.concatenate((first * share, second), axis=1)
            for first, second in zip(*both, strict=True)
        )
        weights = weights_of(constants, alone, shared)
        least, fixed = (
            (1 - 1e-9) * np.minimum(weights @ one, weights @ other) for one, other in both
        )
        values = tuple(float(least[list(item.collectives)].sum()) for item in items)
        total = float((1 - 1e-9) * (weights @ constants) + fixed.sum())
        found.append((BoundSource.WEIGHED, total, values))
        left = 1 - _kept_shares(values, sizes, free)
    return found


def sides(instance: Instance, costs: Costs, groups: Sequence[str]) -> tuple[Floats, Floats]:
    """Return the costs of each collective, alone and in a bucket (columns), on the compute stream
    and on that of each of ``groups`` (rows).
    """
    alone = [costs.prologue + costs.launch + costs.epilogue]
    shared = [costs.prologue_shared + costs.copy_in + costs.copy_out + costs.epilogue]
    for group in groups:
        on_stream = _on_group(instance, group)
        alone.append(np.where(on_stream, costs.transfer, 0.0))
        shared.append(np.where(on_stream, costs.rate, 0.0))
    together = instance.arrays.bucketable
    return np.array(alone), np.where(together, np.array(shared), np.array(alone))


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
    free``.
    """
    return float(((1 - _kept_shares(values, sizes, free)) * np.array(values)).sum())


def _kept_shares(values: Sequence[float], sizes: Sequence[int], free: int | None) -> Floats:
    """Return the y for which that is least: the most value per byte first."""
    kept = np.ones(len(values))
    left = float("inf") if free is None else float(max(free, 0))
    for i in sorted(range(len(values)), key=lambda i: -values[i] / max(sizes[i], 1e-9)):
        kept[i] = 1.0 if sizes[i] <= left else left / sizes[i]
        left -= kept[i] * sizes[i]
    return kept
