"""Orders in which the chains of a problem are merged, by place or by the clock.

Each chain is cut into *units*, which stay whole: a run of compute nodes that are one kernel, or all
compute nodes between two collectives on the path. A merge numbers the units of all chains. Among
the nodes whose predecessors are done, the one with the least number is next; a node that chains
share has the largest number of its predecessors, or stays behind all chains where it is.

By place, the number of a unit comes from its place in its own chain, and each chain begins ``skew``
units behind the one before: unit u of chain k has number u + k skew. A skew of as many units as the
longest chain has puts one chain behind the other.

By the clock, chains run on one compute stream, with gathers and reductions of parameters free and
each collective on the path as long as it takes alone; the clock picks the next chain for each unit,
and numbers the units as they run.
"""

from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem


class Rule(StrEnum):
    """The rule that chooses between chains that could run now, by the clock."""

    NEXT_LAUNCH = "next launch"
    """The one with the least compute up to its next launch on the path."""
    FURTHEST_BEHIND = "furthest behind"
    """The one with the most units left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One way to merge chains."""

    rule: Rule | None = None
    """By the clock, with single kernels as units; ``None``: by place, with stretches."""
    skew: int = 0
    """Units by which each chain begins behind the one before."""

    def __str__(self) -> str:
        return f"by {self.rule or 'place'}, {self.skew} apart"


def merged(problem: Problem, merge: Merge) -> tuple[int, ...]:
    """Return all nodes of ``problem`` in the order of ``merge``; predecessors come first."""
    chains = units_of(problem, stretches=merge.rule is None)
    if merge.rule is None:
        numbers = [
            [u + k * merge.skew for u in range(len(units))] for k, units in enumerate(chains)
        ]
    else:
        numbers = _by_clock(problem, chains, merge.rule, merge.skew)
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
            if not _is_compute(problem, node):
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


class _Clock:
    """The compute stream and the streams of collectives on the path, with chains that run on
    them.
    """

    def __init__(self, problem: Problem, chains: list[list[list[int]]]) -> None:
        self.problem, self.chains = problem, chains
        self.now = 0
        self.done = [0] * len(chains)
        """Units of each chain that have run."""
        self.ready = [0] * len(chains)
        """When the next unit of each chain may run."""
        self._available_ticks: dict[int, int] = {}
        """When the result of a node is there, where that is not at once."""
        self._free = [0] * len(problem.streams)
        self._on_path = {
            node: c for c in problem.collectives if c.on_path for node in (c.start, c.wait)
        }
        for chain in range(len(chains)):
            self._look_ahead(chain)

    def run(self, chain: int) -> None:
        """Run the next unit of ``chain``, and the nodes between it and the next compute node."""
        self.now = max(self.now, self.ready[chain])
        self._walk(self.chains[chain][self.done[chain]], computes=True)
        self.done[chain] += 1
        self._look_ahead(chain)

    def _look_ahead(self, chain: int) -> None:
        """Run the nodes before the first compute node of the next unit."""
        if self.done[chain] < len(self.chains[chain]):
            unit = self.chains[chain][self.done[chain]]
            self._walk(unit, computes=False)
            inputs = {p for node in unit for p in self.problem.predecessors[node]}
            self.ready[chain] = max((self._available_ticks.get(p, 0) for p in inputs), default=0)

    def _walk(self, unit: list[int], *, computes: bool) -> None:
        begun = False
        for node in unit:
            is_compute = _is_compute(self.problem, node)
            begun |= is_compute
            if begun and not computes:
                return
            if not begun and computes:
                continue
            available_ticks = max(
                (self._available_ticks.get(p, 0) for p in self.problem.predecessors[node]),
                default=0,
            )
            collective = self._on_path.get(node)
            if is_compute:
                self.now += self.problem.duration_ticks[node]
                available_ticks = 0
            elif collective is not None and node == collective.start:
                key = self.problem.keys[collective.key]
                available_ticks = max(
                    self.now, available_ticks, self._free[key.stream]
                ) + key.price(collective.size_bytes)
                self._free[key.stream] = available_ticks
            if available_ticks:
                self._available_ticks[node] = available_ticks


def _by_clock(
    problem: Problem, chains: list[list[list[int]]], rule: Rule, skew: int
) -> list[list[int]]:
    """Return the numbers of the units of each chain in the order in which they run."""
    clock = _Clock(problem, chains)
    urgency = [_urgency(problem, units, rule) for units in chains]
    numbers: list[list[int]] = [[] for _ in chains]
    for number in range(sum(map(len, chains))):
        left = [k for k, units in enumerate(chains) if clock.done[k] < len(units)]
        begun = [k for k in left if k == left[0] or clock.done[k - 1] - clock.done[k] >= skew]
        ready = [k for k in begun if clock.ready[k] <= clock.now]
        if ready:
            chosen = min(ready, key=lambda k: urgency[k][clock.done[k]])
        else:
            chosen = min(begun, key=clock.ready.__getitem__)
        numbers[chosen].append(number)
        clock.run(chosen)
    return numbers


def _urgency(problem: Problem, units: list[list[int]], rule: Rule) -> list[int]:
    """Return for each unit of a chain how urgent it is, the least first."""
    if rule is Rule.FURTHEST_BEHIND:
        return list(range(len(units)))
    starts = {c.start for c in problem.collectives if c.on_path}
    urgency, ticks = [0] * len(units), 0
    for u in reversed(range(len(units))):
        if any(node in starts for node in units[u]):
            ticks = 0
        ticks += sum(problem.duration_ticks[n] for n in units[u] if _is_compute(problem, n))
        urgency[u] = ticks
    return urgency


def _is_compute(problem: Problem, node: int) -> bool:
    return problem.kinds[node] is NodeKind.COMPUTE and node not in problem.travels
