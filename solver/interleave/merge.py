"""Orders in which the chains of a problem are merged: by turns, or the fastest.

Each chain is cut into *units*, which stay whole. A merge numbers the units of all chains. Among the
nodes whose predecessors are done, the one with the least number is next; a node that chains share
has the largest number of its predecessors, or stays behind all chains where it is.

By turns, units are stretches between collectives on the path, and each chain begins ``apart`` units
behind the one before: unit u of chain k has number u + k apart. The fastest merge has single
kernels for units, and is found by labels: ``apsched.solver.interleave.fastest``. In both, one chain
is behind the other where ``apart`` is the number of units of the longest.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.solver.interleave.fastest import fastest_numbers
from apsched.solver.interleave.units import units_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One way to merge chains."""

    by_turns: bool = False
    """One stretch of each chain in turn; otherwise the fastest merge of single kernels."""
    apart: int = 0
    """Units by which each chain is behind the one before, at least; 0: none need be ahead."""

    def __str__(self) -> str:
        return f"{'by turns' if self.by_turns else 'fastest'}, {self.apart} apart"


def merged(problem: Problem, merge: Merge) -> tuple[int, ...]:
    """Return all nodes of ``problem`` in the order of ``merge``; predecessors come first."""
    chains = units_of(problem, stretches=merge.by_turns)
    if merge.by_turns:
        numbers = [
            [u + k * merge.apart for u in range(len(units))] for k, units in enumerate(chains)
        ]
    else:
        numbers = fastest_numbers(problem, chains, merge.apart)
    keys = [0] * problem.num_nodes
    for units, numbered in zip(chains, numbers, strict=True):
        for nodes, number in zip(units, numbered, strict=True):
            for node in nodes:
                keys[node] = number
    of_chains = [node for node, chain in enumerate(problem.chains) if chain >= 0]
    last_node, last_key = max(of_chains, default=-1), max(keys, default=0)
    for node, chain in enumerate(problem.chains):
        if chain < 0 and node > last_node:
            keys[node] = last_key + 1
        elif chain < 0:
            keys[node] = max((keys[p] for p in problem.predecessors[node]), default=0)
    return _in_order(problem, keys)


def _in_order(problem: Problem, keys: list[int]) -> tuple[int, ...]:
    """Return the nodes by key, then by chain, then as captured, behind their predecessors; the
    inputs of the graph, first, keep the order that its callers rely on.
    """

    def entry(node: int) -> tuple[int, int, int, int]:
        match problem.kinds[node]:
            case NodeKind.INPUT:
                return -1, 0, 0, node
            case kind:
                return int(kind is NodeKind.OUTPUT), keys[node], problem.chains[node], node

    left = [len(before) for before in problem.predecessors]
    ready = [entry(node) for node, count in enumerate(left) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        node = heappop(ready)[-1]
        order.append(node)
        for after in problem.successors[node]:
            left[after] -= 1
            if not left[after]:
                heappush(ready, entry(after))
    return tuple(order)
