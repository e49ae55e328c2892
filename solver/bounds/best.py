"""The bounds on step time, and the best of them.

A new bound goes to ``FIXED_ORDER`` if it is about the compute in its order and never rises where a
memory cap is looser, to ``fixed_order_bound`` if it may rise, and to ``ANY_ORDER`` if it is about
every order. Those under contention are in :mod:`apsched.solver.bounds.contention`, those of a whole
step in :mod:`apsched.solver.bounds.whole_step`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.relaxed import without_copies
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.bound import InAnyOrder, loose_program, weighed
from apsched.solver.bounds.any_order.chain import chain_bound, longest_way, on_path_of
from apsched.solver.bounds.any_order.compute_chain import compute_chain_bound
from apsched.solver.bounds.any_order.jobs import bounds_of, ends_of
from apsched.solver.bounds.any_order.last_reduction import Tail, tail_bound
from apsched.solver.bounds.any_order.two_chains import two_chains_bound
from apsched.solver.bounds.contention import shared_bound
from apsched.solver.bounds.launch_sequence import launch_sequence_bound
from apsched.solver.bounds.linear_program import costs_of, lp_bound
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.step_time import TimeBound, least_work, step_time_bound, work_bound
from apsched.solver.bounds.tighten import free_bytes, tighten

_BUSY = 0.6
"""Share of the best bound that the transfers of some stream take, from which on their buckets are
looked at.
"""
_AS_GOOD = 5e-4
"""Among bounds that differ by less than this share the first names the argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InOneOrder:
    """A problem as the bounds for one order of the compute see it."""

    loose: Instance
    """With copies for nothing where buckets may be coalesced."""
    forced: Instance
    """The same with the slots that the caps force."""


def _critical(at: InOneOrder) -> TimeBound:
    return step_time_bound(at.forced)


def _weighed(at: InOneOrder) -> TimeBound:
    return lp_bound(at.forced)


def _along_paths(at: InOneOrder) -> TimeBound:
    return path_bound(_for_paths(at))


FIXED_ORDER: tuple[Callable[[InOneOrder], TimeBound], ...] = (_critical, _weighed, _along_paths)
"""The bounds for one order of the compute that never rise where a memory cap is looser; of equal
ones the first is named.
"""


def _in_memory(at: InOneOrder) -> TimeBound | None:
    """Return the bound of paths with rows of memory, None without a cap. How near it comes to the
    best one depends on the cap.
    """
    instance = _for_paths(at)
    room = free_bytes(instance)
    return None if room is None else path_bound(instance, room=room)


def _for_paths(at: InOneOrder) -> Instance:
    """Return the instance with the forced slots, but for the needs of reductions: one that the caps
    have waited for sooner is still one.
    """
    arrays = replace(at.forced.arrays, need_slot=at.loose.arrays.need_slot)
    return replace(at.forced, arrays=arrays)


def _of_one_machine(at: InAnyOrder, _: int) -> Iterator[TimeBound]:
    yield from bounds_of(at.loose, at.ends)


def _of_all_work(at: InAnyOrder, _: int) -> Iterator[TimeBound]:
    arrays, everything = at.instance.arrays, np.arange(len(at.instance.arrays.kind))
    work = work_bound(at.instance, least_work(at.instance), everything)
    yield TimeBound(ticks=int(arrays.compute_ticks.sum()) + work, source=BoundSource.COMPUTE)


def _of_last_reduction(at: InAnyOrder, _: int) -> Iterator[TimeBound]:
    yield _tail(at).bound


def _tail(at: InAnyOrder) -> Tail:
    most = at.instance.caps.max_compute_move
    return tail_bound(at.instance.arrays, at.loose, at.ends, at.costs, most, at.way)


def _weighed_in_any_order(at: InAnyOrder, _: int) -> Iterator[TimeBound]:
    yield weighed(at)


def _along_chain(at: InAnyOrder, best_ticks: int) -> Iterator[TimeBound]:
    """Yield the bounds of chains where some stream is busy enough for them."""
    busy = max(np.bincount(at.loose.stream, weights=at.loose.work.load))
    if busy < _BUSY * best_ticks:
        return
    yield chain_bound(at.instance, at.loose, at.ends, at.way)
    if not len(on_path_of(at.loose, at.way)):
        yield compute_chain_bound(at.instance, at.loose, at.way)


