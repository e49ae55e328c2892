"""The graphs that a higher-order operator runs, from its arguments, and how often."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from apsched.fx.collectives import is_communication
from apsched.fx.effects.of_node import (
    RUN_ONE_CALL,
    RUN_SUBGRAPHS,
    attribute_of,
    higher_order_name,
)
from apsched.fx.operands import tensors_in, value_of
from apsched.torch_compat.sizes import size_hint

_LENGTH_OF = {"map": 1, "map_impl": 1, "scan": 2}
"""Operator that runs its body for each slice along dim 0 of an argument -> the place of that."""
_RUN_ONCE = RUN_SUBGRAPHS.difference(
    _LENGTH_OF,
    ("associative_scan", "cond", "flex_attention", "flex_attention_backward", "foreach_map"),
)
"""Operators that run each of their bodies once. A ``while_loop`` counts as one round, since its
data decide how many there are.
"""
_RESULT_COMES_SECOND = frozenset(("run_and_save_rng_state", "with_effects"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The graphs that a higher-order operator runs."""

    graphs: tuple[Graph, ...]
    """Every call in them, and every argument of these calls, has ``meta["val"]``."""
    times: int
    """Number of runs of each."""
    one_of_them: bool
    """One of the graphs runs, chosen by the data; otherwise all run."""


def inside_of(node: Node) -> Inside | None:
    """Return the graphs that ``node`` runs; None if it is no higher-order operator, one that is a
    kernel of its own (``flex_attention``, Triton), or if its graphs have no shapes.
    """
    name, times = higher_order_name(node), 1
    if name in RUN_ONE_CALL:
        graphs = _one_call(node, RUN_ONE_CALL[name])
    elif name == "cond" or name in _RUN_ONCE or name in _LENGTH_OF:
        graphs = tuple(_with_numbers(node, body.graph) for body in subgraphs_of(node))
    else:
        return None
    if name in _LENGTH_OF:
        times = _length(node.args[_LENGTH_OF[name]])
    if not graphs or not all(map(_has_values, graphs)):
        return None
    return Inside(graphs=graphs, times=times, one_of_them=name == "cond")


def subgraphs_of(node: Node) -> Iterator[GraphModule]:
    """Yield the graph modules among the arguments of ``node``."""
    for leaf in pytree.tree_leaves((node.args, node.kwargs)):
        found = attribute_of(leaf) if isinstance(leaf, Node) and leaf.op == "get_attr" else leaf
        if isinstance(found, GraphModule):
            yield found


def with_all_inside(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield ``nodes``, and the nodes of the graphs that they run, of those that these run, and so
    on.
    """
    for node in nodes:
        yield node
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            for body in subgraphs_of(node):
                yield from with_all_inside(body.graph.nodes)


def communicates(node: Node) -> bool:
    """Whether ``node`` talks to other process ranks, or waits for them, itself or inside of it."""
    return any(is_communication(inner.target) for inner in with_all_inside([node]))


def _one_call(node: Node, place: int) -> tuple[Graph, ...]:
    """Return the graph of the one call that ``node`` makes, on inputs like those that it is
    handed.
    """
    name, value = higher_order_name(node), node.meta.get("val")
    if name in _RESULT_COMES_SECOND and isinstance(value, list | tuple):
        value = value[1] if len(value) == 2 else value[1:]
    graph = Graph()

    def taken(argument: Node) -> Node:
        found = graph.placeholder(argument.name)
        found.meta = argument.meta
        return found

    inputs = {argument: taken(argument) for argument in node.all_input_nodes}
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
    target: Any = args[place] if len(args) > place else None
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    passed: dict[str, Any] = {key: item for key, item in kwargs.items() if key != "rng_state"}
    call = graph.call_function(target, args[place + (2 if name == "out_dtype" else 1) :], passed)
    if "val" in node.meta:
        call.meta["val"] = value
    return (graph,)


def _length(over: Any) -> int:
    slices = next(tensors_in(value_of(over)), None)
    return 1 if slices is None or not slices.dim() else size_hint(slices.shape[0])


def _with_numbers(node: Node, body: Graph) -> Graph:
    """Return ``body``, or a copy of it that knows the numbers that ``node`` hands to it: Dynamo
    notes no values of them there.
    """
    inputs = body.find_nodes(op="placeholder")
    operands = pytree.tree_leaves(node.args)[-len(inputs) :] if inputs else []
    numbers = {
        one.name: value_of(operand)
        for one, operand in zip(inputs, operands, strict=False)
        if one.users and "val" not in one.meta and not isinstance(value_of(operand), torch.Tensor)
    }
    if not numbers:
        return body
    graph = Graph()
    graph.output(graph.graph_copy(body, {}))
    for one in graph.find_nodes(op="placeholder"):
        if one.name in numbers:
            one.meta["val"] = numbers[one.name]
    return graph


def _has_values(graph: Graph) -> bool:
    """Whether every call and every used input has a shape; Dynamo also hands in unused sizes."""
    return all(
        "val" in node.meta
        for node in graph.nodes
        if node.op == "call_function" or (node.op == "placeholder" and node.users)
    )
