"""Build the CP-SAT model, hand it a schedule to start from, solve its objectives in order, read the
schedule out.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from ortools.sat.python import cp_model

from apsched.config import SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.schedule import StepKind
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.arrays.reordered import Orders
from apsched.solver.cpsat import constraints
from apsched.solver.cpsat.compute_order import in_any_order
from apsched.solver.cpsat.variables import (
    Unit,
    Variables,
    create_variables,
)
from apsched.solver.program.program import COPY_IN, COPY_OUT, LAUNCH, NODE, START, WAIT, Program
from apsched.units import ALLOCATION_BYTES

_RUNS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Shares of the budget: CP-SAT begins again with twice the work while that moves the objective or
its bound.
"""
_LEAST_MOVE = 1e-3
"""Share of the objective from which a move counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The result of CP-SAT on a whole problem."""

    program: Program | None
    """None where none was found (infeasible, or out of work)."""
    order: Ints
    """Compute nodes as captured, in the order that ``program`` has them in."""
    value: int | None
    """The stated objective of ``program``."""
    bound: int
    """The bound of the stated objective."""
    optimal: bool
    infeasible: bool
    deterministic_work: float


class ExactModel:
    """The whole formulation on one problem; objectives are set one after the other on the same
    constraints.

    With ``orders`` it decides the order of the compute, too. Of a relaxation only the bounds count.
    """

    def __init__(
        self,
        instance: Instance,
        horizon_ticks: int,
        orders: Orders | None = None,
        *,
        is_relaxation: bool = False,
    ) -> None:
        self.instance, self._is_relaxation = instance, is_relaxation
        compute_order = in_any_order(orders, instance.caps) if orders is not None else None
        self.variables = create_variables(instance, horizon_ticks, compute_order)
        for constraint in constraints.ALL:
            constraint(self.variables)

    def any_schedule(self, options: SolveOptions) -> Exact:
        """No objective: whether the constraints can be kept."""
        return self._run(0, options, None, None)

    def minimize_step_time(
        self, options: SolveOptions, hint: Program | None, order: Ints | None = None
    ) -> Exact:
        """Objective 1: step time, in ticks; ``order`` is that of the compute order in ``hint``, as
        captured where it is None.
        """
        return self._minimize(self.variables.step_time, options, hint, order)

    def minimize_peak(
        self, options: SolveOptions, hint: Program | None, order: Ints | None = None
    ) -> Exact:
        """Objective 2: peak memory, in bytes beside those that the caller keeps."""
        exact = self._minimize(self.variables.peak_blocks, options, hint, order)
        return replace(exact, bound=exact.bound * ALLOCATION_BYTES)

    def minimize_launches(
        self, options: SolveOptions, hint: Program | None, order: Ints | None = None
    ) -> Exact:
        """Objective 3: number of launches."""
        v = self.variables
        return self._minimize(sum(v.joins[h, h] for h in v.alone), options, hint, order)

    def limit_step_time(self, ticks: int) -> None:
        """Keep the step time at most ``ticks`` from here on."""
        self.variables.model.add(self.variables.step_time <= ticks)

    def limit_peak(self, peak_bytes: int) -> None:
        """Keep the peak, without the bytes that the caller keeps, at most ``peak_bytes`` from now
        on."""
        self.variables.model.add(self.variables.peak_blocks <= peak_bytes // ALLOCATION_BYTES)

    def limit_launches(self, num_launches: int) -> None:
        """Keep the number of launches at most ``num_launches`` from here on."""
        v = self.variables
        v.model.add(sum(v.joins[h, h] for h in v.alone) <= num_launches)

    def _minimize(
        self,
        objective: object,
        options: SolveOptions,
        hint: Program | None,
        order: Ints | None = None,
    ) -> Exact:
        """Return the best result of runs with more and more work, until one moves nothing.

        Presolve may take more work than the budget of a run. The next runs are left out as long as
        their budget is not larger than that work: they would end at the same place.
        """
        best: Exact | None = None
        work = -1.0
        for share in _RUNS:
            less = replace(options, budget=options.budget * share)
            if less.budget <= work:
                continue
            found = self._run(objective, less, hint, order)
            work = found.deterministic_work
            both = found if best is None else _better(best, found)
            is_moved = best is None or self._is_moved(best, both, hint)
            best = both
            if best.optimal or best.infeasible or not is_moved:
                break
            if best.program is not None:
                hint, order = best.program, best.order
        assert best is not None
        return best

    def _is_moved(self, before: Exact, now: Exact, hint: Program | None) -> bool:
        """Return whether the last run moved the objective or its bound by more than the least move,
        or ended before it could.
        """
        if now.value is None and now.bound <= 0:
            return True
        if self._is_relaxation or (now.value is None and hint is not None):
            return now.bound - before.bound > _LEAST_MOVE * now.bound
        if before.value is None or now.value is None:
            return True
        least = _LEAST_MOVE * now.value
        return before.value - now.value > least or now.bound - before.bound > least

    def _run(
        self, objective: object, options: SolveOptions, hint: Program | None, order: Ints | None
    ) -> Exact:
        model = self.variables.model
        model.minimize(objective)  # type: ignore[arg-type]
        model.clear_hints()  # type: ignore[no-untyped-call]
        if hint is not None:
            add_hint(self.variables, hint, order)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = options.num_workers
        solver.parameters.random_seed = options.seed
        solver.parameters.max_deterministic_time = options.budget
        status = _solved(solver, model)
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        program = (
            extract(self.instance.problem, self.variables, solver.boolean_value, solver.value)
            if found
            else None
        )
        at = [solver.value(place) if found else k for k, place in enumerate(self.variables.places)]
        return Exact(
            program=program,
            order=np.argsort(np.array(at, dtype=np.int64), kind="stable")
            if at
            else np.arange(len(self.instance.arrays.compute_ticks)),
            value=round(solver.objective_value) if found else None,
            bound=int(np.ceil(solver.best_objective_bound - 1e-6)),
            optimal=status == cp_model.OPTIMAL,
            infeasible=status == cp_model.INFEASIBLE,
            deterministic_work=float(solver.response_proto.deterministic_time),
        )


def _better(best: Exact, found: Exact) -> Exact:
    """Return the better program of two runs with the better bound and the work of both."""
    is_better = best.value is None or (found.value is not None and found.value < best.value)
    return replace(
        found if is_better else best,
        bound=max(best.bound, found.bound),
        optimal=found.optimal,
        infeasible=found.infeasible,
        deterministic_work=best.deterministic_work + found.deterministic_work,
    )


def _solved(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """Solve ``model`` and return the status; an interrupt (Ctrl-C) stops the solver and is raised
    again.

    CP-SAT by itself takes the interrupt and returns its best solution so far: a worse answer
    without a message. Signals reach only the main thread, which must not be in CP-SAT for that;
    another thread, which gets none, solves directly.
    """
    solver.parameters.catch_sigint_signal = False
    if threading.current_thread() is not threading.main_thread():
        return solver.solve(model)
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(solver.solve, model)
        try:
            return running.result()
        except BaseException:
            solver.stop_search()
            raise


def extract(
    problem: Problem,
    v: Variables,
    holds: Callable[[cp_model.LiteralT], bool],
    value: Callable[[cp_model.IntVar], int],
) -> Program:
    """Return the program of a solution."""
    groups: dict[int, list[int]] = {}
    for (c, h), joins in v.joins.items():
        if holds(joins):
            groups.setdefault(h, []).append(c)
    coalesced = np.zeros(len(v.arrays.kind), dtype=np.bool_)
    coalesced[[h for h, literal in v.coalesced.items() if holds(literal)]] = True
    partition = Pricer(Instance(problem=problem, arrays=v.arrays)).partition(
        (tuple(sorted(members)) for _, members in sorted(groups.items())), coalesced
    )
    index = {h: b for b, h in enumerate(sorted(groups))}
    # whatever the order of the compute order, one of its nodes stands at every multiple of W
    placed = [((k + 1) * v.position_step, NODE, k) for k in range(len(v.arrays.compute_ticks))]
    for (what, c), unit in v.units.items():
        if not holds(unit.present):
            continue
        if what is StepKind.COPY_OUT:
            placed.append((value(unit.first), COPY_OUT, c))
        else:
            operation = {
                StepKind.COPY_IN: COPY_IN,
                StepKind.WAIT: WAIT,
                StepKind.START: START if holds(v.several[c]) else LAUNCH,
            }[what]
            placed.append((value(unit.first), operation, index[c]))
    placed.sort()
    order = np.array(
        [(operation, argument) for _, operation, argument in placed], dtype=np.int64
    ).reshape(-1, 2)
    return Program(
        partition=partition,
        operation=np.ascontiguousarray(order[:, 0]),
        argument=np.ascontiguousarray(order[:, 1]),
    )


def add_hint(v: Variables, program: Program, order: Ints | None = None) -> None:
    """Hint every literal of membership and order that ``program`` decides, with the compute order
    in ``order``.
    """
    model = v.model
    buckets = [tuple(sorted(b)) for b in program.partition.buckets]
    head = {c: members[0] for members in buckets for c in members}
    flat = {
        members[0]
        for members, is_flat in zip(buckets, program.partition.flat.tolist(), strict=True)
        if is_flat
    }
    for (c, h), joins in v.joins.items():
        model.add_hint(joins, head[c] == h)
    for c in v.alone:
        model.add_hint(v.alone[c], (c,) in buckets)
        model.add_hint(v.several[c], c in flat)
    for h, literal in v.coalesced.items():
        model.add_hint(literal, head[h] == h and h not in flat and (h,) not in buckets)
    for (c, h), literal in v.carried.items():
        model.add_hint(literal, head[c] == h and h not in flat and (h,) not in buckets)
    for c in {c for c, _ in v.carried}:
        model.add_hint(v.loose[c], head[c] not in flat)
    place: dict[Unit, int] = {}
    compute_place: dict[int, int] = {}
    nodes = np.arange(len(v.arrays.compute_ticks)) if order is None else order
    for i, (operation, argument) in enumerate(
        zip(program.operation.tolist(), program.argument.tolist(), strict=True)
    ):
        at = 2 * i
        if operation == NODE:
            compute_place[int(nodes[argument])] = at
        elif operation == COPY_OUT:
            place[StepKind.COPY_OUT, argument] = at
        else:
            h = buckets[argument][0]
            if operation in (LAUNCH, COPY_IN) and h in flat:
                place[StepKind.COPY_IN, h] = at
            if operation in (LAUNCH, START):
                place[StepKind.START, h] = at + 1
            if operation == WAIT:
                place[StepKind.WAIT, h] = at
    for (one, other), before in v.before.items():
        if one in place and other in place:
            model.add_hint(before, place[one] < place[other])
    for (unit, k), after in v.after_compute.items():
        if unit in place:
            model.add_hint(after, place[unit] > compute_place[k])
    if v.compute_order.free is not None:
        for (a, b), literal in v.order.items():
            model.add_hint(
                literal,
                compute_place[v.compute_order.free.first[a]]
                < compute_place[v.compute_order.free.first[b]],
            )
