"""The caps that clash, and the least value of each alone: decided by construction, by bounds, and,
on small problems, by the whole model.
"""

from dataclasses import replace
from functools import cached_property
from itertools import combinations

from apsched.config import Caps, SolveOptions
from apsched.options_table import CLASHING_CAPS
from apsched.problem.problem import Problem
from apsched.schedule.analysis.usage import Chosen, chosen
from apsched.schedule.result import Relaxation, Scored
from apsched.schedule.schedule import Schedule, as_captured
from apsched.schedule.score import score
from apsched.schedule.simulate import simulate
from apsched.solver.arrays.floated import normal_form_is_all
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders, may_move
from apsched.solver.bounds.any_order.memory import memory_bound_of_any_order
from apsched.solver.bounds.step_time import memory_bound
from apsched.solver.cpsat.model import ExactModel
from apsched.solver.infeasible.clashing_plan import plan_clashes
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.lower_peak import lower_peak
from apsched.solver.reorder.min_memory import (
    floated_model,
    horizon_ticks,
    is_small,
    least_memory,
)
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.search.just_in_time import just_in_time

_ON_BUCKETS = ("max_topo_span", "bucket_cap_bytes")
"""Every collective may be alone: these rarely clash with anything."""
_EXACT_WORK = 2.0
"""Deterministic work of one decision by the whole model, at most."""
_MOST_UNDECIDED = 8
"""Values of a cap that may stay undecided before a bisection stops."""

Clash = tuple[str, ...]


class FeasibilityOracle:
    """Says of caps whether a schedule keeps them, and remembers."""

    def __init__(self, instance: Instance, options: SolveOptions) -> None:
        self.instance, self.problem = instance, instance.problem
        self.options = replace(options, budget=min(options.budget, _EXACT_WORK))
        self.largest = max((c.output_bytes for c in instance.problem.collectives), default=0)
        self._known: dict[Caps, tuple[bool | None, Scored | None]] = {}

    def __call__(self, caps: Caps) -> tuple[bool | None, Scored | None]:
        """Return whether ``caps`` can be kept, ``None`` where that is open, and a schedule that
        keeps them.
        """
        if caps not in self._known:
            self._known[caps] = self._decide(caps)
        return self._known[caps]

    def _decide(self, caps: Caps) -> tuple[bool | None, Scored | None]:
        moves = may_move(self.problem, caps)
        if caps.memory_cap_bytes is not None and caps.memory_cap_bytes < self._memory_bound(caps):
            return False, None
        if caps.in_flight_cap_bytes is not None and caps.in_flight_cap_bytes < self.largest:
            return False, None  # alone, a collective has all of its output in flight
        if plan_clashes(self.problem, caps):
            return False, None
        floor = just_in_time(self.instance.within(caps))
        made = [] if floor is None else [expand(self.instance, floor.program)]
        if moves and caps.memory_cap_bytes is not None:
            made += self._with_compute_moved(caps, caps.memory_cap_bytes)
        for schedule in (*made, as_captured(self.problem.num_nodes)):
            scored = score(self.problem, "", schedule, caps)
            if scored.fits:
                return True, scored
        orders = self._mover.orders if moves else None
        if not is_small(self.problem, orders):
            return None, None
        horizon = horizon_ticks(self.instance)
        exact = ExactModel(self.instance.within(caps), horizon, orders=orders).any_schedule(
            self.options
        )
        if exact.program is not None:
            ordered = self.instance if orders is None else orders.in_order(exact.order)
            return True, score(self.problem, "", expand(ordered, exact.program), caps)
        if exact.infeasible and not normal_form_is_all(self.problem, caps):
            model = floated_model(self.instance.within(caps))
            if model is None:
                return None, None
            exact = model.any_schedule(self.options)
        return False if exact.infeasible else None, None

    def _memory_bound(self, caps: Caps) -> int:
        if caps.max_compute_move == 0:
            return memory_bound(self.instance.arrays)
        return memory_bound_of_any_order(self._orders, caps.max_compute_move)

    def _with_compute_moved(self, caps: Caps, enough_bytes: int) -> list[Schedule]:
        lower = lower_peak(self._mover, replace(caps, memory_cap_bytes=None), enough_bytes)
        if not lower:
            return []
        moved = self._mover.moved(lower[-1].blocks).within(caps)
        floor = just_in_time(moved)
        return [] if floor is None else [expand(moved, floor.program)]

    @cached_property
    def _orders(self) -> Orders:
        return Orders(self.instance)

    @cached_property
    def _mover(self) -> ComputeMover:
        return ComputeMover(self.instance)


