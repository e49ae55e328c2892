"""The second opinion: the same problem as a mixed-integer linear program, through PuLP, solved by
any solver that PuLP knows.

Built from the Problem alone; it shares no code with the CP-SAT formulation, the compact form or the
search, so that agreement means something. Bucket membership is a set partition over all buckets
that the caps allow, each with its exact price; order is linear ordering.

Sets      c, d        collectives;  h: the first member of a bucket
          B           columns: every collective alone and every bucket that the caps on bytes and
                      span, the data and the user's plan allow
          u, v, w     events: take (prologues and copy-in), start, wait, give (copy-out and
                      epilogue) of each c; compute nodes k; the output
          p, q        spots: steps inside an event
          a           pieces of memory: storages, and the buffers of the bucket of h
Variables lambda[B]   1 where B is launched
          b[c,d]      1 where c and d share a bucket
          o[u,v]      1 where u comes strictly before v; members of a bucket have their take, start
                      and wait at one place, and neither is then before the other
          t[u], e[u]  begin and end of u on the compute stream
          s[c], f[c]  begin and end of c on its group's stream
          alive[a,p]  1 where a is alive at p
          held[a,p]   bytes of a buffer alive at p

(1)   sum over B holding c of lambda[B] = 1;
        b[c,d] = sum over B holding both                                  ``order._membership``
(2)   o[u,v] + o[v,u] = 1 - tie[u,v];
        constants where the data or the plan decide                       ``order._pairs``
(3)   o[u,w] <= o[u,v] + o[v,w]                                           ``order._one_order``
(4)   prefetch: sum of lambda[B] <= o[k,start[h]]                         ``order._early_enough``
(5)   in flight:
        sum of output[c] (1 - o[start d,start c] - o[wait c,start d]) <= cap  ``order.in_flight``
(6)   e[u] >= t[u] + sum of work[B] lambda[B]                             ``timing._compute_stream``
(7)   t[v] >= e[u] - M (1 - o[u,v]),
        M = latest end of u - earliest begin of v                         ``timing._compute_stream``
(8)   s[c] >= e[start c]; f[c] >= s[c] + sum of T[B] lambda[B]            ``timing._transfers``
(9)   s[d] >= f[c] - M (1 - o[start c,start d]) on one stream             ``timing._transfers``
(10)  e[wait c] >= f[c] + epilogues                                       ``timing._transfers``
(11)  cut: between compute nodes j and k lies the work that must          ``timing._loads``
(12)  cut: between them lie the transfers of a stream that must           ``timing._loads``
(13)  alive[a,p] >= le(birth,p) + le(p,use) - 1 - (1 - condition)         ``memory._alive``
(14)  held[h,p] >= sum of bytes[B] lambda[B] - M (1 - alive[h,p])         ``memory._held``
(15)  peak >= kept + sum of bytes alive[a,p] + sum of held[h,p],
        peak <= cap                                                       ``memory.add_memory``
(16)  no-good: refuse an order that only the solver's tolerances allow    ``model._refuse``
(17)  windows: o[u,v] = 0 where u would end after v must begin            ``time_windows.windows``

le(p,q) says that p is not after q: 1 - o[q,p], or where p is the later step of one event, o[p,q].
The model bounds memory only at steps where something is born: at any other step there are no more
bytes alive than at the step before it.

Objectives, each with those before it held: step >= t[output], f[c]; peak; sum of lambda[B]. The
horizon is the step time of the best present schedule, which tightens every M and decides orders.
Where a schedule is known, from an earlier objective or the caller, the model asks for a better one;
the proof is that there is none.

Numbers: ticks and bytes are scaled so that none in a row exceeds 10 000, since the tolerances of
solvers are absolute. Only the order in the solution counts: it is made a schedule, verified, and
scored by ``simulate``. The bound is lowered by a share of 1e-7 of the horizon, which the tolerances
may hide, and then rounded up to a tick.
"""

import math
from dataclasses import dataclass

import pulp

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, as_captured
from apsched.schedule.simulate import Timeline, simulate
from apsched.schedule.verify import verify
from apsched.solver.milp.engine import CBC, Engine, MilpStatus
from apsched.solver.milp.events import Events, create_events
from apsched.solver.milp.extract import schedule_of, sequential_ticks
from apsched.solver.milp.memory import add_memory, byte_scale
from apsched.solver.milp.order import Order, create_order, in_flight
from apsched.solver.milp.timing import Clock, add_time

