"""A relaxation whose normal form leaves no schedule out.

Nodes that travel with a collective become ordinary compute, kernels split into their nodes, and the
places that the plan asks for are dropped; new dependences order compute nodes where the cap on
moves allows one order only. Every schedule of the problem that ``verify`` accepts is a schedule of
this relaxation, no slower, with no more bytes alive and as many launches. So bounds of the whole
formulation on it, and a proof that it has no schedule, hold for the problem.
"""

from dataclasses import replace

from apsched.config import Caps
from apsched.costs.price_curve import PriceCurve
from apsched.problem.problem import Collective, Problem
from apsched.solver.arrays.instance import Instance

_FREE = PriceCurve(size_bytes=(0, 1), price_ticks=(0, 0))


def normal_form_is_all(problem: Problem, caps: Caps) -> bool:
    """Whether each schedule has one in normal form that is as good: nothing travels, and where
    compute may move no kernel stays together and no place is asked for.
    """
    if problem.travels:
        return False
    return caps.max_compute_move == 0 or not (
        any(kernel >= 0 for kernel in problem.kernels) or asks_for_places(problem)
    )


def asks_for_places(problem: Problem) -> bool:
    """Whether a rule of the user's plan names places among the compute nodes."""
    return any(
        c.restriction.start_slots is not None or c.restriction.wait_slots is not None
        for c in problem.collectives
    )


def floated(instance: Instance) -> Instance:
    """Return the relaxation of ``instance``, under its own caps.

    A cast that a bucket leaves out takes no time and no memory. The cap on prefetch counts compute
    nodes. The relaxation has more of them by the nodes that travel, so the cap grows by their
    number; it has no cap on prefetch if there is an epilogue, since an epilogue would count as the
    node that needs a result.
    """
    problem, caps = instance.problem, instance.caps
    duration, storages = list(problem.duration_ticks), list(problem.storages)
    copies_cost_less = list(problem.copy_price.price_ticks) == sorted(
        problem.copy_price.price_ticks
    )
    for c in problem.collectives:
        if c.cast and c.may_share:
            duration[c.cast[0]] = 0
            storages[c.input_storage] = replace(storages[c.input_storage], size_bytes=0)
            copies_cost_less &= c.input_bytes <= c.copied_bytes
    relaxed = replace(
        problem,
        duration_ticks=tuple(duration),
        storages=tuple(storages),
        predecessors=_with_order(problem, caps.max_compute_move),
        collectives=tuple(_alone(c) for c in problem.collectives),
        copy_price=problem.copy_price if copies_cost_less else _FREE,
        kernels=(),
        cuts=(),
        reordered=(),
    )
    prefetch = caps.max_prefetch
    if prefetch is not None:
        prefetch += len(problem.travels)
    if any(c.epilogue for c in problem.collectives):
        prefetch = None
    return Instance.of(relaxed, replace(caps, max_prefetch=prefetch, max_compute_move=None))


def _alone(c: Collective) -> Collective:
    """Return ``c`` without anything that travels with it, and without places."""
    restriction = replace(c.restriction, start_slots=None, wait_slots=None)
    return replace(c, prologue=(), cast=(), cast_bytes=0, epilogue=(), restriction=restriction)


def _with_order(problem: Problem, max_move: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the nodes before each node: also the compute nodes that were captured more than twice
    ``max_move`` before it, since none may be that far from its place.

    Nodes that stand before one of these anyway are left out: those captured more than another
    twice ``max_move`` before, and those with a user among these.
    """
    if max_move is None:
        return problem.predecessors
    before, captured = list(problem.predecessors), problem.captured_order
    place_of = {node: place for place, node in enumerate(captured)}
    first_user = [len(captured)] * len(captured)
    for place, node in enumerate(captured):
        for used in problem.predecessors[node]:
            if used in place_of:
                first_user[place_of[used]] = min(first_user[place_of[used]], place)
    for place, node in enumerate(captured):
        end = place - 2 * max_move
        nearest = range(max(end - 2 * max_move - 1, 0), end)
        sooner = (captured[k] for k in nearest if first_user[k] >= end)
        before[node] = tuple(sorted({*before[node], *sooner}))
    return tuple(before)