def stated(caps: Caps) -> tuple[str, ...]:
    """Return the names of the caps that are set."""
    return tuple(name for name in CLASHING_CAPS if getattr(caps, name) is not None)


def clashes(oracle: FeasibilityOracle, caps: Caps) -> tuple[tuple[Clash, ...], bool]:
    """Return all minimal sets of caps that no schedule keeps together, and whether that is proven.

    Where nothing is proven: the one set of those caps without any one of which the others can be
    kept; where there are none, of those without which they might, for all that is known.
    """
    names = stated(caps)
    found: list[Clash] = []
    for size in range(1, len(names) + 1):
        for some in combinations(names, size):
            if (
                not any(set(clash) <= set(some) for clash in found)
                and oracle(_only(caps, some))[0] is False
            ):
                found.append(some)
    if found or not names:  # without caps only a plan can be at fault
        return tuple(found), bool(found)
    without = {name: oracle(replace(caps, **{name: None}))[0] for name in names}
    matter = tuple(name for name in names if without[name]) or tuple(
        name for name in names if without[name] is None and name not in _ON_BUCKETS
    )
    return ((matter or names),), False


def relaxations(
    oracle: FeasibilityOracle,
    caps: Caps,
    found: tuple[Clash, ...],
    proven: bool,
    options: SolveOptions,
) -> tuple[Relaxation, ...]:
    """Return for each cap that clashes its least value, without the caps of clashes that it has
    no part in.
    """
    result = []
    for name in dict.fromkeys(name for clash in found for name in clash):
        lifted, gives_way = _lifted(found, name)
        others = replace(caps, **dict.fromkeys(lifted))
        bound = getattr(caps, name) + 1 if proven and gives_way else 0
        if name == "memory_cap_bytes":
            least: int | None
            least, floor_bound = least_memory(oracle.problem, others, options)
            if not oracle(replace(others, memory_cap_bytes=least))[0]:
                least = None
            bound = max(bound, floor_bound)
        else:
            least, bound = _bisect(oracle, others, name, bound)
        result.append(
            Relaxation(
                cap=name, stated=getattr(caps, name), least=least, bound=bound, lifted=lifted
            )
        )
    return tuple(result)


def _lifted(found: tuple[Clash, ...], name: str) -> tuple[tuple[str, ...], bool]:
    """Return the caps that are lifted to see the least value of cap ``name``, so that no clash
    without it is left; and whether one with it is left, so that it must be relaxed at all.

    Of each clash without it, the caps are lifted that it does not clash with, if there are any.
    """
    own = [set(clash) for clash in found if name in clash]
    near = set[str]().union(*own)
    lifted: dict[str, None] = {}
    for clash in found:
        if name not in clash:
            lifted |= dict.fromkeys([other for other in clash if other not in near] or clash)
    return tuple(lifted), any(clash.isdisjoint(lifted) for clash in own)


def _bisect(oracle: FeasibilityOracle, caps: Caps, name: str, bound: int) -> tuple[int | None, int]:
    """Return the least value of cap ``name`` with a known schedule, and the least that is not
    proven impossible.
    """
    if name == "in_flight_cap_bytes":
        bound = max(bound, oracle.largest)
    bound = max(
        [bound, *(clash.least for clash in plan_clashes(oracle.problem, caps) if clash.cap == name)]
    )
    kept, scored = oracle(replace(caps, **{name: None}))
    if not kept or scored is None:
        return None, bound
    least = _used(oracle.problem, name, scored)
    low, undecided = bound, 0
    while low < least and undecided < _MOST_UNDECIDED:
        middle = (low + least) // 2
        kept, scored = oracle(replace(caps, **{name: middle}))
        if kept and scored is not None:
            least = min(middle, _used(oracle.problem, name, scored))
        else:
            low = middle + 1
            undecided += kept is None
            bound = low if kept is False and not undecided else bound
    return least, min(bound, least)


def _used(problem: Problem, name: str, scored: Scored) -> int:
    """Return the use by a schedule of the resource that cap ``name`` limits."""
    uses: Chosen = chosen(problem, scored.schedule, simulate(problem, scored.schedule))
    return {
        "in_flight_cap_bytes": uses.in_flight_bytes,
        "max_prefetch": uses.prefetch,
        "max_topo_span": uses.topo_span,
        "bucket_cap_bytes": uses.bucket_bytes,
    }[name]


def _only(caps: Caps, names: tuple[str, ...]) -> Caps:
    return Caps(
        max_compute_move=caps.max_compute_move, **{name: getattr(caps, name) for name in names}
    )
