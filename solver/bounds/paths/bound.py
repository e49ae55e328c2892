"""A bound on step time that lets each collective be in one bucket, or alone, on all paths at once:
``docs/formulation.md``, (W1) to (W6).

For any weights on the paths through a schedule, the mean of the paths is a bound if the buckets are
those that make it least. An LP proposes weights by all buckets that were cheapest so far (cutting
planes); the result is the best mean of any round, so the LP proves nothing.
"""

import numpy as np
import numpy.typing as npt
from ortools.linear_solver import pywraplp

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.bounds.paths.bucket_costs import bucket_costs
from apsched.solver.bounds.paths.network import BEGINNING, END, SHIFT, TAIL, Network, network
from apsched.solver.bounds.paths.path_work import PathWork
from apsched.solver.bounds.paths.pricing import pricings
from apsched.solver.bounds.step_time import TimeBound

Floats = npt.NDArray[np.float64]


_MOST_ROUNDS = 80
_MOST_BYTE_PRICE = 4.0
"""Limit of the price of a byte in memory, as a multiple of its transfer at the least rate: at a
full slot any price is valid.
"""
_CLOSE = 2e-5
"""Share of the bound that further rounds may still win when they stop."""
_LEAST_STEP = 0.2
"""Share of the way from the best weights to those of the LP: a full step overshoots."""
_US = 1e-3
"""Ticks in the LP are microseconds."""


def path_bound(
    instance: Instance, work: PathWork | None = None, room: Ints | None = None
) -> TimeBound:
    """Return the best Lagrangian of the paths that is found; ``work`` is the compute along them,
    without it that of ``instance`` in its order. ``room`` tells the bytes that are free at each
    compute node in every schedule: gathers fit there.
    """
    parts = bucket_costs(instance)
    if not parts:
        return TimeBound(ticks=0, source=BoundSource.PATHS)
    work = PathWork.in_order(instance.arrays) if work is None else work
    net = network(instance, parts, work, room)
    priced = pricings(net, work, parts)
    master = _Master(net, len(priced))
    flow = np.zeros(net.num_arcs)
    flow[net.block("flow", BEGINNING, END)] = 1.0
    best, best_flow, step = -np.inf, flow, 1.0
    for _ in range(_MOST_ROUNDS):
        answers = [p.price(flow) for p in priced]
        value = float(net.constant @ flow) + sum(a.ticks for a in answers)
        step = min(1.0, 1.5 * step) if value > best else max(_LEAST_STEP, 0.7 * step)
        if value > best:
            best, best_flow = value, flow
        for k, answer in enumerate(answers):
            master.cut(k, answer.added)
        enough = best + _CLOSE * max(best, 1.0)
        solved = master.solve(enough)
        if solved is None:
            break
        flow = best_flow + step * (solved - best_flow)
    source = BoundSource.WEIGHED_ALONG_PATHS if room is None else BoundSource.MEMORY_ALONG_PATHS
    return TimeBound(ticks=int(best * (1 - 1e-9)), source=source)


