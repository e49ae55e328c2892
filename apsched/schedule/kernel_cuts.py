"""Kernels that an order cuts in two, and the cost of the cuts.

The nodes that a compiler makes into one kernel stand together among the compute nodes as captured:
a *run* of neighbours. A ``KernelCut`` is a place in it with a price. An order makes the cut if the
nodes of the run before that place stand together, the other nodes of the run stand together, and
other compute stands between the two pieces; a run that stands together is one kernel, whatever the
order inside it. After a cut the values that pass from one piece to the other are written and read,
and each piece has a floor: some nodes take longer. A kernel is cut once at most; orders that tear
it in other ways, which no solver makes, pay the price of the whole kernel.
"""

from collections.abc import Sequence
from dataclasses import replace

from apsched.kinds import KernelCut
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, StepKind


def cuts_made(problem: Problem, schedule: Schedule) -> tuple[KernelCut, ...]:
    """Return the cuts that the order of ``schedule`` makes, one of a kernel at most."""
    if not problem.cuts:
        return ()
    compute_order, places = problem.captured_order, problem.captured_places
    order = (
        step.index for step in schedule.steps if step.kind is StepKind.NODE and step.index in places
    )
    now = {node: place for place, node in enumerate(order)}
    made: dict[int, KernelCut] = {}
    for cut in problem.cuts:
        at = places[cut.node]
        if now[cut.node] - now[compute_order[at - 1]] != 1:
            first, second = ([now[node] for node in piece] for piece in pieces(problem, cut))
            if _together(first) and _together(second) and not _together(first + second):
                made.setdefault(problem.kernels[cut.node], cut)
    return tuple(made.values())


def extra_ticks(cuts: Sequence[KernelCut]) -> dict[int, int]:
    """Return by how much longer nodes take where ``cuts``, of different kernels, are made."""
    return {
        node: ticks for cut in cuts for node, ticks in zip(cut.nodes, cut.extra_ticks, strict=True)
    }


def pieces(problem: Problem, cut: KernelCut) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the nodes of the run of ``cut``, those before it and those from it on."""
    compute_order, kernels, at = (
        problem.captured_order,
        problem.kernels,
        problem.captured_places[cut.node],
    )
    begin, past = at, at
    while begin > 0 and kernels[compute_order[begin - 1]] == kernels[cut.node]:
        begin -= 1
    while past < len(compute_order) and kernels[compute_order[past]] == kernels[cut.node]:
        past += 1
    return compute_order[begin:at], compute_order[at:past]


def second_piece(problem: Problem, cut: KernelCut) -> tuple[int, ...]:
    """Return the nodes of the kernel of ``cut`` from it on, wherever they stand."""
    kernel = problem.kernels[cut.node]
    return tuple(
        node for node in range(cut.node, problem.num_nodes) if problem.kernels[node] == kernel
    )


def with_cut(problem: Problem, cut: KernelCut) -> Problem:
    """Return ``problem`` with the pieces of ``cut`` as two kernels, at their price."""
    second, extra = frozenset(second_piece(problem, cut)), extra_ticks([cut])
    kernel = problem.kernels[cut.node]
    return replace(
        problem,
        duration_ticks=tuple(
            ticks + extra.get(node, 0) for node, ticks in enumerate(problem.duration_ticks)
        ),
        kernels=tuple(cut.node if node in second else k for node, k in enumerate(problem.kernels)),
        cuts=tuple(other for other in problem.cuts if problem.kernels[other.node] != kernel),
    )


def _together(places: Sequence[int]) -> bool:
    return max(places) - min(places) == len(places) - 1
