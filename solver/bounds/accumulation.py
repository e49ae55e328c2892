"""A lower bound on the time of a step of several micro-batches in a row, over every choice of
parameters that are kept, stay gathered from one micro-batch to the next, or whose gradients are
added before they are reduced; and the choices that are best for the bound.

    n      micro-batches, n >= 2
    u      a unit: parameters that are decided on alike
    k_u    1 where u is kept from forward to backward;  e_u  where it is resharded in its node
    h_u    1 where u stays gathered from backward to the next forward
    s_u    1 where gradients of u are added, and reduced once
    q_u    1 where they are reduced to shards each time, which are added and all-reduced once;
           gradients that have no such shards are added, and reduced once
    f      forward of the first micro-batch: it gathers every parameter
    p      the other graphs: forward behind the first (F), the first backward (A), backward behind
           it but for the last (B), the last backward (L)
    x_c    1 where collective c is in graph p: 1 - h_u for a gather of F, 1 - k_u - e_u for one of
           A, B and L, 1 - s_u for a reduction of A and B to shards, 1 - s_u - q_u for any other
           one; else 1
    a_c    1 where it is launched alone, 0 where it is in a bucket
    B(.)   the bound on one graph (:mod:`apsched.solver.bounds.best`)
    add_pu time to add gradients of u to those before, less that of a cast which is the same kernel
           then, and add'_pu the same for shards of them: 0 for F and A

All of them may lie in between here. With alone_rc and shared_rc, the costs of c on stream r alone
or in a bucket (r = 0: compute), and M_F, M_B, the bytes that are left at the beginning of a forward
and between forward and backward:

    (G1)  min B(f) + (n - 1) t_F + t_A + (n - 2) t_B + t_L
    (G2)  t_p >= B(p with as few collectives as any choice has)
    (G3)  t_p >= [r = 0] (compute_p + sum_u (s_u add_pu + q_u add'_pu))
                 + sum_c (a_c alone_rc + (x_c - a_c) shared_rc)                      every r
    (G4)  0 <= a_c <= x_c, so that k_u + e_u <= 1 and s_u + q_u <= 1
    (G5)  sum_u h_u held_u + sums <= M_F,    sum_u (k_u kept_u + e_u part_u) + sums <= M_B
          sums = sum_u (s_u sum_u + q_u shards_u + (1 - s_u - q_u) reduced_u), the gradients of
          micro-batches before

A gather in the node counts as free. Nodes have their lowest prices among the choices that were
solved, as in :mod:`apsched.solver.bounds.whole_step`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ortools.linear_solver import pywraplp

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.relaxed import without_copies
from apsched.solver.bounds.linear_program import Floats, costs_in_any_bucket
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.bounds.whole_step import graph_bound
from apsched.solver.bounds.whole_step_rows import costs_beside, sides
from apsched.units import ALLOCATION_BYTES

_TOLERANCE = 1e-6
"""Of the LP, relative to its objective."""
_LEAST = 1e-7
"""Weight of bytes among choices with equal bounds."""
_ORDER = 1e-2
"""Weight of the order of units beside it."""
KEPT, IN_NODE, HELD, SUMMED, SHARDS = "kept", "in node", "held", "summed", "shards"
KINDS = (KEPT, IN_NODE, HELD, SUMMED, SHARDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are decided on alike."""

    gathers: tuple[int, ...]
    """Collectives of forward that gather them, as captured."""
    again: tuple[int, ...]
    """Collectives of backward that gather them again."""
    reductions: tuple[int, ...]
    """Collectives of backward that reduce their gradients."""
    reductions_of_shards: tuple[int, ...]
    """Those of them that run once where shards are added."""
    least_bytes: Mapping[str, int]
    """Kind of a choice -> bytes that it takes at least (:func:`least_bytes_of`); without an entry
    it is not possible.
    """
    reduced_bytes: int
    """Of the reduced gradients."""
    sums: Mapping[str, Mapping[str, Sequence[str]]]
    """Kind -> nodes that add its gradients to those of the micro-batches before, each with nodes
    before it that may be the same kernel.
    """
    order: Mapping[str, int]
    """Kind -> place in the order in which it pays, among choices with equal bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """One of F, A, B and L."""

    count: int
    least_ticks: int
    """The right side of (G2)."""
    compute_ticks: float
    alone: Floats
    shared: Floats
    """Cost of each collective, by stream."""
    absent: tuple[tuple[tuple[str, int], ...], ...]
    """For each collective the decisions, kind and unit, of which one makes it needless."""
    adds: bool = False
    """Whether it adds gradients to those of the micro-batches before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """Problems of one graph: as captured, and with as few collectives as a choice has."""

    captured: Problem
    least: Problem


