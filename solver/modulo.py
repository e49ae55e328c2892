"""One layer as a modulo schedule: the least period of a layer that repeats for ever, and the least memory for a period.

The model is that of ``docs/formulation.md``, (M1) to (M15); its size does not depend on the number of layers. What it proves holds for
layers without end: a graph has a head and a tail, and may alternate between layers, so that its step time can lie on either side of
``count`` periods. The bounds of ``apsched.solver.bounds`` are the ones that hold for the graph.
"""

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from apsched.solver import modulo_constraints
from apsched.solver.loop_body import GATHER, LoopBody
from apsched.solver.loop_columns import Column
from apsched.solver.modulo_variables import create_modulo_variables
from apsched.units import ALLOCATION_BYTES

_NO_LIMIT_BLOCKS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuloBucket:
    """A bucket of one layer: what it holds, and the sites (through all layers) of its launch and its wait."""

    column: Column
    launch_site: int
    wait_site: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuloSchedule:
    """A schedule of one layer that repeats every ``period_ticks``."""

    body: LoopBody
    period_ticks: int
    peak_memory_bytes: int
    """What is alive at most, what the caller keeps included, where the layers leave least room."""
    buckets: tuple[ModuloBucket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuloAnswer:
    """What was found, and what is proven, at one period."""

    schedule: ModuloSchedule | None
    """None where none was found."""
    bound_bytes: int
    """No schedule of the layer with this period needs less memory."""
    optimal: bool
    infeasible: bool
    deterministic_work: float


class LayerModel:
    """The modulo formulation of one body, asked one question after the other."""

    def __init__(self, body: LoopBody, seed: int = 0) -> None:
        self.body, self.seed = body, seed
        cap = body.caps.memory_cap_bytes
        self._room = _NO_LIMIT_BLOCKS if cap is None else (cap - body.kept_bytes) // ALLOCATION_BYTES
        self.variables = create_modulo_variables(body, serial_ticks(body), max(self._room, 0))
        for constraint in modulo_constraints.ALL:
            constraint(self.variables)
        self.known: ModuloSchedule | None = None
        """The last schedule that was found: the next solve starts from it."""

    def exists(self, period_ticks: int, budget: float) -> ModuloAnswer:
        """Answer whether there is a schedule of this period within the caps."""
        return self._solve(period_ticks, None, budget)

    def least_memory(self, period_ticks: int, budget: float) -> ModuloAnswer:
        """Return the schedule of this period with the least memory; what waits longer than it must has every shorter period, too."""
        return self._solve(period_ticks, self.variables.peak_blocks, budget)

    def _solve(self, period_ticks: int, objective: cp_model.IntVar | None, budget: float) -> ModuloAnswer:
        v, model = self.variables, self.variables.model
        domain = model.proto.variables[v.period.index].domain
        domain.clear()
        domain.extend([period_ticks, period_ticks])
        model.clear_objective()  # type: ignore[no-untyped-call]
        if objective is not None:
            model.minimize(objective)
        self._add_hint()
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self.seed
        solver.parameters.max_deterministic_time = budget
        status = cp_model.INFEASIBLE if self._room < 0 else solver.solve(model)
        schedule = self._extract(solver, period_ticks) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
        self.known = schedule or self.known
        return ModuloAnswer(
            schedule=schedule,
            bound_bytes=self.body.kept_bytes + (0 if objective is None or self._room < 0 else _rounded_up(solver.best_objective_bound)),
            optimal=status == cp_model.OPTIMAL,
            infeasible=status == cp_model.INFEASIBLE,
            deterministic_work=float(solver.response_proto.deterministic_time) if self._room >= 0 else 0.0,
        )

    def _extract(self, solver: cp_model.CpSolver, period_ticks: int) -> ModuloSchedule:
        v = self.variables
        buckets = []
        for b, column in enumerate(self.body.columns):
            if solver.boolean_value(v.chosen[b]):
                slot = self.body.slots[column.anchor]
                at = v.launch_at if slot.role == GATHER else v.wait_at
                moved = next(q for (s, q), literal in at.items() if s == column.anchor and solver.boolean_value(literal))
                launch, wait = (moved, slot.wait_site) if slot.role == GATHER else (slot.launch_site, moved)
                buckets.append(ModuloBucket(column=column, launch_site=launch, wait_site=wait))
        return ModuloSchedule(
            body=self.body,
            period_ticks=period_ticks,
            peak_memory_bytes=max(solver.value(alive) for alive in v.alive_blocks) * ALLOCATION_BYTES + self.body.kept_bytes,
            buckets=tuple(buckets),
        )

    def _add_hint(self) -> None:
        """Hint what was found before; at first, everything alone, launched and waited for at once."""
        v, model = self.variables, self.variables.model
        model.clear_hints()  # type: ignore[no-untyped-call]
        chosen, sites = self._hinted()
        for b, literal in enumerate(v.chosen):
            model.add_hint(literal, b in chosen)
        for at in (v.launch_at, v.wait_at):
            for (s, q), literal in at.items():
                model.add_hint(literal, sites[s] == q)

    def _hinted(self) -> tuple[set[int], dict[int, int]]:
        body, v = self.body, self.variables
        if self.known is None:
            alone = {b for b, column in enumerate(body.columns) if not column.several}
            return alone, {s: since.past if s in v.launched else since.first for s, since in (v.launched | v.waited).items()}
        chosen: set[int] = set()
        sites: dict[int, int] = {}
        for bucket in self.known.buckets:
            chosen.add(body.columns.index(bucket.column))
            at = bucket.launch_site if body.slots[bucket.column.anchor].role == GATHER else bucket.wait_site
            sites |= {s: at - shift * body.num_sites for s, shift in bucket.column.members}
        return chosen, sites


def serial_ticks(body: LoopBody) -> int:
    """Return the period of a layer in which everything is alone, one after the other."""
    slots = sum(slot.launch_ticks + slot.transfer_ticks + slot.epilogue_ticks for slot in body.slots)
    return sum(site.ticks for site in body.sites) + slots


def load_bound(body: LoopBody, budget: float) -> tuple[int, float]:
    """Return a period that every schedule has at least, and the work: the buckets that load the busiest stream least, (M1) and (M13)."""
    v = create_modulo_variables(body, serial_ticks(body), _NO_LIMIT_BLOCKS)
    modulo_constraints.membership_of_slots(v)
    modulo_constraints.loads(v)
    v.model.minimize(v.period)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = budget
    solver.solve(v.model)
    return int(np.ceil(solver.best_objective_bound - 1e-6)), float(solver.response_proto.deterministic_time)


def _rounded_up(blocks: float) -> int:
    return int(np.ceil(blocks - 1e-6)) * ALLOCATION_BYTES
