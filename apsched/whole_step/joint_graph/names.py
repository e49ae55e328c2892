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
    names = graph.problem.node_names
    return {names[-1]: ("", names[-1])} | {
        names[place]: (direction, name)
        for direction, half in zip(DIRECTIONS, graph.apart, strict=True)
        for name, place in zip(half.problem.node_names, half.places, strict=True)
        if place >= 0
    }
