"""Many memory caps on one problem, for less than a solve each: results under some caps are used
under all others.

A schedule with peak p is one under every cap >= p, and no schedule under a cap is faster than a
bound proven for a looser one. So under a cap between two that were solved only a short search is
left to do: the buckets of the schedules known, laid out again under this cap, and moves from the
best of them on. The answer is exact and checked as any other; its bound is that of the looser cap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored, SolvedBy, SolveResult
from apsched.schedule.schedule import Schedule, StepKind
from apsched.schedule.score import score
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import over_memory
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.arrays.relaxed import without_places
from apsched.solver.arrays.reordered import Orders, may_move
from apsched.solver.baselines import baselines
from apsched.solver.bounds.memory_and_launches import later_bounds
from apsched.solver.compute_move_cap import moving_where_it_pays
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.late_waits import late_waits
from apsched.solver.search.local_search import Search, policies
from apsched.solver.suggestions import labels_of

_EVALUATIONS_PER_WORK = 25
"""Evaluations under one cap per unit of work in the budget: an eighth of those of a solve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The proofs about a problem that hold under a looser cap, or under any cap."""

    bound_ticks: int
    bound_source: str
    floor_memory_bytes: int
    floor_bound_bytes: int


class AlongCaps:
    """One problem under one memory cap after another; the other caps stay."""

    def __init__(self, problem: Problem, caps: Caps, options: SolveOptions) -> None:
        self._problem, self._options = problem, options
        self._caps = replace(caps, memory_cap_bytes=None)
        self._instance = Instance.of(problem, self._caps)
        self._orders = Orders(self._instance) if may_move(problem, caps) else None
        self._stays = moving_where_it_pays(problem, caps).max_compute_move == 0
        self._made = baselines(self._instance)
        self._timelines = {made.name: simulate(problem, made.schedule) for made in self._made}
        self._scored: dict[Schedule, Scored] = {}

    def at(
        self, memory_cap_bytes: int | None, starts: Sequence[Schedule], known: Known
    ) -> SolveResult:
        """Return the answer under a cap that one of ``starts``, at least, keeps."""
        caps = replace(self._caps, memory_cap_bytes=memory_cap_bytes)
        made = tuple(self._judged(baseline, memory_cap_bytes) for baseline in self._made)
        scored = (self._score(start) for start in starts)
        fitting = [
            s
            for s in (*scored, *made)
            if s.fits and (memory_cap_bytes is None or s.peak_memory_bytes <= memory_cap_bytes)
        ]
        assert fitting, "no schedule to start from keeps the cap"
        best = min(fitting, key=_value)
        solved_by: str = SolvedBy.ANOTHER_CAP if best.name == "apsched" else best.name
        if (found := self._searched(caps, starts, known, best)) is not None and _value(
            found
        ) < _value(best):
            best, solved_by = found, SolvedBy.ALONG_CAPS
        places = self._instance.arrays
        if self._caps.max_compute_move != 0:
            places = without_places(places)
        later = later_bounds(
            replace(self._instance, arrays=places, caps=caps),
            best,
            best.step_time_ticks,
            known.floor_bound_bytes,
        )
        return SolveResult.found(
            best,
            bound_ticks=known.bound_ticks,
            bound_source=known.bound_source,
            baselines=made,
            floor_memory_bytes=known.floor_memory_bytes,
            floor_bound_bytes=known.floor_bound_bytes,
            fastest_ticks=best.step_time_ticks,
            time_limit_ticks=later.limit_ticks,
            peak_bound_bytes=later.peak_bytes,
            launches_bound=later.launches,
            solved_by=solved_by,
        )

    def _score(self, schedule: Schedule) -> Scored:
        """Return a schedule that comes back at several caps, judged without a memory cap."""
        if schedule not in self._scored:
            self._scored[schedule] = score(self._problem, "apsched", schedule, self._caps)
        return self._scored[schedule]

    def _judged(self, baseline: Scored, memory_cap_bytes: int | None) -> Scored:
        """Return ``baseline``, scored without a memory cap, with its violations of this one."""
        only = Caps(memory_cap_bytes=memory_cap_bytes)
        more = over_memory(self._problem, baseline.schedule, self._timelines[baseline.name], only)
        return replace(baseline, violations=(*baseline.violations, *more)) if more else baseline

    def _searched(
        self, caps: Caps, starts: Sequence[Schedule], known: Known, best: Scored
    ) -> Scored | None:
        """Return the result of a short search from the buckets of ``starts``, around the compute
        order of the best, and where compute stays as captured but for short memory, around that.
        """
        is_near = best.step_time_ticks <= self._enough(known)
        if is_near or not self._problem.collectives or not self._evaluations:
            return None
        orders = [self._around(best.schedule)]
        if self._stays and orders[0] is not self._instance:
            orders.append(self._instance)
        found = [self._searched_around(one.within(caps), starts, known, best) for one in orders]
        return min((scored for scored in found if scored is not None), key=_value, default=None)

    def _searched_around(
        self, instance: Instance, starts: Sequence[Schedule], known: Known, best: Scored
    ) -> Scored | None:
        """Return the result of a short search around the compute order of ``instance``."""
        search = Search(
            instance=instance,
            report=lambda stage, ticks: None,
            max_evaluations=self._evaluations,
            floor_bytes=known.floor_memory_bytes,
        )
        for labels in _distinct(
            tuple(labels_of(self._problem, start) for start in (best.schedule, *starts))
        ):
            for policy in policies(instance.arrays):
                for steer in (None, known.floor_memory_bytes):
                    if search.evaluations < self._evaluations:
                        search.consider(search.evaluate(labels, policy, steer))
        if search.best is None:
            return None
        search.descend(self._enough(known))
        return score(
            self._problem,
            "apsched",
            expand(instance, late_waits(instance, search.program())),
            instance.caps,
        )

    @property
    def _evaluations(self) -> int:
        """How many evaluations a search takes at most."""
        return int(self._options.budget * _EVALUATIONS_PER_WORK)

    def _enough(self, known: Known) -> int:
        """Return the step time at which a search stops."""
        return int(known.bound_ticks * (1 + self._options.time_slack / 2))

    def _around(self, schedule: Schedule) -> Instance:
        """Return the problem with its compute in the order of ``schedule``, which may part blocks
        where it merges chains.
        """
        if self._orders is None:
            return self._instance
        place = {node: k for k, node in enumerate(self._problem.compute_order)}
        compute_order = [
            place[s.index] for s in schedule.steps if s.kind is StepKind.NODE and s.index in place
        ]
        if compute_order == sorted(compute_order):
            return self._instance
        return self._orders.in_order(np.array(compute_order, dtype=np.int64))


def _distinct(all_labels: Sequence[Ints]) -> list[Ints]:
    return list({labels.tobytes(): labels for labels in all_labels}.values())


def _value(scored: Scored) -> tuple[int, int, int]:
    return scored.step_time_ticks, scored.peak_memory_bytes, scored.num_launches
