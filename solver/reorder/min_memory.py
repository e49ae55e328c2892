"""The least peak that the caps allow, and which problems are small enough for the whole
formulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule
from apsched.schedule.score import score
from apsched.solver.arrays.floated import floated, normal_form_is_all
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.arrays.reordered import Orders, may_move
from apsched.solver.bounds.any_order.memory import memory_bound_of_any_order
from apsched.solver.bounds.step_time import memory_bound
from apsched.solver.cpsat.model import ExactModel
from apsched.solver.program.program import Program
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.lower_peak import Lowered, lower_peak
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.search.just_in_time import just_in_time, without_caps_on_launches
from apsched.units import ALLOCATION_BYTES

_SMALL_LITERALS = 6_000
"""Order literals up to which the whole problem goes to CP-SAT."""
_LEAST_COLLECTIVES = 8
"""Fewer count as these: presolve takes seconds for hundreds of compute nodes even then."""
_SMALL_PAIRS = 1_500
"""Pairs of blocks of compute up to which CP-SAT decides their order: with some thousands presolve
alone takes seconds, for each of dozens of runs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """How little memory is needed."""

    peak_bytes: int
    """The least peak for which a schedule is known."""
    bound_bytes: int
    """No schedule has a lower peak."""
    as_captured_bytes: int
    """The least peak for which a schedule is known with the compute in its order."""
    as_captured: Program | None
    """That schedule; None where it does not keep the other caps."""
    lowered: tuple[Lowered, ...] = ()
    """Orders of the compute with lower and lower peaks."""

    def lowered_within(self, cap_bytes: int | None) -> Lowered | None:
        """Return the first of the orders whose peak is within ``cap_bytes``, the lowest if none
        is; None for the order as captured.
        """
        if cap_bytes is None or cap_bytes >= self.as_captured_bytes or not self.lowered:
            return None
        return next(
            (lower for lower in self.lowered if lower.peak_bytes <= cap_bytes), self.lowered[-1]
        )


def least_memory(
    problem: Problem, caps: Caps | None = None, options: SolveOptions | None = None
) -> tuple[int, int]:
    """Return the least peak for which a schedule is known, with the other caps as in ``caps``, and
    a proven lower bound on it, in bytes.

    Where no known schedule keeps the other caps, those on bytes in flight and on prefetch are left
    out.
    """
    instance = Instance.of(problem, caps)
    mover = ComputeMover(instance) if may_move(problem, instance.caps) else None
    found = least_memory_with(instance, mover, options or SolveOptions())
    return found.peak_bytes, found.bound_bytes


def schedule_of_least_memory(
    problem: Problem, caps: Caps, options: SolveOptions | None = None
) -> Schedule | None:
    """Return the schedule with the least peak that is known, with the other caps as in ``caps``;
    ``None`` where none keeps those.
    """
    instance = Instance.of(problem, caps)
    mover = ComputeMover(instance) if may_move(problem, caps) else None
    found = least_memory_with(instance, mover, options or SolveOptions())
    lower = (
        found.lowered[-1]
        if mover is not None and found.peak_bytes < found.as_captured_bytes
        else None
    )
    if mover is None or lower is None:
        return None if found.as_captured is None else expand(instance, found.as_captured)
    reordered = mover.moved(lower.blocks)
    if lower.program is not None:
        return expand(reordered, lower.program)
    least = just_in_time(reordered.without_memory_cap())
    return None if least is None else expand(reordered, least.program)


def least_memory_with(
    instance: Instance,
    mover: ComputeMover | None,
    options: SolveOptions,
) -> LeastMemory:
    """As :func:`least_memory`; with a ``mover`` where compute may move."""
    instance = instance.without_memory_cap()
    least, bound, program = _as_captured(instance, options)
    whole = normal_form_is_all(instance.problem, instance.caps)
    if mover is None:
        if not whole:
            bound = _bound_where_floated(instance, options, least)
        return LeastMemory(
            peak_bytes=least, bound_bytes=bound, as_captured_bytes=least, as_captured=program
        )
    bound = min(memory_bound_of_any_order(mover.orders, instance.caps.max_compute_move), least)
    lowered = lower_peak(mover, instance.caps, bound)
    lowest = min((least, *(lower.peak_bytes for lower in lowered)))
    if bound < lowest and is_small(instance.problem, mover.orders):
        model = ExactModel(instance, horizon_ticks(instance), orders=mover.orders)
        kept_bytes = instance.arrays.kept_bytes
        model.limit_peak(lowest - kept_bytes - ALLOCATION_BYTES)  # lower than known, or proven
        exact = model.minimize_peak(options, *_least_known(mover, lowered, program))
        if whole:
            least_else = lowest if exact.infeasible else exact.bound + kept_bytes
            bound = max(bound, min(least_else, lowest))
        if exact.program is not None:
            ordered = mover.orders.in_order(exact.order)
            peak = score(
                ordered.problem, "floor", expand(ordered, exact.program), instance.caps
            ).peak_memory_bytes
            if peak < lowest:
                lowest, lowered = (
                    peak,
                    (
                        *lowered,
                        Lowered(
                            blocks=mover.orders.blocks_of(exact.order),
                            peak_bytes=peak,
                            program=exact.program,
                        ),
                    ),
                )
    if not whole:
        bound = _bound_where_floated(instance, options, lowest)
    return LeastMemory(
        peak_bytes=lowest,
        bound_bytes=bound,
        as_captured_bytes=least,
        as_captured=program,
        lowered=lowered,
    )


