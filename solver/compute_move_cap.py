"""Decide whether the search moves compute or keeps it as captured.

Compute that moves hides a collective on the path. Without such collectives, only the end of the
step can gain: weight gradients could run beside the reductions that end behind all compute. Such a
gradient hides as much time as its compute minus its own transfer, which follows.
"""

from dataclasses import replace
from itertools import accumulate

from apsched.config import Caps
from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Problem

_WORTH = 0.001
"""Least share of all compute that the reductions after the last compute node must have."""
_ENOUGH = 0.5
"""Share of the exposed end that gradients near the end have to hide."""
_NONE, _SEVERAL = -1, -2


def moving_where_it_pays(problem: Problem, caps: Caps) -> Caps:
    """Return ``caps`` with compute as captured where moving it has nothing to hide, or nothing to
    hide it with.
    """
    pays = any(c.on_path for c in problem.collectives) or _end_pays(problem, caps.max_compute_move)
    return caps if pays else replace(caps, max_compute_move=0)


def _end_pays(problem: Problem, max_move: int | None) -> bool:
    """Whether gradients within ``max_move`` places of the end hide enough of the exposed end."""
    ticks = [problem.duration_ticks[node] for node in problem.captured_order]
    out = _sticks_out(problem, ticks)
    if out <= _WORTH * sum(ticks):
        return False
    owner = _only_collective_behind(problem)
    near = len(ticks) if max_move is None else max_move
    work = [0] * len(problem.collectives)
    last = [-1] * len(problem.collectives)
    for k, node in enumerate(problem.captured_order):
        if owner[node] >= 0:
            work[owner[node]] += ticks[k]
            last[owner[node]] = k
    gains = (
        work[c] - problem.keys[collective.key].price(collective.size_bytes)
        for c, collective in enumerate(problem.collectives)
        if last[c] >= len(ticks) - near
    )
    return sum(gain for gain in gains if gain > 0) >= _ENOUGH * out


def _sticks_out(problem: Problem, ticks: list[int]) -> int:
    """Return the time of the last reduction after all compute, as captured, with each collective
    alone and gathers free.
    """
    done = dict(zip(problem.captured_order, accumulate(ticks), strict=True))
    ready = [0] * problem.num_nodes
    stream_free = [0] * len(problem.streams)
    for node, before in enumerate(problem.predecessors):
        ready[node] = done.get(node, max((ready[p] for p in before), default=0))
        c = problem.collective_of_node.get(node)
        if c is None or node != problem.collectives[c].start:
            continue
        key = problem.keys[problem.collectives[c].key]
        if key.kind != CollectiveKind.ALL_GATHER:
            ready[node] = max(ready[node], stream_free[key.stream]) + key.price(
                problem.collectives[c].size_bytes
            )
            stream_free[key.stream] = ready[node]
    return max(stream_free, default=0) - sum(ticks)


def _only_collective_behind(problem: Problem) -> list[int]:
    """Return for each node the one reduction that its result is for; -1 where nothing is launched
    behind it, -2 where more is.
    """
    owner = [_NONE] * problem.num_nodes
    for node in reversed(range(problem.num_nodes)):
        c = problem.collective_of_node.get(node)
        if c is not None and node == problem.collectives[c].start:
            owner[node] = c
        elif problem.kinds[node] is not NodeKind.OUTPUT:
            served = {owner[after] for after in problem.successors[node]} - {_NONE}
            owner[node] = _NONE if not served else served.pop() if len(served) == 1 else _SEVERAL
    return owner