_TOLERANCE = 1e-7
"""Share of the horizon that the solver's tolerances may hide: the bound is lowered by as much
before it is rounded up.
"""
_MOST_REFUSALS = 50
"""Orders that the solver's tolerances let through and exact figures refuse, in one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpResult:
    """The result of the MILP."""

    status: MilpStatus
    """``optimal`` (all three objectives proven), ``feasible``, ``infeasible`` or ``unknown`` (out
    of time, nothing found).
    """
    schedule: Schedule | None
    step_time_ticks: int | None
    peak_memory_bytes: int | None
    num_launches: int | None
    bound_ticks: int
    """No schedule within the caps is faster; rounded so that the solver's tolerances cannot lift it
    above the optimum.
    """
    proven: tuple[bool, bool, bool]
    """Step time, peak and launches proven, up to the solver's tolerances."""
    solver_name: str
    num_rows: int


def solve_milp(
    problem: Problem,
    caps: Caps,
    *,
    solver_name: str = CBC,
    time_limit_s: float | None = None,
    known: Schedule | None = None,
) -> MilpResult:
    """Return the least step time within ``caps``, at that the least peak, at that the fewest
    launches.

    ``solver_name`` is a name that PuLP knows; ``time_limit_s`` limits the seconds of all solves
    together; ``known`` is a schedule to start from, which is the answer where nothing is better.
    Raises InputError where the solver is unknown or not installed, and where ``problem`` is too
    large for the formulation.
    """
    return _Milp(problem, caps, Engine(solver_name, time_limit_s), known).solve()


