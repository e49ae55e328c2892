"""Sums of reduced gradients at the end of the graph.

Where each micro-batch reduces its own gradients, the sum of two of them waits for the second
reduction as soon as it is launched: at its place in the graph, no reduction can share a launch with
a later one, or hide behind compute.
"""

import operator

import torch
from torch.fx import GraphModule, Node

from apsched.fx.collectives import collective_kind, is_collective, is_wait_tensor
from apsched.fx.graph_copies import copied, finished
from apsched.fx.passes.parameters import is_scaling, serves_alone
from apsched.fx.passes.run_passes import Pass
from apsched.kinds import CollectiveKind

_aten = torch.ops.aten
_REDUCTIONS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


def sums_last() -> Pass:
    """Return the pass that moves the sums of reduced gradients, and the nodes behind them, to the
    end of the graph. Values and the order of sums stay.
    """
    return Pass(name="sums_last", run=_with_sums_last)


def put_sums_last(graph: torch.fx.Graph) -> None:
    """Change ``graph`` in place, as :func:`sums_last`."""
    late: dict[Node, None] = {}
    ends = _ends(graph, _reduced(graph))
    for node in graph.nodes:
        if node in ends and (_is_sum(node) or any(n in late for n in node.all_input_nodes)):
            late[node] = None
    for output in graph.find_nodes(op="output"):
        for node in late:
            output.prepend(node)


def _with_sums_last(module: GraphModule) -> GraphModule:
    result = copied(module)
    put_sums_last(result.graph)
    return finished(result)


def _reduced(graph: torch.fx.Graph) -> set[Node]:
    """Return the waits of reductions, and the nodes that only copy, scale or add their results."""
    found: set[Node] = set()
    for node in graph.nodes:
        if is_wait_tensor(node):
            if collective_kind(_start(node)) in _REDUCTIONS:
                found.add(node)
        elif serves_alone(node) or is_scaling(node) or _is_sum(node):
            inputs = node.all_input_nodes
            if inputs and all(given in found for given in inputs):
                found.add(node)
    return found


def _start(wait: Node) -> Node:
    node = wait.all_input_nodes[0]
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _ends(graph: torch.fx.Graph, reduced: set[Node]) -> set[Node]:
    """Return the nodes of ``reduced`` whose results go to outputs alone, without another launch."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        ends = bool(node.users) and all(u.op == "output" or u in found for u in node.users)
        if ends and node in reduced and not is_collective(node):
            found.add(node)
    return found


def _is_sum(node: Node) -> bool:
    return node.target is _aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs
