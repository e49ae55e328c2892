"""Names of nodes in one graph of forward and backward, and in both apart."""

from apsched.names import DIRECTIONS
from apsched.pipeline.load import LoadedGraph
from apsched.whole_step.pair import kept_tensors


def kept_in_joint(again: LoadedGraph, kept: LoadedGraph) -> dict[str, tuple[str, ...]]:
    """Return the nodes whose values are kept in ``kept``, made of ``again``, both one graph of
    forward and backward, by the name of the graph.
    """
    names = {apart: name for name, apart in names_apart(kept).items()}
    forward, backward = kept.apart
    direction = DIRECTIONS[0]
    found = kept_tensors(again.apart, (forward, backward))[forward.problem.name]
    return {kept.problem.name: tuple(names[direction, name] for name in found)}


def names_apart(graph: LoadedGraph) -> dict[str, tuple[str, str]]:
    """Return each node of ``graph``, one of forward and backward, as its direction and its name
    there: names that both have get numbers in one graph, which differ from choice to choice. The
    output belongs to neither.
    """
    from apsched.capture.one_graph import joint_places  # torch, which graph files do without

    captured = [half.captured for half in (graph, *graph.apart)]
    joint, *halves = (one.module for one in captured if one is not None)
    nodes = list(joint.graph.nodes)
    output = nodes[-1].name
    return {output: ("", output)} | {
        nodes[place].name: (direction, node.name)
        for direction, half, places in zip(DIRECTIONS, halves, joint_places(*halves), strict=True)
        for node, place in zip(half.graph.nodes, places, strict=True)
        if place >= 0
    }