def _of_two_chains(at: InAnyOrder, _: int) -> Iterator[TimeBound]:
    bound = two_chains_bound(at.instance, at.loose, at.ends)
    if bound is not None:
        yield bound


ANY_ORDER: tuple[Callable[[InAnyOrder, int], Iterator[TimeBound]], ...] = (
    _of_one_machine,
    _of_all_work,
    _of_last_reduction,
    _weighed_in_any_order,
    _of_two_chains,
    _along_chain,
)
"""The bounds for every order of the compute, those that need the best so far last."""


def best_bound(instance: Instance, orders: Orders | None) -> TimeBound:
    """Return the best bound that holds for ``instance``, or where there are ``orders``, for all of
    them.
    """
    bound = fixed_order_bound(instance) if orders is None else any_order_bound(instance, orders)
    if instance.problem.contention is None:
        return bound
    shared = shared_bound(instance, in_order=orders is None)
    return max(bound, shared, key=lambda b: b.ticks)


def search_bound(instance: Instance) -> TimeBound:
    """Return the bound near which a search around the compute in its order stops: of the bounds of
    that order those that never rise where a memory cap is looser, in a fraction of the time of all.
    """
    if not instance.problem.collectives:
        return _compute_only(instance)
    bound = _monotone(_in_one_order(instance))
    if instance.problem.contention is None:
        return bound
    return max(bound, shared_bound(instance, in_order=True), key=lambda b: b.ticks)


def fixed_order_bound(instance: Instance) -> TimeBound:
    """Return the best bound on schedules with the compute in its order, without contention."""
    if not instance.problem.collectives:
        return _compute_only(instance)
    at = _in_one_order(instance)
    monotone = _monotone(at)
    found = (_in_memory(at), launch_sequence_bound(_for_paths(at), monotone.ticks))
    best = max((b for b in found if b is not None), key=lambda b: b.ticks, default=monotone)
    if best.ticks <= monotone.ticks:
        return monotone
    return replace(best, monotone_ticks=monotone.ticks)


def _in_one_order(instance: Instance) -> InOneOrder:
    loose = without_copies(instance)
    return InOneOrder(loose=loose, forced=tighten(loose))


def _monotone(at: InOneOrder) -> TimeBound:
    return max((bound(at) for bound in FIXED_ORDER), key=lambda b: b.ticks)


def any_order_bound(instance: Instance, orders: Orders) -> TimeBound:
    """Return the best bound on schedules in which compute moves, without contention; ``instance``
    is as captured. Of several chains places count within a chain: the cap on moves bounds none.
    """
    if not instance.problem.collectives:
        return _compute_only(instance)
    at = _in_any_order(instance, orders)
    found: list[TimeBound] = []
    for bounds in ANY_ORDER:
        found += bounds(at, max((b.ticks for b in found), default=0))
    best = max(b.ticks for b in found)
    return TimeBound(
        ticks=best, source=next(b.source for b in found if b.ticks >= best * (1 - _AS_GOOD))
    )


def tail_in_any_order(instance: Instance, orders: Orders) -> Tail:
    """Return the bound of :func:`any_order_bound` that is about the last reduction, and the compute
    before it; ``instance`` has a collective.
    """
    return _tail(_in_any_order(instance, orders))


def _in_any_order(instance: Instance, orders: Orders) -> InAnyOrder:
    instance = without_copies(instance)
    if max(instance.problem.chains, default=0) > 0:
        instance = instance.within(replace(instance.caps, max_compute_move=None))
    costs = costs_of(instance)
    loose = loose_program(instance, orders, costs)
    ends = ends_of(loose, instance.caps.max_compute_move)
    way = longest_way(loose)
    return InAnyOrder(instance=instance, loose=loose, ends=ends, costs=costs, way=way)


def _compute_only(instance: Instance) -> TimeBound:
    return TimeBound(ticks=int(instance.arrays.compute_ticks.sum()), source=BoundSource.COMPUTE)
