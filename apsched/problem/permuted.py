"""The same problem with its nodes captured in another order, and schedules brought back from
there.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from apsched.kinds import KernelCut
from apsched.problem.problem import Collective, Problem, Storage
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind


def permuted(problem: Problem, order: Sequence[int]) -> Problem:
    """Return ``problem`` as if its nodes had been captured in ``order``, in which each node comes
    after its predecessors; it has one chain.

    A kernel stays whole where its compute nodes are neighbours in ``order``.
    """
    new = [0] * len(order)
    for place, node in enumerate(order):
        new[node] = place

    def moved(nodes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(new[node] for node in nodes))

    kernels = tuple(problem.kernels[node] for node in order) if problem.kernels else ()
    first: dict[int, int] = {}
    for place, kernel in enumerate(kernels):
        first.setdefault(kernel, place)
    result = replace(
        problem,
        node_names=tuple(problem.node_names[node] for node in order),
        kinds=tuple(problem.kinds[node] for node in order),
        duration_ticks=tuple(problem.duration_ticks[node] for node in order),
        predecessors=tuple(moved(problem.predecessors[node]) for node in order),
        modules=tuple(problem.modules[node] for node in order),
        storages=tuple(_storage(storage, new) for storage in problem.storages),
        collectives=tuple(
            _collective(problem.collectives[c], new) for c in _collective_order(problem, new)
        ),
        kernels=tuple(-1 if kernel < 0 else first[kernel] for kernel in kernels),
        cuts=(),
        chains=(),
    )
    return replace(result, cuts=tuple(_cuts(problem, result, new)))


def brought_back(problem: Problem, order: Sequence[int], schedule: Schedule) -> Schedule:
    """Return ``schedule``, of ``permuted(problem, order)``, as a schedule of ``problem``."""
    new = [0] * len(order)
    for place, node in enumerate(order):
        new[node] = place
    collectives = _collective_order(problem, new)
    old = {StepKind.NODE: order, StepKind.COPY_OUT: collectives}
    return Schedule(
        buckets=tuple(
            Bucket(
                members=tuple(collectives[c] for c in bucket.members), coalesced=bucket.coalesced
            )
            for bucket in schedule.buckets
        ),
        steps=tuple(
            Step(step.kind, old[step.kind][step.index]) if step.kind in old else step
            for step in schedule.steps
        ),
    )


def _collective_order(problem: Problem, new: Sequence[int]) -> list[int]:
    starts = [new[c.start] for c in problem.collectives]
    return sorted(range(len(starts)), key=starts.__getitem__)


def _storage(storage: Storage, new: Sequence[int]) -> Storage:
    return replace(
        storage,
        birth=new[storage.birth] if storage.birth >= 0 else -1,
        uses=tuple(sorted(new[node] for node in storage.uses)),
    )


def _collective(c: Collective, new: Sequence[int]) -> Collective:
    prologue = sorted(new[node] for node in c.prologue)
    return replace(
        c,
        start=new[c.start],
        wait=new[c.wait],
        prologue=tuple(prologue),
        cast=tuple(new[node] for node in c.cast),
        epilogue=tuple(sorted(new[node] for node in c.epilogue)),
    )


def _cuts(problem: Problem, result: Problem, new: Sequence[int]) -> list[KernelCut]:
    """Return the places where kernels may be cut that are still between neighbours."""
    before = {b: a for a, b in pairwise(result.captured_order)}
    kept = []
    for cut in problem.cuts:
        node = new[cut.node]
        if node in before and result.kernels[before[node]] == result.kernels[node]:
            pairs = sorted(zip((new[n] for n in cut.nodes), cut.extra_ticks, strict=True))
            kept.append(
                KernelCut(
                    node=node,
                    nodes=tuple(n for n, _ in pairs),
                    extra_ticks=tuple(ticks for _, ticks in pairs),
                )
            )
    return kept
