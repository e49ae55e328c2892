"""Makes the graphs of several micro-batches in a row from the pair of graphs of one. A parameter
can stay gathered from backward to the next forward. Gradients can be added before their reduction.

A parameter that stays gathered is an output of backward and an input of the next forward, in place
of the chain ``shard -> cast -> all_gather -> wait``. FSDP2 does the same with
``set_reshard_after_backward(False)``.

A gradient is added at the input of its reduction, in the dtype that the reduction takes. Backward
returns the sum in place of the reduced gradient, and takes it in the next micro-batch; the last one
reduces it. FSDP2 does the same with ``set_requires_gradient_sync(False)``
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``accumulate_unsharded_grad_if_needed``).

A gradient of HSDP is reduced twice: to shards, and then over the replicas. Its shards can be added
at the input of the second reduction. FSDP2 does the same with ``set_requires_all_reduce(False)``
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``partial_reduce_output``).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from apsched.fx.collectives import is_all_gather, is_collective
from apsched.fx.graph_copies import copied_graph, finished_with
from apsched.fx.keep import (
    forward_node_of,
    handed_over,
    node_bytes,
    outputs_of,
)
from apsched.fx.node_shards import PART_KEY, gathered_in_node
from apsched.fx.passes.parameters import PARAMETER_KEY, is_scaling, serves_alone
from apsched.torch_compat.graphs import empty_graph_like, gradient_of

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldValue:
    """A gathered tensor that stays from backward to the next forward."""

    forward: str
    """Node of forward with that value."""
    backward: str | None
    """Node of backward with that value; ``None`` where backward has none: it takes the value from
    forward and returns it.
    """
    size_bytes: int
    gathers: tuple[str, ...]
    """Nodes of forward that start the gathers which the value stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """The reduction of one gradient in backward."""

    start: str
    """Node that starts it."""
    starts: tuple[str, ...]
    """All nodes that start a collective from there to the output, this one first."""
    addend: str
    """Node whose value it reduces."""
    chain: tuple[str, ...]
    """That node and those before it that only move, cast or scale the value, up to a collective."""
    outputs: tuple[int, ...]
    """Places of the reduced gradient among the outputs of backward."""
    size_bytes: int
    """Bytes of the value that it reduces."""
    reduced_bytes: int
    """Bytes of the reduced gradient."""

    @property
    def sum_name(self) -> str:
        """Node that adds the value to that of the micro-batches before."""
        return f"{self.start}_sum"

    @property
    def before_name(self) -> str:
        """Input with the sum of the micro-batches before."""
        return f"{self.start}_before"

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Nodes with sums: the one of the micro-batches before, that with this one, and the value
        of the first micro-batch.
        """
        return self.before_name, self.sum_name, self.addend


def held_values(forward: GraphModule, backward: GraphModule) -> dict[str, tuple[HeldValue, ...]]:
    """Return placeholder of forward -> the values that stand for all gathers of its tensor there,
    in the order of the placeholders.
    """
    twins = {twin: node.name for node, twin in forward_node_of(forward, backward).items()}
    given = {node.name: node for node in backward.graph.nodes}
    found = {}
    for shard, chain in _gather_chains(forward.graph).items():
        values = handed_over(chain)
        if values:
            found[shard.name] = tuple(
                HeldValue(
                    forward=value.name,
                    backward=_twin(value, twins, given),
                    size_bytes=node_bytes([value]),
                    gathers=tuple(n.name for n in _above(value, chain) if is_collective(n)),
                )
                for value in values
            )
    return found


def reductions(
    backward: GraphModule, starts: Collection[str], *, of_shards: bool = False
) -> dict[str, Reduction]:
    """Return start -> the reduction of a gradient that is only moved, cast and scaled from there to
    an output of backward: the first one on its way that ``starts`` has; ``of_shards`` the last of
    several, where it takes fewer bytes than the first.

    A reduction of whose result another node makes use, or another output, is left out.
    """
    found = {}
    for value, outputs in _output_places(backward).items():
        way = _way_up(value)
        at = [k for k, n in enumerate(way) if n.name in starts and not is_all_gather(n)]
        if not at or len(way[at[-1]].all_input_nodes) != 1:
            continue
        first = way[at[-1]].all_input_nodes[0]
        at = at[:1] if of_shards else at
        start = way[at[-1]]
        addend = start.all_input_nodes[0]
        if of_shards and node_bytes([addend]) >= node_bytes([first]):
            continue
        chain = takewhile(lambda node: not is_collective(node), way[at[-1] + 1 :])
        found[start.name] = Reduction(
            start=start.name,
            starts=tuple(way[k].name for k in reversed(at)),
            addend=addend.name,
            chain=tuple(node.name for node in chain),
            outputs=tuple(outputs),
            size_bytes=node_bytes([addend]),
            reduced_bytes=node_bytes([value]),
        )
    return found


def gradient_bytes(backward: GraphModule) -> dict[str, int]:
    """Return output of backward that is the gradient of a parameter -> its bytes; all outputs where
    the graph does not describe them.
    """
    described = backward.graph.output_node().meta.get("desc")
    return {
        value.name: node_bytes([value])
        for value, places in _output_places(backward).items()
        if described is None or any(gradient_of(described[k]) for k in places)
    }


def forward_of(forward: GraphModule, held: Iterable[HeldValue], *, first: bool) -> GraphModule:
    """Return a copy of ``forward`` for the first micro-batch or another one, which takes the values
    ``held`` as inputs: both return those that backward does not gather.
    """
    held = tuple(held)
    graph = copied_graph(forward.graph) if first else _taking(forward.graph, held)
    nodes = {node.name: node for node in graph.nodes}
    _append_outputs(graph, [nodes[v.forward] for v in held if v.backward is None])
    return finished_with(forward, graph)


def backward_of(
    backward: GraphModule,
    held: Iterable[HeldValue],
    summed: Iterable[Reduction],
    values: Mapping[str, Any],
    *,
    first: bool,
    last: bool,
) -> GraphModule:
    """Return a copy of ``backward`` for the first, a middle or the last micro-batch: it returns the
    values ``held`` but for the last one, adds the gradients ``summed`` to those of the
    micro-batches before but for the first one, and reduces the sums in the last one alone.

    ``values`` has the fake tensors of the nodes of forward by name.
    """
    graph = copied_graph(backward.graph)
    nodes = {node.name: node for node in graph.nodes}
    for one in summed:
        value = nodes[one.addend]
        if not first:
            value = _added(graph, one, nodes[one.start], value)
        if last:
            nodes[one.start].replace_input_with(nodes[one.addend], value)
        else:
            _replace_outputs(graph, one.outputs, value)
    if not last:
        _append_outputs(
            graph,
            [
                nodes[v.backward]
                if v.backward is not None
                else _new_input(graph, v.forward, torch.empty_like(values[v.forward]))
                for v in held
            ],
        )
    return finished_with(backward, graph)


def _gather_chains(graph: Graph) -> dict[Node, dict[Node, Node]]:
    """Return placeholder -> the nodes that only move its tensor, some of which gather it."""
    origin: dict[Node, Node] = {}
    chains: dict[Node, dict[Node, Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            origin[node] = node
            continue
        sources = {origin.get(given) for given in node.all_input_nodes}
        source = sources.pop() if len(sources) == 1 else None
        if source is not None and serves_alone(node):
            if PART_KEY in node.meta or (is_collective(node) and not is_all_gather(node)):
                continue
            origin[node] = source
            chains.setdefault(source, {})[node] = node
    return chains


def _twin(value: Node, twins: Mapping[Node, str], given: Mapping[str, Node]) -> str | None:
    """Return the node of backward that has the value of a node of forward: it repeats the gather,
    takes the value, or gathers its parts in the node.
    """
    if value in twins:
        return twins[value]
    if value.name in given and given[value.name].op == "placeholder":
        return value.name
    parts = gathered_in_node(value.name)
    return parts if parts in given else None


def _output_places(module: GraphModule) -> dict[Node, list[int]]:
    places: dict[Node, list[int]] = {}
    for place, value in enumerate(outputs_of(module.graph)):
        if isinstance(value, Node):
            places.setdefault(value, []).append(place)
    return places


def _way_up(output: Node) -> list[Node]:
    """Return the nodes that only move, cast or scale the value of ``output``, from it upwards; each
    is read by the one before alone.
    """
    way: list[Node] = []
    node, reader = output, output.graph.output_node()
    while (serves_alone(node) or is_scaling(node)) and set(node.users) == {reader}:
        way.append(node)
        if len(node.all_input_nodes) != 1:
            break
        node, reader = node.all_input_nodes[0], node
    return way


def _above(value: Node, chain: Mapping[Node, Node]) -> list[Node]:
    """Return ``value`` and the nodes of ``chain`` that it is made of."""
    found, stack = [], [value]
    while stack:
        node = stack.pop()
        if node in chain and node not in found:
            found.append(node)
            stack += node.all_input_nodes
    return found


def _taking(forward: Graph, held: Sequence[HeldValue]) -> Graph:
    """Return a copy of ``forward`` that takes the values ``held`` as inputs, under the names of the
    nodes that make them.
    """
    graph: Graph = empty_graph_like(forward)
    known = {node.name: node for node in forward.nodes}
    values: dict[Node, Node] = {}

    def take() -> None:
        for one in held:
            node = known[one.forward]
            values[node] = graph.placeholder(one.forward)
            values[node].meta = {"val": torch.empty_like(node.meta["val"])}

    taken = False
    for node in forward.nodes:
        if node.op != "placeholder" and not taken:
            taken = True
            take()
        if node not in values:
            values[node] = graph.node_copy(node, values.__getitem__)
            values[node].meta = dict(node.meta)
    return graph


def _added(graph: Graph, one: Reduction, start: Node, value: Node) -> Node:
    """Append the sum of ``value``, which ``one`` reduces from ``start`` on, and that of the
    micro-batches before, a new input.
    """
    before = _new_input(graph, one.before_name, torch.empty_like(value.meta["val"]))
    with graph.inserting_after(value):
        args = (before, value)
        node = graph.create_node("call_function", _aten.add.Tensor, args, name=one.sum_name)
    custom = start.meta.get("custom", {})
    kept = {PARAMETER_KEY: custom[PARAMETER_KEY]} if PARAMETER_KEY in custom else {}
    node.meta = {"val": _aten.add.Tensor(before.meta["val"], value.meta["val"]), "custom": kept}
    return node


def _new_input(graph: Graph, name: str, value: Any) -> Node:
    last = [*graph.find_nodes(op="placeholder")][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta = {"val": value}
    return node


def _replace_outputs(graph: Graph, places: Iterable[int], value: Node) -> None:
    outputs = outputs_of(graph)
    for place in places:
        outputs[place] = value
    graph.output_node().args = (tuple(outputs),)


def _append_outputs(graph: Graph, values: Sequence[Node]) -> None:
    """Append ``values`` to the outputs, without descriptions."""
    output = graph.output_node()
    for key in ("desc", "output_stack_traces"):
        if key in output.meta:
            output.meta[key] = [*output.meta[key], *[None] * len(values)]
    output.args = ((*outputs_of(graph), *values),)
