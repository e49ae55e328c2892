"""Control dependencies that a scheduler put into a graph: they hold the order that it chose, so a
new schedule of the graph starts without them.

torch wraps the call that is to come behind others into ``control_deps`` with a graph of that one
call (torch/_inductor/fx_passes/control_dependencies.py, preserve_node_ordering). Any legal order
keeps the arguments and effects of such a call; its place behind others was the choice of a
scheduler.
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from apsched.fx.effects.of_node import attribute_of, higher_order_name
from apsched.torch_compat.graphs import empty_graph_like


def without_control_deps(module: GraphModule) -> GraphModule:
    """Return ``module`` with the calls themselves in place of the ``control_deps`` around one call
    each, in the same order and with the same names; itself where there is none.
    """
    calls = {node: call for node in module.graph.nodes if (call := _held_call(node)) is not None}
    if not calls:
        return module
    graph: Graph = empty_graph_like(module.graph)
    values: dict[Node, Node] = {}
    for node in module.graph.nodes:
        values[node] = (
            _released(graph, node, calls[node], values)
            if node in calls
            else graph.node_copy(node, values.__getitem__)
        )
    for body in {values[node.args[1]] for node in calls if isinstance(node.args[1], Node)}:
        if not body.users:
            graph.erase_node(body)
    result = GraphModule(module, graph, class_name=type(module).__name__)
    result.meta, result.shape_env = dict(module.meta), module.shape_env
    return result


def _held_call(node: Node) -> Node | None:
    """Return the one call that the ``control_deps`` in ``node`` makes; None where it is none, or
    makes several.
    """
    if higher_order_name(node) != "control_deps":
        return None
    body = attribute_of(node.args[1]) if isinstance(node.args[1], Node) else node.args[1]
    if not isinstance(body, GraphModule) or node.kwargs:
        return None
    calls = [inner for inner in body.graph.nodes if inner.op not in ("placeholder", "output")]
    if len(calls) != 1 or calls[0].op != "call_function":
        return None
    return calls[0] if body.graph.output_node().args == (calls[0],) else None


def _released(graph: Graph, node: Node, call: Node, values: dict[Node, Node]) -> Node:
    inputs = call.graph.find_nodes(op="placeholder")
    handed = dict(zip(inputs, node.args[2:], strict=True))

    def given(placeholder: Node) -> Any:
        value = handed[placeholder]
        return values[value] if isinstance(value, Node) else value

    args, kwargs = torch.fx.map_arg((call.args, call.kwargs), given)
    released = graph.create_node("call_function", call.target, args, kwargs, name=node.name)
    released.meta = {**call.meta, **node.meta}
    return released
