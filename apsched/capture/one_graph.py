"""Forward and backward as one graph, as TorchTitan's graph trainer has them: a gather of backward
may start while forward runs, and of several micro-batches one runs forward while another one runs
backward.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from apsched.capture.captured import Capture, CapturedGraph
from apsched.errors import InputError
from apsched.names import direction_named
from apsched.torch_compat.graphs import empty_graph_like

JOINT = "joint"


def with_joint_graph(capture: Capture) -> Capture:
    """Return ``capture`` with one more graph, ``joint``: its forward and its backward graph, one
    behind the other (:func:`joined`).

    Raises
    ------
    InputError
        where the capture has anything else than one forward and one backward graph.
    """
    by_direction = {direction_named(graph.name): graph for graph in capture.graphs}
    if len(capture.graphs) != 2 or set(by_direction) != {"forward", "backward"}:
        found = ", ".join(graph.name for graph in capture.graphs)
        raise InputError(
            f"{capture.source}: expected one forward and one backward graph, to make one graph of"
            f" them; found {found}; choose --direction both"
        )
    forward, backward = by_direction["forward"], by_direction["backward"]
    return replace(capture, graphs=(forward, backward, joined(forward, backward)))


def joined(forward: CapturedGraph, backward: CapturedGraph) -> CapturedGraph:
    """Return ``forward`` and ``backward`` as one graph. Nodes that the partitioner repeats in
    backward (gathers, checkpointed activations) are there twice, as they run.

    The graph takes the inputs of forward and the tangents, and returns the outputs of forward that
    are not for backward alone, then the gradients.
    """
    return CapturedGraph(
        name=JOINT,
        module=_joined(forward.module, backward.module),
        kept_inputs=forward.kept_inputs,
        parameter_names=forward.parameter_names,
        hints={**forward.hints, **backward.hints},
        gradient_inputs=backward.gradient_inputs,
    )


def joint_places(forward: GraphModule, backward: GraphModule) -> tuple[list[int], list[int]]:
    """Return the rank in the joint graph of each node of ``forward`` and of each node of
    ``backward``; -1 for outputs, and for inputs of backward that forward computes.
    """
    _, saved = _handed_over(forward.graph, backward.graph)
    tangents = [p for p in backward.graph.find_nodes(op="placeholder") if p.name not in saved]
    nodes = [list(module.graph.nodes) for module in (forward, backward)]
    inside = [n for part in nodes for n in part if n.op not in ("placeholder", "output")]
    order = [*forward.graph.find_nodes(op="placeholder"), *tangents, *inside]
    place = {node: k for k, node in enumerate(order)}
    first, second = ([place.get(node, -1) for node in part] for part in nodes)
    return first, second


def _joined(forward: GraphModule, backward: GraphModule) -> GraphModule:
    results, saved = _handed_over(forward.graph, backward.graph)
    graph: torch.fx.Graph = empty_graph_like(forward.graph)
    attributes: dict[str, Any] = {}
    values: dict[Node, Node] = {}
    inputs = [*forward.graph.find_nodes(op="placeholder")]
    tangents = [p for p in backward.graph.find_nodes(op="placeholder") if p.name not in saved]
    values |= {node: _copied(node, graph, values) for node in (*inputs, *tangents)}
    for module, tag in ((forward, "is_forward"), (backward, "is_backward")):
        for node in module.graph.nodes:
            if node.op == "placeholder" and node not in values:
                values[node] = values[saved[node.name]]
            elif node.op != "output" and node not in values:
                values[node] = _copied(node, graph, values)
                values[node].meta["partitioner_tag"] = tag
            if node.op == "get_attr":
                values[node].target = _named(attributes, module, node.target)
    gradients = backward.graph.output_node().args[0]
    graph.output(
        tuple(
            values[value] if isinstance(value, Node) else value
            for value in (*results, *gradients)  # type: ignore[misc]
        )
    )
    joint = GraphModule(attributes, graph, class_name="JointGraph")
    joint.shape_env = forward.shape_env
    joint.graph.lint()
    return joint


def _copied(node: Node, graph: torch.fx.Graph, values: Mapping[Node, Node]) -> Node:
    copy = graph.node_copy(node, values.__getitem__)
    copy.meta = dict(node.meta)
    return copy


def _handed_over(
    forward: torch.fx.Graph, backward: torch.fx.Graph
) -> tuple[tuple[Any, ...], dict[str, Node]]:
    """Return the outputs of forward that are not for backward alone, and those that are, by the
    names of the inputs of backward: they come last.
    """
    outputs = tuple(forward.output_node().args[0])  # type: ignore[arg-type]
    taken = {node.name for node in backward.find_nodes(op="placeholder")}
    saved: dict[str, Node] = {}
    while outputs and isinstance(last := outputs[-1], Node) and last.name in taken - set(saved):
        saved[last.name] = last
        outputs = outputs[:-1]
    return outputs, saved


def _named(attributes: dict[str, Any], module: GraphModule, target: Any) -> str:
    """Return the name under which the attribute ``target`` of ``module`` stands in
    ``attributes``.
    """
    value: Any = module
    for part in str(target).split("."):
        value = getattr(value, part)
    name, number = str(target).replace(".", "_"), 1
    while attributes.setdefault(name, value) is not value:
        name, number = f"{target}_{number}".replace(".", "_"), number + 1
    return name