class _Milp:
    def __init__(
        self, problem: Problem, caps: Caps, engine: Engine, known: Schedule | None
    ) -> None:
        self.problem, self.caps, self.engine = problem, caps, engine
        self.events: Events = create_events(problem, caps)
        self.byte_scale, self.whole_bytes = byte_scale(self.events)
        self.best: tuple[Schedule, Timeline] | None = None
        if known is not None and not verify(problem, known, caps):
            self.best = known, simulate(problem, known)
        self.refusals = 0
        self.captured_fits = not verify(problem, as_captured(problem.num_nodes), caps)
        self._build(self._horizon())

    def _horizon(self) -> int:
        """Return the longest allowed step time: less than the known schedule's, no more than that
        of the order as captured.
        """
        captured = as_captured(self.problem.num_nodes)
        reached = (
            simulate(self.problem, captured).step_time_ticks
            if self.captured_fits
            else sequential_ticks(self.problem)
        )
        return reached if self.best is None else min(reached, self.best[1].step_time_ticks - 1)

    def _build(self, horizon_ticks: int) -> None:
        """Build the model of the schedules that take at most ``horizon_ticks``."""
        self.model = pulp.LpProblem("apsched", pulp.LpMinimize)
        self.order: Order = create_order(self.events, self.model)
        in_flight(self.order)
        self.clock: Clock = add_time(self.order, horizon_ticks)
        self.margin_ticks = _TOLERANCE * horizon_ticks
        self.peak: pulp.LpVariable | None = None
        if self.caps.memory_cap_bytes is not None:
            self._limit(self._peak() * 1, self.caps.memory_cap_bytes, self.byte_scale)

    def solve(self) -> MilpResult:
        known = self.best is not None
        bound_ticks, status = self._relaxed_bound()
        if status is not MilpStatus.INFEASIBLE:
            status, bound = self._minimize(self.clock.step * 1, self.clock.scale)
            if math.isfinite(bound):
                bound_ticks = max(bound_ticks, math.ceil(bound - self.margin_ticks))
        if self.best is None:
            found = MilpStatus.UNKNOWN  # where the order as captured fits, tolerances say so
            if status is MilpStatus.INFEASIBLE and not self.captured_fits:
                found = MilpStatus.INFEASIBLE
            return self._result(found, bound_ticks, (False, False, False))
        none_better = known and status is MilpStatus.INFEASIBLE
        proven = [status is MilpStatus.OPTIMAL or none_better, False, False]
        if none_better:
            bound_ticks = math.ceil(self.best[1].step_time_ticks - self.margin_ticks)
        if proven[0]:
            self._build(self.best[1].step_time_ticks)
            proven[1] = self._improve(
                self._peak() * 1, self.best[1].peak_memory_bytes, self.byte_scale
            )
        if proven[1]:
            self._build(self.best[1].step_time_ticks)
            self._limit(self._peak() * 1, self.best[1].peak_memory_bytes, self.byte_scale)
            proven[2] = self._improve(pulp.lpSum(self.order.chosen), self.best[1].num_launches, 1.0)
        bound_ticks = min(bound_ticks, self.best[1].step_time_ticks)
        found = MilpStatus.OPTIMAL if all(proven) else MilpStatus.FEASIBLE
        return self._result(found, bound_ticks, (proven[0], proven[1], proven[2]))

    def _improve(self, objective: pulp.LpAffineExpression, reached: int, scale: float) -> bool:
        """Look for less than ``reached`` bytes or launches; return whether ``best`` is then
        proven.
        """
        self._limit(objective, reached - 1, scale)
        status, _ = self._minimize(objective, scale)
        return status in (MilpStatus.OPTIMAL, MilpStatus.INFEASIBLE)

    def _peak(self) -> pulp.LpVariable:
        """Return the peak; its rows join the model on first use."""
        if self.peak is None:
            self.peak = add_memory(self.order, self.byte_scale, self.whole_bytes)
        return self.peak

    def _limit(self, objective: pulp.LpAffineExpression, value: int, scale: float) -> None:
        self.model += objective <= (value + 0.5) / scale

    def _relaxed_bound(self) -> tuple[int, MilpStatus]:
        """Return the bound of the linear relaxation, or of the longest path where it has none in
        time, in ticks, and its status.
        """
        path = max(self.clock.windows.earliest_end)
        if not self.clock.windows.possible:
            return path, MilpStatus.INFEASIBLE
        self.model.setObjective(self.clock.step * 1)
        relaxed = self.engine.run(self.model, relaxed=True)
        if relaxed.status is not MilpStatus.OPTIMAL:
            return path, relaxed.status
        return (
            max(path, math.ceil(relaxed.bound * self.clock.scale - self.margin_ticks)),
            relaxed.status,
        )

    def _minimize(
        self, objective: pulp.LpAffineExpression, scale: float
    ) -> tuple[MilpStatus, float]:
        """Return the status and the bound in ticks, bytes or launches; ``best`` is then the best
        schedule so far.
        """
        self.model.setObjective(objective)
        while True:
            answer = self.engine.run(self.model)
            bound = answer.bound * scale
            if answer.status not in (MilpStatus.OPTIMAL, MilpStatus.FEASIBLE):
                return answer.status, bound
            schedule = self._extract()
            if not verify(self.problem, schedule, self.caps):
                timeline = simulate(self.problem, schedule)
                if self.best is None or _value(timeline) <= _value(self.best[1]):
                    self.best = schedule, timeline
                    return answer.status, bound
            self.refusals += 1
            if self.refusals > _MOST_REFUSALS:
                return MilpStatus.UNKNOWN, bound
            self._refuse()

    def _refuse(self) -> None:
        """(16) no-good: the solver's tolerances let an order through that is over a limit; some
        binary must differ.
        """
        self.model += pulp.lpSum(1 - x if x.value() > 0.5 else x for x in self.order.binaries) >= 1

    def _extract(self) -> Schedule:
        events, order = self.events, self.order
        position = [
            sum(
                round(pulp.value(order.before(v, u)) or 0)
                for v in range(events.num_events)
                if v != u
            )
            for u in range(events.num_events)
        ]
        chosen = [
            column.members
            for column, x in zip(events.columns, order.chosen, strict=True)
            if x.value() > 0.5
        ]
        return schedule_of(events, [members for members in chosen if len(members) > 1], position)

    def _result(
        self, status: MilpStatus, bound_ticks: int, proven: tuple[bool, bool, bool]
    ) -> MilpResult:
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
            num_rows=self.model.numConstraints(),
        )


def _value(timeline: Timeline) -> tuple[int, int, int]:
    return timeline.step_time_ticks, timeline.peak_memory_bytes, timeline.num_launches
