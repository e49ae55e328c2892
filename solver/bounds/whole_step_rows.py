"""The rows of the bound on a whole step (:mod:`apsched.solver.bounds.whole_step`): a time that no
schedule beats, linear in the shares of each parameter that are gathered again, resharded in the
node, and kept.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Bools
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.best import tail_in_any_order
from apsched.solver.bounds.linear_program import Costs, Floats, costs_in_any_bucket, weights_of
from apsched.solver.bounds.step_time import least_work

_WEIGHTS = 4
"""Weights tried for (S5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptItem:
    """A parameter that may be kept."""

    collectives: tuple[int, ...]
    """C_i: collectives of backward as gathered again, which a kept parameter saves."""
    kept_bytes: int
    """m_i, as allocated."""
    node_bytes: int = 0
    """n_i, as allocated if it is resharded in its node; 0 where it cannot be."""
    node_collectives: tuple[int, ...] = ()
    """N_i: collectives of backward with everything resharded."""
    part_ticks: int = 0
    """k_i: copies of its part in forward."""
    uses: tuple[int, ...] = ()
    """Nodes of backward with everything kept that use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of each parameter between forward and backward."""

    kept: tuple[int, ...]
    in_node: tuple[int, ...]
    """Those of a kept one where it cannot be resharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Step time >= ``ticks`` + the ticks of each parameter that is not kept."""

    source: str
    ticks: float
    again: tuple[float, ...]
    in_node: tuple[float, ...]

    def __add__(self, other: "Row") -> "Row":
        """Return the sum of both, with the source of this one."""
        again, in_node = (
            tuple(map(sum, zip(*both, strict=True)))
            for both in ((self.again, other.again), (self.in_node, other.in_node))
        )
        ticks = self.ticks + other.ticks
        return Row(source=self.source, ticks=ticks, again=again, in_node=in_node)

    def of_choice(self, kept: Collection[int], in_node: Collection[int]) -> float:
        """Return the time of the choice with the items ``kept`` and those resharded ``in_node``."""
        others = (v for i, v in enumerate(self.again) if i not in kept and i not in in_node)
        return self.ticks + sum(others) + sum(self.in_node[i] for i in in_node)

    def least(self, sizes: Sizes, free: int | None) -> float:
        """Return the least time over the shares that (S1) allows."""
        again, in_node = cheapest_shares(self, sizes, free)
        return self.ticks + float(again @ np.array(self.again) + in_node @ np.array(self.in_node))


def cheapest_shares(row: Row, sizes: Sizes, free: int | None) -> tuple[Floats, Floats]:
    """Return x and z for which ``row`` is least under (S1): steps towards keeping, those that save
    the most time per byte first.
    """
    again, in_node = np.ones(len(row.again)), np.zeros(len(row.again))
    left = float("inf") if free is None else float(free)
    steps = [step for i in range(len(again)) for step in _steps(row, sizes, i)]
    steps.sort(key=lambda step: -step[0] / max(step[1], 1e-9))
    for _, size, i, to_node in steps:
        share = 1.0 if size <= left else max(left, 0.0) / size
        left -= share * size
        if to_node:
            again[i], in_node[i] = 1 - share, share
        elif in_node[i]:
            in_node[i] -= share
        else:
            again[i] -= share
    return again, in_node


def _steps(row: Row, sizes: Sizes, i: int) -> Iterator[tuple[float, int, int, bool]]:
    """Yield the steps along the lower convex hull of the three choices for parameter ``i``: the
    ticks that it saves, its bytes, ``i``, and whether it ends in the node.
    """
    again, in_node = row.again[i], row.in_node[i]
    whole, part = sizes.kept[i], sizes.in_node[i]
    if part < whole and in_node * whole < again * (whole - part):  # below the line of both others
        yield again - in_node, part, i, True
        yield in_node, whole - part, i, False
    else:
        yield again, whole, i, False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Backward with every parameter gathered again, kept, or resharded; without the cost of copies
    where buckets may be coalesced.
    """

    again: Instance
    kept: Instance
    in_node: Instance | None
    items: tuple[KeptItem, ...]

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Gathered again, kept, and resharded if it is there."""
        found = (self.again, self.kept, self.in_node)
        return tuple(instance for instance in found if instance is not None)

    @property
    def groups(self) -> tuple[str, ...]:
        """Process groups with a stream in one of them."""
        found = (instance.problem.streams for instance in self.instances)
        return tuple(dict.fromkeys(group for groups in found for group in groups))

    def costs(self) -> tuple[Costs, ...]:
        """Return the costs of the collectives of each instance."""
        again, _, *others = map(costs_in_any_bucket, self.instances)
        return again, costs_beside(self.again, self.kept), *others

    def row(
        self, source: str, ticks: float, again: Floats, kept: Floats, in_node: Floats | None = None
    ) -> Row:
        """Return the row with ``ticks`` and those of each collective of the instances."""
        return Row(
            source=source,
            ticks=ticks + float(kept.sum()),
            again=tuple(float(again[list(i.collectives)].sum()) for i in self.items),
            in_node=tuple(
                0.0 if in_node is None else float(in_node[list(i.node_collectives)].sum())
                for i in self.items
            ),
        )

    def shares(self, again: Floats, in_node: Floats) -> tuple[Floats, ...]:
        """Return the share of each collective of the instances that these shares of the items
        leave.
        """
        found = [np.zeros(len(instance.problem.collectives)) for instance in self.instances]
        found[1][:] = 1.0
        for item, one, other in zip(self.items, again, in_node, strict=True):
            found[0][list(item.collectives)] = one
            if self.in_node is not None:
                found[2][list(item.node_collectives)] = other
        return tuple(found)


def rows_of(backward: Backward, sizes: Sizes, free: int | None) -> Iterator[Row]:
    """Yield (S3) to (S6) without F."""
    costs = backward.costs()
    yield from _stream_rows(backward, costs)
    yield _compute_row(backward)
    yield from _weighed_rows(backward, costs, sizes, free)
    yield from _tail_rows(backward)


def _stream_rows(at: Backward, costs: Sequence[Costs]) -> Iterator[Row]:
    """Yield (S3) for each stream."""
    pairs = list(zip(at.instances, costs, strict=True))
    loads = [np.where(i.arrays.bucketable, c.rate, c.transfer) for i, c in pairs]
    for group in at.groups:
        on_group = [
            np.where(_on_group(instance, group), load, 0.0)
            for instance, load in zip(at.instances, loads, strict=True)
        ]
        yield at.row(f"stream of group {group}", 0.0, *on_group)


def _on_group(instance: Instance, group: str) -> Bools:
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


def _compute_row(at: Backward) -> Row:
    """Return (S4)."""
    compute = float(at.kept.arrays.compute_ticks.sum())
    return at.row(BoundSource.COMPUTE, compute, *_least_work(at))


def _least_work(at: Backward) -> list[Floats]:
    """Return o of the collectives of each instance."""
    return [least_work(instance).astype(np.float64) for instance in at.instances]


def _weighed_rows(
    at: Backward, costs: Sequence[Costs], sizes: Sizes, free: int | None
) -> Iterator[Row]:
    """Yield (S5) for the weights of a few y and z, the first of which keep nothing."""
    groups = at.groups
    both = [sides(i, c, groups) for i, c in zip(at.instances, costs, strict=True)]
    constants = np.zeros(1 + len(groups))
    constants[0] = float(at.kept.arrays.compute_ticks.sum())
    again, in_node = np.ones(len(at.items)), np.zeros(len(at.items))
    for _ in range(_WEIGHTS):
        shares = at.shares(again, in_node)
        alone, shared = (
            np.concatenate([share * one for share, one in zip(shares, side, strict=True)], axis=1)
            for side in zip(*both, strict=True)
        )
        weights = weights_of(constants, alone, shared)
        least = [(1 - 1e-9) * np.minimum(weights @ one, weights @ other) for one, other in both]
        row = at.row(BoundSource.WEIGHED, float((1 - 1e-9) * (weights @ constants)), *least)
        yield row
        again, in_node = cheapest_shares(row, sizes, free)


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


def _tail_rows(at: Backward) -> Iterator[Row]:
    """Yield (S6), if it adds anything to (S2)."""
    if not at.kept.problem.collectives or not any(item.uses for item in at.items):
        return
    tail = tail_in_any_order(at.kept, Orders(at.kept))
    runs = {node for node, run in zip(at.kept.problem.compute_order, tail.run, strict=True) if run}
    before = [tail.share if runs.intersection(item.uses) else 0.0 for item in at.items]
    row = _compute_row(at)
    yield Row(
        source=tail.bound.source,
        ticks=tail.bound.ticks,
        again=tuple(share * v for share, v in zip(before, row.again, strict=True)),
        in_node=tuple(share * v for share, v in zip(before, row.in_node, strict=True)),
    )