def _least_known(
    mover: ComputeMover, lowered: Sequence[Lowered], as_captured: Program | None
) -> tuple[Program | None, Ints | None]:
    """Return the schedule with the least peak that is known, and the order of its compute."""
    if not lowered:
        return as_captured, None
    blocks, program = lowered[-1].blocks, lowered[-1].program
    if program is None:
        least = just_in_time(mover.moved(blocks).without_memory_cap())
        program = None if least is None else least.program
    return program, mover.compute_order(blocks)


def _bound_where_floated(instance: Instance, options: SolveOptions, known_bytes: int) -> int:
    """Return the bound on the peak of all schedules, those out of normal form included."""
    bound = (
        memory_bound(instance.arrays)
        if instance.caps.max_compute_move == 0
        else memory_bound_of_any_order(Orders(instance), instance.caps.max_compute_move)
    )
    if bound < known_bytes and (model := floated_model(instance)) is not None:
        exact = model.minimize_peak(options, None)
        bound = max(bound, exact.bound + instance.arrays.kept_bytes)
    return min(bound, known_bytes)


def floated_model(instance: Instance) -> ExactModel | None:
    """Return the whole formulation of a relaxation: its bounds hold for all schedules of
    ``instance``, and where it has none ``instance`` has none; ``None`` where it is too large.
    """
    if not is_small(instance.problem):  # before orders are made of a large one
        return None
    relaxed = floated(instance)
    orders = Orders(relaxed)
    if not is_small(instance.problem, orders):
        return None
    return ExactModel(relaxed, horizon_ticks(instance), orders=orders, is_relaxation=True)


def _as_captured(instance: Instance, options: SolveOptions) -> tuple[int, int, Program | None]:
    problem = instance.problem
    known = just_in_time(instance)
    bound = memory_bound(instance.arrays)
    if known is not None and (known.peak_memory_bytes <= bound or not is_small(problem)):
        return known.peak_memory_bytes, min(bound, known.peak_memory_bytes), known.program
    if is_small(problem):
        exact = ExactModel(instance, horizon_ticks(instance)).minimize_peak(
            options, known.program if known else None
        )
        if exact.program is not None:
            peak = score(
                problem, "floor", expand(instance, exact.program), instance.caps
            ).peak_memory_bytes
            return peak, max(bound, exact.bound + instance.arrays.kept_bytes), exact.program
    lifted = known or just_in_time(instance.within(without_caps_on_launches(instance.caps)))
    assert lifted is not None  # it keeps every other cap
    return (
        lifted.peak_memory_bytes,
        min(bound, lifted.peak_memory_bytes),
        known.program if known is not None else None,
    )


def is_small(problem: Problem, orders: Orders | None = None) -> bool:
    """Whether the whole problem goes to CP-SAT; with ``orders`` where it decides the order of the
    compute, too.
    """
    units = 4 * max(len(problem.collectives), _LEAST_COLLECTIVES)
    if units * (units // 2 + len(problem.compute_order)) > _SMALL_LITERALS:
        return False
    return orders is None or orders.num_open_pairs(_SMALL_PAIRS) <= _SMALL_PAIRS


def horizon_ticks(instance: Instance) -> int:
    """Return a step time that some schedule of every partition keeps: everything one after the
    other, copies and all.
    """
    problem, small = instance.problem, instance.arrays
    transfers = sum(int(t) for t in small.transfer_ticks)
    pessimistic = sum(
        problem.keys[c.key].price(sum(d.size_bytes for d in problem.collectives))
        for c in problem.collectives
    )
    copies = sum(
        problem.copy_price(sum(d.copied_bytes for d in problem.collectives)) + int(t)
        for _, t in zip(problem.collectives, small.copy_out_ticks, strict=True)
    )
    launches = int(small.launch_ticks.sum() + small.bucket_launch_ticks.sum())
    pessimistic += int(small.member_ticks.sum())
    return sum(problem.duration_ticks) + transfers + pessimistic + copies + launches + 1
