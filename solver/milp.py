"""PLACEHOLDER"""

import math
from dataclasses import dataclass

import pulp

from apsched.config import Caps
from apsched.problem import Problem
from apsched.schedule import Schedule, as_captured
from apsched.simulate import Timeline, simulate
from apsched.solver.milp_engine import CBC, Engine
from apsched.solver.milp_events import Events, create_events
from apsched.solver.milp_extract import schedule_of, sequential_ticks
from apsched.solver.milp_memory import add_memory
from apsched.solver.milp_order import Order, create_order, in_flight
from apsched.solver.milp_time import Clock, add_time
from apsched.verify import verify

_TOLERANCE = 1e-7
"""Share of the horizon that the solver's tolerances may hide: the bound is lowered by as much before it is rounded up."""
_MOST_REFUSALS = 50
"""Orders that the solver's tolerances let through and exact figures refuse, in one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpResult:
    """What the MILP found."""

    status: str
    """``optimal`` (all three objectives proven), ``feasible``, ``infeasible`` or ``unknown`` (out of time, nothing found)."""
    schedule: Schedule | None
    step_time_ticks: int | None
    peak_memory_bytes: int | None
    num_launches: int | None
    bound_ticks: int
    """No schedule within the caps is faster; rounded so that the solver's tolerances cannot lift it above the optimum."""
    proven: tuple[bool, bool, bool]
    """Step time, peak and launches proven, up to the solver's tolerances."""
    solver_name: str
    num_rows: int
    num_binaries: int


def solve_milp(problem: Problem, caps: Caps, *, solver_name: str = CBC, time_limit_s: float | None = None) -> MilpResult:
    """Return the least step time within ``caps``, at that the least peak, at that the fewest launches.

    ``solver_name`` is a name that PuLP knows; ``time_limit_s`` limits the seconds of all solves together. Raises InputError where the
    solver is unknown or not installed, and where ``problem`` is too large for the formulation.
    """
    return _Milp(problem, caps, Engine(solver_name, time_limit_s)).solve()


class _Milp:
    def __init__(self, problem: Problem, caps: Caps, engine: Engine) -> None:
        self.problem, self.caps, self.engine = problem, caps, engine
        self.events: Events = create_events(problem, caps)
        self.model = pulp.LpProblem("apsched", pulp.LpMinimize)
        self.order: Order = create_order(self.events, self.model)
        in_flight(self.order)
        horizon_ticks = self._horizon()
        self.clock: Clock = add_time(self.order, horizon_ticks)
        self.margin_ticks = _TOLERANCE * horizon_ticks
        self.peak: pulp.LpVariable | None = None
        self.byte_scale = max(1.0, (problem.kept_bytes + sum(s.size_bytes for s in problem.storages if not s.kept)) / 10_000)
        self.best: tuple[Schedule, Timeline] | None = None
        self.refusals = 0

    def _horizon(self) -> int:
        captured = as_captured(self.problem.num_nodes)
        if not verify(self.problem, captured, self.caps):
            return simulate(self.problem, captured).step_time_ticks
        return sequential_ticks(self.problem)

    def solve(self) -> MilpResult:
        if self.caps.memory_cap_bytes is not None:
            peak = self._peak()
            self.model += peak <= (self.caps.memory_cap_bytes + 0.5) / self.byte_scale
        bound_ticks = self._relaxed_bound()
        status, bound = self._minimize(self.clock.step * 1, self.clock.scale)
        if math.isfinite(bound):
            bound_ticks = max(bound_ticks, math.ceil(bound - self.margin_ticks))
        if self.best is None:
            return self._result("infeasible" if status == "infeasible" else "unknown", bound_ticks, (False, False, False))
        proven = [status == "optimal", False, False]
        if proven[0]:
            self._limit(self.clock.step * 1, self.best[1].step_time_ticks, self.clock.scale)
            status, _ = self._minimize(self._peak() * 1, self.byte_scale)
            proven[1] = status == "optimal"
        if proven[1]:
            self._limit(self._peak() * 1, self.best[1].peak_memory_bytes, self.byte_scale)
            status, _ = self._minimize(pulp.lpSum(self.order.chosen), 1.0)
            proven[2] = status == "optimal"
        bound_ticks = min(bound_ticks, self.best[1].step_time_ticks)
        return self._result("optimal" if all(proven) else "feasible", bound_ticks, (proven[0], proven[1], proven[2]))

    def _peak(self) -> pulp.LpVariable:
        """Return the peak; its rows join the model when it is first asked for."""
        if self.peak is None:
            self.peak = add_memory(self.order, self.byte_scale)
        return self.peak

    def _limit(self, objective: pulp.LpAffineExpression, value: int, scale: float) -> None:
        self.model += objective <= (value + 0.5) / scale

    def _relaxed_bound(self) -> int:
        """Return the bound of the linear relaxation, in ticks."""
        self.model.setObjective(self.clock.step * 1)
        relaxed = self.engine.run(self.model, relaxed=True)
        if relaxed.status != "optimal":
            return 0
        return max(0, math.ceil(relaxed.bound * self.clock.scale - self.margin_ticks))

    def _minimize(self, objective: pulp.LpAffineExpression, scale: float) -> tuple[str, float]:
        """Return the status and the bound in ticks, bytes or launches; ``best`` is then the best schedule so far."""
        self.model.setObjective(objective)
        while True:
            answer = self.engine.run(self.model)
            bound = answer.bound * scale
            if answer.status not in ("optimal", "feasible"):
                return answer.status, bound
            schedule = self._extract()
            if not verify(self.problem, schedule, self.caps):
                timeline = simulate(self.problem, schedule)
                if self.best is None or _value(timeline) <= _value(self.best[1]):
                    self.best = schedule, timeline
                    return answer.status, bound
            self.refusals += 1
            if self.refusals > _MOST_REFUSALS:
                return "unknown", bound
            self._refuse()

    def _refuse(self) -> None:
        """(16) no-good: the solver's tolerances let an order through that is over a limit; some binary must differ."""
        self.model += pulp.lpSum(1 - x if x.value() > 0.5 else x for x in self.order.binaries) >= 1

    def _extract(self) -> Schedule:
        events, order = self.events, self.order
        position = [
            sum(round(pulp.value(order.before(v, u)) or 0) for v in range(events.num_events) if v != u) for u in range(events.num_events)
        ]
        chosen = [column.members for column, x in zip(events.columns, order.chosen, strict=True) if x.value() > 0.5]
        return schedule_of(events, [members for members in chosen if len(members) > 1], position)

    def _result(self, status: str, bound_ticks: int, proven: tuple[bool, bool, bool]) -> MilpResult:
        schedule, timeline = self.best or (None, None)
        return MilpResult(
            status=status,
            schedule=schedule,
            step_time_ticks=timeline.step_time_ticks if timeline else None,
            peak_memory_bytes=timeline.peak_memory_bytes if timeline else None,
            num_launches=timeline.num_launches if timeline else None,
            bound_ticks=bound_ticks,
            proven=proven,
            solver_name=self.engine.name,
            num_rows=len(self.model.constraints),
            num_binaries=len(self.order.binaries),
        )


def _value(timeline: Timeline) -> tuple[int, int, int]:
    return timeline.step_time_ticks, timeline.peak_memory_bytes, timeline.num_launches
