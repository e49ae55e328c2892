"""Bounds on a step over all choices, from the graphs of a few of them."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from apsched.config import Caps
from apsched.names import gather_of_part, in_node, nodes_of_part
from apsched.pipeline.load import LoadedGraph
from apsched.problem.problem import Problem
from apsched.problem.second_group import with_second_groups
from apsched.solver.bounds.whole_step import (
    StepBound,
    graph_bound,
    least_prices,
    with_more_moves,
    with_prices,
)
from apsched.solver.bounds.whole_step_rows import KeptItem
from apsched.whole_step.choices import Choice
from apsched.whole_step.pair import Graphs, Step, storages_of

Prices = tuple[dict[str, int], dict[str, int]]
"""Ticks of each node of forward and of backward, by name."""


def prices_of(step: Step) -> Prices:
    """Return the lowest price of each node under the choices whose graphs are made: with the least
    kept, with the most kept, all resharded if they matter, and those that were solved.
    """
    made = (solved.graphs for solved in step.solved.values())
    extremes = [step.least, step.under(step.most), _all_in_node(step)]
    pairs = [pair for pair in (*extremes, *made) if pair is not None]
    forward, backward = (least_prices(pair[k].problem for pair in pairs) for k in (0, 1))
    return forward, backward


def _all_in_node(step: Step) -> Graphs | None:
    """Return the graphs with every undecided parameter resharded that can be; ``None`` where none
    can be, or all can be kept.
    """
    free = step.free_bytes
    fits = free is None or sum(p.size_bytes for p in step.undecided) <= free
    parts = Choice(in_node(p.name) for p in step.undecided if p.node_bytes)
    return None if fits or not parts else step.under(step.always | parts)


def bounds_of(step: Step, prices: Prices) -> list[StepBound]:
    """Return bounds on the step, of which the least holds: one for each way to place gathers on
    groups.
    """
    in_node = _all_in_node(step)
    kept = with_prices(step.under(step.most)[1].problem, prices[1])
    ways = (False, True) if step.request.second_group else (False,)
    items = _items(step, in_node, prices[0])
    forward, *others = (
        with_prices(pair[0].problem, prices[0])
        for pair in (step.least, in_node)
        if pair is not None
    )
    num_parts = sum(len(p.values) for p in step.undecided if p.node_bytes)
    caps = with_more_moves(step.caps[0], num_parts)
    without_cap = replace(caps, memory_cap_bytes=None)  # other choices hold fewer parts
    forward_ticks = _forward_bound(forward, caps, ways)
    in_node_ticks = sum(_forward_bound(one, without_cap, ways) for one in others)
    return [
        StepBound.of(
            forward_ticks=forward_ticks,
            forward_in_node_ticks=in_node_ticks,
            again=grouped(step.least[1].problem, way),
            kept=grouped(kept, way),
            in_node=in_node and grouped(with_prices(in_node[1].problem, prices[1]), way),
            items=items,
            caps=step.caps[1],
            free_bytes=step.free_bytes,
        )
        for way in ways
    ]


def _forward_bound(problem: Problem, caps: Caps, ways: Sequence[bool]) -> int:
    return min(graph_bound(grouped(problem, way), caps) for way in ways)


def _items(step: Step, in_node: Graphs | None, prices: dict[str, int]) -> list[KeptItem]:
    uses = _uses(step.under(step.most)[1], {v for p in step.undecided for v in p.values})
    gathers = {} if in_node is None else _starts(in_node[1].problem)
    return [
        KeptItem(
            collectives=p.gathers,
            kept_bytes=p.size_bytes,
            node_bytes=p.node_bytes,
            node_collectives=tuple(
                gathers[name]
                for name in (gather_of_part(nodes_of_part(value)[-1]) for value in p.values)
                if name in gathers
            ),
            part_ticks=sum(prices.get(name, 0) for v in p.values for name in nodes_of_part(v)),
            uses=tuple(use for value in p.values for use in uses.get(value, ())),
        )
        for p in step.undecided
    ]


def _starts(problem: Problem) -> dict[str, int]:
    """Return start node -> its collective."""
    return {problem.node_names[c.start]: k for k, c in enumerate(problem.collectives)}


def _uses(graph: LoadedGraph, names: Collection[str]) -> dict[str, list[int]]:
    """Return each of ``names`` that is a node -> the nodes that use its storages."""
    problem = graph.problem
    return {
        name: [use for s in storages_of(graph, node) for use in problem.storages[s].uses]
        for node, name in enumerate(problem.node_names)
        if name in names
    }


def grouped(problem: Problem, second: bool) -> Problem:
    """Return ``problem``, with ``second`` with its gathers on second groups."""
    return (with_second_groups(problem) or problem) if second else problem
