"""Rows of memory. The formulas are in :mod:`apsched.solver.milp.model`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pulp
from pulp import LpAffineExpression as Linear

from apsched.kinds import CollectiveKind
from apsched.problem.problem import Storage
from apsched.solver.milp.events import WAIT_RANK, Events, Spot
from apsched.solver.milp.order import Order

_MOST_UNITS = 10_000
"""Numbers in a row stay below: tolerances of solvers are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Memory that is alive from its births to the last of its uses."""

    births: tuple[Spot, ...]
    """Empty: from the beginning. The last of several counts."""
    uses: tuple[tuple[Spot, Linear | None], ...]
    """With the condition under which each counts."""
    condition: Linear | None = None
    """Under which the memory exists at all."""


def byte_scale(events: Events) -> tuple[float, bool]:
    """Return the bytes that a unit of memory stands for, and whether every size is a whole number
    of them.
    """
    problem = events.problem
    sizes = [s.size_bytes for s in problem.storages if not s.kept] + [problem.kept_bytes]
    sizes += [
        size for column in events.columns for size in (column.input_bytes, column.output_bytes)
    ]
    unit = math.gcd(*sizes) or 1
    whole = sum(sizes) / unit <= _MOST_UNITS
    return (float(unit), True) if whole else (max(1.0, sum(sizes) / _MOST_UNITS), False)


def add_memory(order: Order, scale: float, whole: bool) -> pulp.LpVariable:
    """Add (13) to (15) to the model; return the peak, in units of ``scale`` bytes, with the bytes
    that the caller keeps.
    """
    problem = order.events.problem
    at_first = problem.kept_bytes + sum(
        s.size_bytes for s in problem.storages if not s.kept and s.birth < 0
    )
    peak = pulp.LpVariable("peak", at_first / scale, cat="Integer" if whole else "Continuous")
    lives = list(_storages(order))
    buffers = list(_buffers(order))
    for i, spot in enumerate(_spots(order.events)):
        live = [Linear(constant=problem.kept_bytes / scale)]
        for j, (size, life) in enumerate(lives):
            live.append(size / scale * _alive(order, life, spot, f"{i}_{j}"))
        for j, (sizes, life) in enumerate(buffers):
            live.append(_held(order, sizes, life, spot, scale, f"{i}_{j}"))
        order.model += peak >= pulp.lpSum(live), f"memory_{i}"
    return peak


def _spots(events: Events) -> Iterator[Spot]:
    """Yield the steps at which something may be allocated; live bytes are never more at any other
    step than at the last of these.
    """
    problem = events.problem
    born = {s.birth for s in problem.storages if not s.kept and s.birth >= 0}
    starts = {m.start for m in problem.collectives}
    for node in sorted(born - starts):
        yield from events.hosts[node]
    for c in range(len(problem.collectives)):
        yield Spot(events.take[c], problem.num_nodes)
        if events.start[c] != events.take[c]:
            yield Spot(events.start[c], problem.num_nodes)
        if events.give[c] != events.wait[c]:
            yield Spot(events.give[c], WAIT_RANK)


def _storages(order: Order) -> Iterator[tuple[int, Life]]:
    """(13) Yield the lives of storages; those of bucket members are let go at the copy-in, born at
    the copy-out, or inside a buffer.

    The output of a cast lives only where its collective is alone; in a bucket the input of the cast
    lives until the copy-in.
    """
    events, problem = order.events, order.events.problem
    shared = {c for pair in order.together for c in pair}
    input_of = {
        (problem.collectives[c].input_storage, problem.collectives[c].wait): c for c in shared
    }
    output_of = {problem.collectives[c].output_storage: c for c in shared}
    cast_for = {
        problem.collectives[c].input_storage: c for c in shared if problem.collectives[c].cast
    }
    casts = {problem.collectives[c].cast[0]: c for c in cast_for.values()}
    for s, storage in enumerate(problem.storages):
        if storage.kept or not storage.uses:
            continue
        uses = [
            (spot, order.alone[input_of[s, node]] if (s, node) in input_of else None)
            for node in storage.uses
            for spot in _taken(events, node)
        ]
        uses += [
            (Spot(events.take[casts[node]], problem.num_nodes), 1 - order.alone[casts[node]])
            for node in storage.uses
            if node in casts
        ]
        if s in cast_for:
            yield (
                storage.size_bytes,
                Life(
                    births=_birth(events, storage),
                    uses=_last(events, uses),
                    condition=order.alone[cast_for[s]],
                ),
            )
            continue
        owner = output_of.get(s)
        if owner is None:
            yield storage.size_bytes, Life(births=_birth(events, storage), uses=_last(events, uses))
            continue
        taken = Spot(events.take[owner], problem.num_nodes)
        yield (
            storage.size_bytes,
            Life(births=(taken,), uses=_last(events, uses), condition=order.alone[owner]),
        )
        if events.gathers(owner):
            given = Spot(events.give[owner], WAIT_RANK)
            several = [(spot, condition) for spot, condition in uses if spot != taken]
            yield (
                storage.size_bytes,
                Life(
                    births=(given,), uses=_last(events, several), condition=1 - order.alone[owner]
                ),
            )


def _birth(events: Events, storage: Storage) -> tuple[Spot, ...]:
    return () if storage.birth < 0 else _taken(events, storage.birth)


def _taken(events: Events, node: int) -> tuple[Spot, ...]:
    """Return the place where ``node`` takes its inputs: of a start the copy-in, of a view its own
    place.
    """
    problem = events.problem
    c = problem.collective_of_node.get(node)
    if c is not None and problem.collectives[c].start == node:
        return (Spot(events.take[c], problem.num_nodes),)
    return events.hosts[node]


def _last(
    events: Events, uses: list[tuple[Spot, Linear | None]]
) -> tuple[tuple[Spot, Linear | None], ...]:
    """Return ``uses`` without those that never come after another one that always counts."""
    kept: list[tuple[Spot, Linear | None]] = []
    for i, (spot, condition) in enumerate(uses):
        covered = False
        for j, (other, always) in enumerate(uses):
            if i == j or (always is not None and always is not condition):
                continue
            if _never_after(events, spot, other) and not (
                _never_after(events, other, spot) and i < j
            ):
                covered = True
        if not covered:
            kept.append((spot, condition))
    return tuple(kept)


def _never_after(events: Events, p: Spot, q: Spot) -> bool:
    if p.event == q.event:
        return p.rank <= q.rank
    return events.always_before(p.event, q.event) or (
        events.never_after(p.event, q.event) and p.rank <= q.rank
    )


def _buffers(order: Order) -> Iterator[tuple[list[tuple[int, int]], Life]]:
    """(14) lives of the buffers of the bucket whose first member is h, with (column, bytes) of each
    column it may be.
    """
    events, problem = order.events, order.events.problem
    for h in range(len(problem.collectives)):
        of_bucket = [
            (b, column)
            for b, column in enumerate(events.columns)
            if column.members[0] == h and len(column.members) > 1
        ]
        if not of_bucket:
            continue
        outputs = [(b, column.output_bytes) for b, column in of_bucket]
        take, start = (
            Spot(events.take[h], problem.num_nodes),
            Spot(events.start[h], problem.num_nodes),
        )
        wait = Spot(events.wait[h], WAIT_RANK)
        members = sorted({c for _, column in of_bucket for c in column.members})
        holds = {
            c: order.sum_of((b, 1.0) for b, column in of_bucket if c in column.members)
            for c in members
        }
        uses: list[tuple[Spot, Linear | None]] = [(wait, None)]
        for c in members:
            if events.gathers(h):
                uses.append((Spot(events.give[c], WAIT_RANK), holds[c]))
            else:
                nodes = problem.storages[problem.collectives[c].output_storage].uses
                spots = [(spot, holds[c]) for node in nodes for spot in _taken(events, node)]
                uses += [
                    use
                    for use in _last(events, spots)
                    if use[0] != Spot(events.take[c], problem.num_nodes)
                ]
        kind = problem.keys[problem.collectives[h].key].kind
        if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE):
            yield outputs, Life(births=(take,), uses=tuple(uses))
        else:
            yield (
                [(b, column.input_bytes) for b, column in of_bucket],
                Life(births=(take,), uses=((wait, None),)),
            )
            yield outputs, Life(births=(start,), uses=tuple(uses))


def _alive(order: Order, life: Life, spot: Spot, name: str) -> Linear:
    """(13) alive[p] >= le(birth,p) + le(p,use) - 1 for each use; with a condition x on either, - (1
    - x).
    """
    demands = []
    for use, counts in life.uses:
        demand = order.at_or_before(spot, use) + sum(
            order.at_or_before(birth, spot) - 1 for birth in life.births
        )
        conditions = [x for x in (counts, life.condition) if x is not None]
        demand += sum(x - 1 for x in conditions)
        if _most(demand) <= 0:
            continue
        if len(life.uses) == 1 and len(life.births) <= 1 and not conditions:
            return demand  # never negative: the birth comes before the use
        demands.append(demand)
    if not demands:
        return Linear()
    alive = pulp.LpVariable(f"alive_{name}", 0, 1)
    for demand in demands:
        order.model += alive >= demand
    return Linear(alive)


def _most(expression: Linear) -> float:
    return float(expression.constant + sum(max(0, a) for a in expression.values()))


def _held(
    order: Order, sizes: list[tuple[int, int]], life: Life, spot: Spot, scale: float, name: str
) -> Linear:
    """(14) held[h,p] >= sum over B of bytes[B] lambda[B] - most (1 - alive[h,p])."""
    alive = _alive(order, life, spot, f"buffer_{name}")
    if not alive and not alive.constant:
        return Linear()
    most = max(size for _, size in sizes) / scale
    held = pulp.LpVariable(f"held_{name}", 0)
    order.model += held >= order.sum_of((b, size / scale) for b, size in sizes) - most * (1 - alive)
    return Linear(held)
