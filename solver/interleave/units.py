"""Units of a chain: the pieces that stay whole when chains are merged.

A unit is a run of compute nodes that are one kernel, or a *stretch*: all compute nodes between two
collectives on the path.
"""

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem


def units_of(problem: Problem, *, stretches: bool) -> list[list[list[int]]]:
    """Return the units of each chain, their nodes as captured: stretches between collectives on the
    path, or single kernels.

    A wait and the nodes that take its result, up to the next compute node, belong to the unit
    behind it; other nodes that take no time belong to the unit before.
    """
    on_path = {c.wait for c in problem.collectives if c.on_path}
    found: list[list[list[int]]] = []
    for chain in range(max(problem.chains, default=-1) + 1):
        units: list[list[int]] = []
        waiting: dict[int, None] = {}
        behind_wait, kernel = False, -1
        for node in (node for node, k in enumerate(problem.chains) if k == chain):
            if not is_compute(problem, node):
                is_wait = problem.kinds[node] is NodeKind.WAIT
                behind_wait |= node in on_path
                if is_wait or not units or any(p in waiting for p in problem.predecessors[node]):
                    waiting[node] = None
                else:
                    units[-1].append(node)
                continue
            own_kernel = problem.kernels[node] if problem.kernels else -1
            if not units or (behind_wait if stretches else own_kernel < 0 or own_kernel != kernel):
                units.append([])
            units[-1] += [*waiting, node]
            waiting.clear()
            behind_wait, kernel = False, own_kernel
        if units:
            units[-1] += waiting
        found.append(units or [[*waiting]])
    return found


def is_compute(problem: Problem, node: int) -> bool:
    """Whether ``node`` runs on the compute stream at a place of its own."""
    return problem.kinds[node] is NodeKind.COMPUTE and node not in problem.travels
