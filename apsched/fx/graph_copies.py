"""Copies of graph modules: a pass changes a copy, never its argument."""

import torch
from torch.fx import GraphModule, Node

from apsched.fx.effects.of_node import effects_of
from apsched.torch_compat.graphs import empty_graph_like, graph_module_like


def copied(module: GraphModule) -> GraphModule:
    """Return a copy of ``module`` with nodes of its own; names, order and metadata (each a shallow
    copy) stay.
    """
    return with_graph(module, copied_graph(module.graph))


def copied_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy of ``graph``, as :func:`copied` makes one."""
    copy: torch.fx.Graph = empty_graph_like(graph)
    values: dict[Node, Node] = {}
    for node in graph.nodes:
        values[node] = copy.node_copy(node, values.__getitem__)
        values[node].meta = {
            key: dict(value) if key == "custom" else value for key, value in node.meta.items()
        }
    return copy


def with_graph(
    module: GraphModule, graph: torch.fx.Graph, like: GraphModule | None = None
) -> GraphModule:
    """Return a module with ``graph``, compiled (at the first call, where ``like``, by default
    ``module``, is, too); the rest is that of ``module``.
    """
    cls = graph_module_like(like or module)
    made: GraphModule = cls(module, graph, class_name=type(module).__name__)
    made.meta, made.shape_env = dict(module.meta), module.shape_env
    return made


def copied_alone(node: Node) -> Node:
    """Return a copy of ``node`` in a graph of its own; its inputs are placeholders with the same
    values.
    """
    graph = torch.fx.Graph()

    def placeholder(given: Node) -> Node:
        made = graph.placeholder(given.name)
        made.meta = dict(given.meta)
        return made

    inputs = {given: placeholder(given) for given in node.all_input_nodes}
    copy = graph.node_copy(node, inputs.__getitem__)
    copy.meta = dict(node.meta)
    return copy


def finished(module: GraphModule) -> GraphModule:
    """Return ``module`` after its graph was changed: without unused nodes, and
    compiled.

    torch's own ``eliminate_dead_code`` keeps every wait, since it has a side effect; this function
    removes a wait without a use of its result, with its collective. A call that writes into a
    tensor, draws, or has another effect stays.
    """
    _erase_unused(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def finished_with(module: GraphModule, graph: torch.fx.Graph) -> GraphModule:
    """Return a module with ``graph``, as :func:`finished`, compiled once."""
    _erase_unused(graph)
    made = with_graph(module, graph)
    made.graph.lint()
    return made


def _erase_unused(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) or effects_of(node).any
