"""The whole formulation of a problem, objective after objective: runs of CP-SAT, each from the best
schedule so far.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from apsched.config import SolveOptions
from apsched.schedule.result import Scored
from apsched.schedule.score import score
from apsched.solver.answer import Hint
from apsched.solver.arrays.instance import Instance
from apsched.solver.cpsat.model import Exact, ExactModel
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.min_memory import horizon_ticks
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.search.decoder import BudgetUse

_RUNS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Shares of the budget of an objective: CP-SAT begins again with twice the work while that moves
the answer or its bound.
"""
_MOVED = 1e-3
"""Share of the objective from which a move counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective of the whole formulation, and its value for a schedule."""

    minimize: Callable[..., Exact]
    value: Callable[[Scored], int]


class Formulation:
    """The whole formulation of ``instance``; with ``mover``, the order of the compute included.
    Its work counts as ``use`` of the budget.
    """

    def __init__(
        self,
        instance: Instance,
        mover: ComputeMover | None,
        options: SolveOptions,
        use: BudgetUse,
    ) -> None:
        self.instance, self.options = instance, options
        self.orders = mover.orders if mover is not None else None
        self.model = ExactModel(instance, horizon_ticks(instance), orders=self.orders)
        self.use, self.deterministic_work, self.gained = use, 0.0, False
        self.step_time = Objective(
            minimize=self.model.minimize_step_time, value=lambda s: s.step_time_ticks
        )
        self.peak = Objective(
            minimize=self.model.minimize_peak,
            value=lambda s: s.peak_memory_bytes - instance.arrays.kept_bytes,
        )
        self.launches = Objective(
            minimize=self.model.minimize_launches, value=lambda s: s.num_launches
        )

    def minimized(
        self, objective: Objective, start: Hint | None, bound: int = 0
    ) -> tuple[Hint | None, int]:
        """Return the best schedule found from ``start``, and the bound, at least ``bound``."""
        best, value = start, None if start is None else objective.value(self.scored(start))
        for k, share in enumerate(_RUNS):
            exact, found = self._run(objective, share, best)
            before = value, bound
            bound = max(bound, exact.bound)
            if found is not None:
                new = objective.value(self.scored(found))
                if value is None or new < value:
                    best, value, self.gained = found, new, True
            if exact.optimal or exact.infeasible or (value is not None and value <= bound):
                break
            if k > 0 and not _is_moved(before, (value, bound)):
                break
        return best, bound

    def improved(self, objective: Objective, start: Hint, bound: int = 0) -> tuple[Hint, int]:
        """Return the best schedule from ``start``, which is never worse, and the bound."""
        best, bound = self.minimized(objective, start, bound)
        return best or start, bound

    def _run(
        self, objective: Objective, share: float, start: Hint | None
    ) -> tuple[Exact, Hint | None]:
        """Return the result of one run of CP-SAT with a share of the budget."""
        program, order = (start.program, start.order) if start is not None else (None, None)
        options = replace(self.options, budget=self.options.budget * share)
        exact = objective.minimize(options, program, order)
        self.deterministic_work += exact.deterministic_work
        self.use.done += exact.deterministic_work
        if exact.program is None:
            return exact, None
        return exact, Hint(program=exact.program, order=exact.order if self.orders else None)

    def moved(self, hint: Hint) -> Instance:
        """Return the instance in the order of ``hint``."""
        if self.orders is None or hint.order is None:
            return self.instance
        return self.orders.in_order(hint.order)

    def scored(self, hint: Hint) -> Scored:
        """Return the schedule of ``hint`` with its figures."""
        schedule = expand(self.moved(hint), hint.program)
        return score(self.instance.problem, "", schedule, self.instance.caps)


def _is_moved(before: tuple[int | None, int], now: tuple[int | None, int]) -> bool:
    """Return whether a run of CP-SAT moved the objective or its bound."""
    (value_before, bound_before), (value, bound) = before, now
    if value is None or value_before is None:
        return value is not value_before
    least_move = _MOVED * value
    return value_before - value > least_move or bound - bound_before > least_move
