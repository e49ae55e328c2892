"""Whether any order satisfies a plan: the data, the order of compute and the plan must not
contradict each other.
"""

from itertools import pairwise

from apsched.errors import InputError
from apsched.kinds import CollectiveKind
from apsched.problem.problem import Problem

_SHOWN = 6


def check_feasible(problem: Problem) -> None:
    """Raise ``InputError`` where no order keeps the plan of ``problem``, with the rules and the
    nodes that contradict each other.

    The members of a group start as one node and, other than gathers, are waited for as one; compute
    keeps its order; a launch or a wait with a place stands between two compute nodes. An order
    exists if and only if this graph has no cycle.
    """
    node_of = _merged(problem)
    after = _edges(problem, node_of)
    cycle = _cycle(after)
    if not cycle:
        return
    concerned = [
        c for c in range(len(problem.collectives)) if node_of[problem.collectives[c].start] in cycle
    ]
    concerned += [
        c for c in range(len(problem.collectives)) if node_of[problem.collectives[c].wait] in cycle
    ]
    rules = dict.fromkeys(r for c in concerned for r in problem.collectives[c].restriction.rules)
    shown = [
        _name(problem, node)
        for node in (*cycle[:_SHOWN], *(cycle[:1] if len(cycle) <= _SHOWN else []))
    ]
    more = "" if len(cycle) <= _SHOWN else " -> ..."
    raise InputError(
        f"{problem.name}: {' and '.join(problem.rules[r] for r in rules)}: contradict the data"
        f" dependences: {' -> '.join(shown)}{more} would each have to come before the next"
    )


def _merged(problem: Problem) -> list[int]:
    """Return for each node the one that stands for it."""
    node_of = list(range(problem.num_nodes))
    first: dict[int, int] = {}
    for c, collective in enumerate(problem.collectives):
        if collective.restriction.group is None:
            continue
        head = problem.collectives[first.setdefault(collective.restriction.group, c)]
        node_of[collective.start] = head.start
        if problem.keys[collective.key].kind != CollectiveKind.ALL_GATHER:
            node_of[collective.wait] = head.wait
    return node_of


def _edges(problem: Problem, node_of: list[int]) -> list[list[int]]:
    """Return for each node those that come after it at once."""
    after: list[list[int]] = [[] for _ in node_of]
    for node, before in enumerate(problem.predecessors):
        for p in before:
            after[node_of[p]].append(node_of[node])
    for a, b in pairwise(problem.compute_order):
        after[a].append(b)
    for collective in problem.collectives:
        for node, slots in (
            (collective.start, collective.restriction.start_slots),
            (collective.wait, collective.restriction.wait_slots),
        ):
            if slots is not None and slots[0] > 0:
                after[problem.compute_order[slots[0] - 1]].append(node_of[node])
            if slots is not None and slots[1] < len(problem.compute_order):
                after[node_of[node]].append(problem.compute_order[slots[1]])
    return after


def _cycle(after: list[list[int]]) -> list[int]:
    """Return the nodes of a cycle, in order; empty where there is none."""
    missing = [0] * len(after)
    for nodes in after:
        for node in nodes:
            missing[node] += 1
    ready = [node for node, count in enumerate(missing) if not count]
    while ready:
        for node in after[ready.pop()]:
            missing[node] -= 1
            if not missing[node]:
                ready.append(node)
    left = {node for node, count in enumerate(missing) if count}
    before: dict[int, int] = {}
    for node in sorted(left, reverse=True):
        for later in after[node]:
            if later in left:
                before[later] = node
    if not left:
        return []
    path, seen = [min(left)], {min(left): 0}
    while (node := before[path[-1]]) not in seen:
        seen[node] = len(path)
        path.append(node)
    return path[seen[node] :][::-1]


def _name(problem: Problem, node: int) -> str:
    name, module = problem.node_names[node], problem.modules[node]
    return f"{name} ({module})" if module else name