Ways = Sequence[Graphs]
"""One graph for each way to place gathers on groups: on one group, and on a second one, too. A
stream has the least work in the last way.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationBound:
    """Facts about a step of several micro-batches; made by :meth:`of`."""

    units: tuple[Unit, ...]
    graphs: tuple[_Graph, ...]
    first_ticks: int
    """B(f)."""
    adding_ticks: Mapping[str, tuple[int, ...]]
    """Kind -> add_pu of each unit, in B and L."""
    free_bytes: tuple[int | None, int | None]
    """M_F and M_B; ``None`` without a memory cap."""

    @classmethod
    def of(
        cls,
        num_micro_batches: int,
        units: Sequence[Unit],
        *,
        forward: Ways,
        backward: Ways,
        last: Ways,
        prices: Mapping[str, int],
        caps: Caps,
        free_bytes: tuple[int | None, int | None],
    ) -> "AccumulationBound":
        """Return the bound of a step whose graphs are those; ``prices`` has the ticks of nodes that
        add gradients, together with their chains, and of these alone; ``caps`` are without a
        memory cap.
        """
        problems = forward[0].captured, backward[0].captured
        gathers = _absent(problems[0], [u.gathers for u in units], (HELD,))
        again = _absent(problems[1], [u.again for u in units], (KEPT, IN_NODE))
        summed = _absent(problems[1], [u.reductions for u in units], (SUMMED,))
        shards = _absent(problems[1], [u.reductions_of_shards for u in units], (SHARDS,))
        either = tuple(a + b + c for a, b, c in zip(again, summed, shards, strict=True))
        first = _graph(1, backward, either, caps)
        return cls(
            units=tuple(units),
            graphs=(
                _graph(num_micro_batches - 1, forward, gathers, caps),
                first,
                replace(first, count=num_micro_batches - 2, adds=True),
                replace(_graph(1, last, again, caps), adds=True),
            ),
            first_ticks=min(graph_bound(way.captured, caps) for way in forward),
            adding_ticks={
                kind: tuple(_time_to_add(unit.sums[kind], prices) for unit in units)
                for kind in (SUMMED, SHARDS)
            },
            free_bytes=free_bytes,
        )

    def over_choices(self) -> TimeBound:
        """Return the bound over all choices."""
        ticks, _ = self._solved()
        return TimeBound(ticks=ticks, source=BoundSource.WEIGHED)

    def of_choice(self, chosen: Mapping[str, frozenset[int]]) -> int:
        """Return the bound in ticks for one choice, units by kind."""
        return self._solved(chosen)[0]

    def may_fit(self, chosen: Mapping[str, frozenset[int]]) -> bool:
        """Return whether (G5) allows a choice."""
        sums = sum(
            unit.least_bytes[SUMMED if u in chosen[SUMMED] else SHARDS]
            if u in chosen[SUMMED] | chosen[SHARDS]
            else unit.reduced_bytes
            for u, unit in enumerate(self.units)
        )
        taken = [
            sums + sum(self.units[u].least_bytes[k] for k in kinds for u in chosen[k])
            for kinds in ((HELD,), (KEPT, IN_NODE))
        ]
        return all(
            free is None or size <= free for free, size in zip(self.free_bytes, taken, strict=True)
        )

    def best_for(self, spare_bytes: int, *, as_many: bool) -> dict[str, frozenset[int]]:
        """Return the choice with the least bound that leaves ``spare_bytes`` free: units by kind,
        those chosen in part left out.

        Of those with equal bounds the one with the fewest bytes, or ``as_many`` as fit.
        """
        _, shares = self._solved(spare_bytes=spare_bytes, weight=-_LEAST if as_many else _LEAST)
        whole = 1 - 1e-4
        return {
            kind: frozenset(u for u, share in enumerate(shares[kind]) if share > whole)
            for kind in KINDS
        }

    def _solved(
        self,
        chosen: Mapping[str, frozenset[int]] | None = None,
        *,
        spare_bytes: int = 0,
        weight: float = 0.0,
    ) -> tuple[int, dict[str, list[float]]]:
        """Return (G1) in ticks, and the share of each unit by kind."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        inf = solver.infinity()
        scale = 1.0 / max(self.first_ticks, 1)
        shares = {
            kind: [
                solver.NumVar(0, 1 if kind in unit.least_bytes else 0, "") for unit in self.units
            ]
            for kind in KINDS
        }
        if chosen is not None:
            for kind, variables in shares.items():
                for u, variable in enumerate(variables):
                    variable.SetBounds(*(2 * [float(u in chosen[kind])]))
        if chosen is None:
            self._add_memory(solver, shares, spare_bytes)
        times = []
        for graph in self.graphs:
            time = solver.NumVar(graph.least_ticks * scale, inf, "")
            times.append(graph.count * time)
            adding = self._adding_ticks(shares) if graph.adds else []
            _add_graph(solver, graph, time, shares, adding, scale)
        solver.Minimize(solver.Sum([*times, *self._preference(shares, weight)]))
        if solver.Solve() != pywraplp.Solver.OPTIMAL:  # not even the gradients fit
            least = sum(graph.count * graph.least_ticks for graph in self.graphs)
            return self.first_ticks + least, {kind: [0.0] * len(self.units) for kind in KINDS}
        found = {kind: [v.solution_value() for v in vs] for kind, vs in shares.items()}
        ticks = solver.Objective().Value() / scale * (1 - _TOLERANCE)
        return self.first_ticks + int(ticks), found

    def _adding_ticks(self, shares: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Return the terms of the time that is spent on adding gradients."""
        return [
            ticks * shares[kind][u]
            for kind, of_units in self.adding_ticks.items()
            for u, ticks in enumerate(of_units)
        ]

    def _add_memory(
        self, solver: pywraplp.Solver, shares: Mapping[str, Sequence[Any]], spare_bytes: int
    ) -> None:
        """(G5), with ``spare_bytes`` left free."""

        def taken(kind: str) -> list[Any]:
            return [
                unit.least_bytes[kind] * share
                for unit, share in zip(self.units, shares[kind], strict=True)
                if kind in unit.least_bytes
            ]

        reduced = [
            unit.reduced_bytes * (1 - share - of_shards)
            for unit, share, of_shards in zip(
                self.units, shares[SUMMED], shares[SHARDS], strict=True
            )
        ]
        sums = [*taken(SUMMED), *taken(SHARDS), *reduced]
        for free, kinds in zip(self.free_bytes, ((HELD,), (KEPT, IN_NODE)), strict=True):
            if free is not None:
                items = [*sums, *(one for kind in kinds for one in taken(kind))]
                solver.Add(solver.Sum(items) <= free - spare_bytes)

    def _preference(self, shares: Mapping[str, Sequence[Any]], weight: float) -> list[Any]:
        """Return the terms that compare choices with equal bounds: bytes and the order of units."""
        if not weight:
            return []
        most = max((place for unit in self.units for place in unit.order.values()), default=0) + 1
        total = sum(size for unit in self.units for size in unit.least_bytes.values())
        return [
            (weight + abs(weight) * _ORDER * unit.order[kind] / most)
            * (unit.least_bytes[kind] / max(total, 1))
            * share
            for kind in KINDS
            for unit, share in zip(self.units, shares[kind], strict=True)
            if kind in unit.least_bytes
        ]


def _add_graph(
    solver: pywraplp.Solver,
    graph: _Graph,
    time: Any,
    shares: Mapping[str, Sequence[Any]],
    adding: Sequence[Any],
    scale: float,
) -> None:
    """(G3) and (G4) for one graph; a collective that costs nothing is left out."""
    rows: list[list[Any]] = [[] for _ in graph.alone]
    for c, absent in enumerate(graph.absent):
        both = np.concatenate((graph.alone[:, c], graph.shared[:, c]))
        if not both.any():
            continue
        present = 1 - solver.Sum([shares[kind][u] for kind, u in absent])
        alone = solver.NumVar(0, 1, "")
        solver.Add(alone <= present)
        for r, row in enumerate(rows):
            one, shared = graph.alone[r, c] * scale, graph.shared[r, c] * scale
            if one or shared:
                row.append(one * alone + shared * (present - alone))
    for r, row in enumerate(rows):
        compute = scale * (graph.compute_ticks + solver.Sum(adding)) if r == 0 else 0.0
        solver.Add(time >= compute + solver.Sum(row))


def _graph(
    count: int, ways: Ways, absent: tuple[tuple[tuple[str, int], ...], ...], caps: Caps
) -> _Graph:
    captured, least = (
        without_copies(Instance.of(problem, caps))
        for problem in (ways[-1].captured, ways[-1].least)
    )
    alone, shared = _least_costs(captured, least)
    return _Graph(
        count=count,
        least_ticks=min(graph_bound(way.least, caps) for way in ways),
        compute_ticks=float(least.arrays.compute_ticks.sum()),
        alone=alone,
        shared=shared,
        absent=absent,
    )


def _time_to_add(sums: Mapping[str, Sequence[str]], prices: Mapping[str, int]) -> int:
    """Return the time of ``sums``, nodes and their chains, less that of the chains alone."""
    known = {name: chain for name, chain in sums.items() if name in prices}
    return sum(prices[name] - sum(prices[one] for one in known[name]) for name in known)


def _least_costs(captured: Instance, least: Instance) -> tuple[Floats, Floats]:
    """Return the costs of each collective alone and in a bucket, by stream: in ``captured``, or in
    ``least`` if that has it for less.
    """
    groups = captured.problem.streams
    alone, shared = (side.copy() for side in sides(captured, costs_in_any_bucket(captured), groups))
    others = sides(least, costs_beside(captured, least), groups)
    at = {_start_name(captured.problem, c): c for c in range(len(captured.problem.collectives))}
    for other in range(len(least.problem.collectives)):
        c = at.get(_start_name(least.problem, other))
        if c is not None:
            for mine, theirs in zip((alone, shared), others, strict=True):
                mine[:, c] = np.minimum(mine[:, c], theirs[:, other])
    return alone, shared


def _start_name(problem: Problem, c: int) -> str:
    return problem.node_names[problem.collectives[c].start]


def _absent(
    problem: Problem, collectives: Sequence[tuple[int, ...]], kinds: Sequence[str]
) -> tuple[tuple[tuple[str, int], ...], ...]:
    found: list[tuple[tuple[str, int], ...]] = [()] * len(problem.collectives)
    for u, ones in enumerate(collectives):
        for c in ones:
            found[c] = tuple((kind, u) for kind in kinds)
    return tuple(found)


def least_bytes_of(sizes_bytes: Iterable[int]) -> int:
    """Return the bytes that allocations of these sizes take at least: inside a bucket's buffer,
    which is rounded up once.
    """
    return sum(max(size - ALLOCATION_BYTES + 1, 0) for size in sizes_bytes)
