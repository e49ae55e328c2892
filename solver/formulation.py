"""The whole formulation of a problem, objective after objective: runs of CP-SAT, each from the best
schedule so far.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
        """Return the best schedule found from ``start``, and the bound, at least ``bound``; CP-SAT
        does not run where ``start`` meets ``bound``.
        """
        value = None if start is None else objective.value(self.scored(start))
        if value is not None and value <= bound:
            return start, bound
        program, order = (start.program, start.order) if start is not None else (None, None)
        exact = objective.minimize(self.options, program, order)
        self.deterministic_work += exact.deterministic_work
        self.use.done += exact.deterministic_work
        bound = max(bound, exact.bound)
        if exact.program is None:
            return start, bound
        found = Hint(program=exact.program, order=exact.order if self.orders else None)
        if value is not None and objective.value(self.scored(found)) >= value:
            return start, bound
        self.gained = True
        return found, bound

    def improved(self, objective: Objective, start: Hint, bound: int = 0) -> tuple[Hint, int]:
        """Return the best schedule from ``start``, which is never worse, and the bound."""
        best, bound = self.minimized(objective, start, bound)
        return best or start, bound

    def moved(self, hint: Hint) -> Instance:
        """Return the instance in the order of ``hint``."""
        if self.orders is None or hint.order is None:
            return self.instance
        return self.orders.in_order(hint.order)

    def scored(self, hint: Hint) -> Scored:
        """Return the schedule of ``hint`` with its figures."""
        schedule = expand(self.moved(hint), hint.program)
        return score(self.instance.problem, "", schedule, self.instance.caps)