class _Master:
    """The LP over weights: the most that constants and cuts allow."""

    def __init__(self, net: Network, num_parts: int) -> None:
        self.net = net
        self.solver = pywraplp.Solver.CreateSolver("CLP")  # GLOP fails on some of these
        infinity = self.solver.infinity()
        self.arcs = [self.solver.NumVar(0, infinity, "") for _ in range(net.num_arcs)]
        if net.has_rows:
            for arc in self.arcs[net.block("memory")]:
                arc.SetUb(_MOST_BYTE_PRICE)
        self.parts = [self.solver.NumVar(-infinity, infinity, "") for _ in range(num_parts)]
        objective = self.solver.Objective()
        for arc, ticks in zip(self.arcs, net.constant.tolist(), strict=True):
            objective.SetCoefficient(arc, ticks * _US)
        for part in self.parts:
            objective.SetCoefficient(part, 1.0)
        objective.SetMaximization()
        from_last, from_scratch = pywraplp.MPSolverParameters(), pywraplp.MPSolverParameters()
        from_last.SetIntegerParam(from_last.PRESOLVE, from_last.PRESOLVE_OFF)
        self.ways = from_last, from_scratch
        self._conserve()

    def _conserve(self) -> None:
        """Flow conservation: all that enters a node leaves it; one path begins."""
        net, num_slots = self.net, len(self.net.slots)
        begin = self._row(1.0)
        for s in sorted({*net.prefix_streams, *net.suffix_streams}):
            self._add(begin, [net.offset["whole", s, 0]], 1.0)
        for s in net.prefix_streams:
            for e in net.ends:
                self._add(begin, _all(net.block("enter", s, e)), 1.0)
                if e != SHIFT:
                    self._add(begin, _all(net.block("enter_tail", s, e)), 1.0)
            if net.has_on_path:
                self._add(begin, _all(net.block("path_enter", s)), 1.0)
        for start, end in net.classes:
            for i in range(num_slots):
                self._node(start, end, i, begin)
            if end != END:
                self._add(self._row(0.0), [net.block("flow", start, end).stop - 1], 1.0)
        if net.has_on_path:
            self._conserve_on_path()

    def _node(self, start: int, end: int, i: int, begin: pywraplp.Constraint) -> None:
        """R_i and E_i of one class: only arcs into R_i may leave it there."""
        net = self.net
        first = net.block("flow", start, end).start
        row = self._row(0.0)
        self._add(row, [first + i], -1.0)
        leaving = [
            net.block(what, start, end).start + i
            for what in ("shift", "leave", "leave_for_all")
            if (what, start, end) in net.offset
        ]
        self._add(row, leaving, -1.0)
        if i:
            self._add(row, [first + i - 1], 1.0)
        elif start == BEGINNING:
            source = self.solver.NumVar(0, self.solver.infinity(), "")
            row.SetCoefficient(source, 1.0)
            begin.SetCoefficient(source, 1.0)
        entering = [net.block("enter", start, end).start + i] if start >= 0 else []
        if start == TAIL:
            entering += [net.block("enter_tail", s, end).start + i for s in net.prefix_streams]
            entering += [net.block("rejoin", 0, end).start + i] if net.has_on_path else []
        self._add(row, entering, 1.0)
        if leaving:  # what enters at E_i cannot leave at R_i
            before = self.solver.Constraint(-self.solver.infinity(), 0.0)
            self._add(before, leaving, 1.0)
            if i:
                self._add(before, [first + i - 1], -1.0)
            elif start == BEGINNING:
                before.SetCoefficient(source, -1.0)

    def _conserve_on_path(self) -> None:
        net, num_slots = self.net, len(self.net.slots)
        path, stall = net.block("path").start, net.block("stall").start
        leaps = net.offset["leap", 0, 0]
        for i in range(num_slots):
            reached, begun = self._row(0.0), self._row(0.0)
            if i:
                self._add(reached, [path + i - 1], 1.0)
            self._add(
                reached,
                [net.block("shift", c, e).start + i for c, e in net.classes if e == SHIFT],
                1.0,
            )
            self._add(
                reached, [net.block("path_leave", s).start + i for s in net.suffix_streams], -1.0
            )
            self._add(
                reached,
                [stall + i, *(leaps + j for j, (a, _) in enumerate(net.leaps) if a == i)],
                -1.0,
            )
            self._add(
                begun,
                [stall + i, *(leaps + j for j, (_, b) in enumerate(net.leaps) if b == i)],
                1.0,
            )
            self._add(
                begun, [net.block("path_enter", s).start + i for s in net.prefix_streams], 1.0
            )
            self._add(
                begun,
                [path + i, *(net.block("rejoin", 0, e).start + i for e in net.ends if e != SHIFT)],
                -1.0,
            )

    def _row(self, value: float) -> pywraplp.Constraint:
        return self.solver.Constraint(value, value)

    def _add(self, row: pywraplp.Constraint, arcs: list[int], coefficient: float) -> None:
        for arc in arcs:
            row.SetCoefficient(self.arcs[arc], coefficient)

    def cut(self, part: int, added: Floats) -> None:
        """Add a row: for any weights, the cheapest buckets cost no more than those that add
        ``added``.
        """
        row = self.solver.Constraint(-self.solver.infinity(), 0.0)
        row.SetCoefficient(self.parts[part], 1.0)
        for arc in np.nonzero(added)[0].tolist():
            row.SetCoefficient(self.arcs[arc], -float(added[arc]) * _US)

    def solve(self, enough: float) -> Floats | None:
        """Return the best weights, or None where they allow no more than ``enough`` ticks, or the
        LP fails.

        From where the last LP stood CLP is fast, and sometimes ends too early: then it begins from
        scratch.
        """
        for way in self.ways:
            solved = self.solver.Solve(way) == pywraplp.Solver.OPTIMAL
            if solved and self.solver.Objective().Value() / _US > enough:
                return np.array([max(arc.solution_value(), 0.0) for arc in self.arcs])
        return None


def _all(block: slice) -> list[int]:
    return list(range(block.start, block.stop))
