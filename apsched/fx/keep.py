"""Keep gathered parameters from forward to backward, on the pair of graphs that a partitioner made.

Where a parameter is gathered again, backward takes its shard and repeats the chain

    shard -> cast -> all_gather -> wait -> view, cast, transpose -> compute

that forward has run. Where it is kept, forward hands over the result of the chain, and backward
takes that. Both chains are found by their computation, not by names of nodes: a backward node is
*made again* where a forward node calls the same operator on the same arguments, all the way from
one shard.

Between both lies a third choice. A parameter is *resharded in its node* where forward hands over
one part of the result of the chain, and backward gathers the parts of the ranks of its node:

    result -> view, slice, clone | -> all_gather in the node -> wait -> view -> compute

FSDP2 does the same with ``reshard_after_forward=8``
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``to_sharded_post_forward``), ZeRO++ calls it
hpZ.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from apsched.errors import InputError
from apsched.fx.collectives import (
    group_name,
    is_all_gather,
    is_collective,
    is_wait_tensor,
    tensor_bytes,
    tensors_of,
)
from apsched.fx.graph_copies import copied_graph, finished_with, with_graph
from apsched.fx.node_shards import NodeGroup, divisor, gather_in_node, hand_over_part
from apsched.fx.passes.parameters import serves_alone
from apsched.fx.passes.partition_replay import mark_saved
from apsched.torch_compat.graphs import empty_graph_like
from apsched.torch_compat.sizes import size_hint


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredAgain:
    """One parameter that forward and backward both gather."""

    shard: str
    """Name of the forward placeholder."""
    passed: str
    """Name of the backward placeholder: the shard, or a view of it."""
    values: tuple[tuple[str, str], ...]
    """Forward node and backward node of each value that is handed over where it is kept."""
    value_bytes: tuple[int, ...]
    """Of each forward node among them: backward may gather a parameter several times."""
    num_elements: int
    """Of the largest of them: those of the parameter."""
    gathers: tuple[str, ...]
    """Backward nodes that start the gathers which keeping it saves."""
    frees_shard: bool
    """Backward does not take the shard any more where the parameter is kept."""
    shard_bytes: int
    group: str
    """Process group of the gathers that keeping it saves; empty where they have several."""
    divisor: int
    """The values can be split into so many parts, or a factor of it; 1 where they cannot."""


def gathered_again(forward: GraphModule, backward: GraphModule) -> dict[str, GatheredAgain]:
    """Return placeholder of forward -> how its tensor is gathered again in backward, in the order
    of the placeholders of forward.

    Forward hands over values for compute of backward: those just before it (a cast or transposed
    copy) or those that the gathers return, whichever have fewer bytes.
    """
    shards = _passed_shards(forward.graph, backward.graph)
    chains: dict[Node, dict[Node, Node]] = {passed: {} for passed in shards}
    for node, (same, origin) in _made_again(forward.graph, shards).items():
        chains[origin][node] = same
    found: dict[str, GatheredAgain] = {}
    for passed, shard in shards.items():
        chain = chains[passed]
        values = handed_over(chain)
        if not values:
            continue
        rest = _still_needed(passed, chain, values)
        found[shard.name] = GatheredAgain(
            shard=shard.name,
            passed=passed.name,
            values=tuple((chain[value].name, value.name) for value in values),
            value_bytes=tuple(node_bytes([v]) for v in dict.fromkeys(chain[v] for v in values)),
            num_elements=max(size_hint(t.numel()) for v in values for t in tensors_of(v)),
            gathers=tuple(
                node.name
                for node in sorted({n for value in values for n in _ancestors(value, chain)})
                if is_collective(node)
            ),
            frees_shard=not rest,
            shard_bytes=node_bytes([shard]),
            group=_only_group(values, chain),
            divisor=gcd(*(divisor(value.meta["val"]) for value in values)),
        )
    order = [node.name for node in forward.graph.find_nodes(op="placeholder")]
    return {name: found[name] for name in order if name in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A value that backward takes from forward in place of a chain of its own."""

    value: Node
    """Of forward, without its group a value of the chain, else a part of one."""
    replaces: str
    """Node of backward whose value it gives."""
    gather: str
    """Node of backward that starts the gather of that value."""
    group: NodeGroup | None
    """That gathers the parts."""


def with_kept(
    forward: GraphModule,
    backward: GraphModule,
    kept: Iterable[GatheredAgain],
    in_node: Mapping[str, NodeGroup] | None = None,
) -> tuple[GraphModule, GraphModule, dict[str, str]]:
    """Return copies of both graphs with the parameters ``kept``, of :func:`gathered_again`; and the
    shard of each input of backward that is a part.

    Parameters that ``in_node`` has by the name of their shard are resharded in the node.

    A value takes the place of the shard among the outputs of forward and the inputs of backward, or
    the places behind it where backward has another use for the shard.
    """
    graph = copied_graph(forward.graph)
    made = {node.name: node for node in graph.nodes}
    last_use = _last_uses(graph.nodes) if in_node else {}
    taken: dict[str, list[_Taken]] = {}
    gone: set[str] = set()
    parts: dict[str, str] = {}
    for one in kept:
        found, group = [], (in_node or {}).get(one.shard)
        handed: dict[str, Node] = {}
        for name, repeated in one.values:
            if name not in handed:
                value = made[name]
                _forget_recompute(value)
                if group is not None:
                    value = hand_over_part(graph, value, group, last_use[value])
                    parts[value.name] = one.shard
                mark_saved(value)
                handed[name] = value
            value, gather = handed[name], one.gathers[0]
            found.append(_Taken(value=value, replaces=repeated, gather=gather, group=group))
        _hand_over(graph, one.passed, list(handed.values()), drop=one.frees_shard)
        taken[one.passed] = found
        gone |= {one.passed} if one.frees_shard else set()
    taking = finished_with(backward, _taking(backward.graph, taken, gone))
    return with_graph(forward, graph), taking, parts


def with_parts(
    joint: GraphModule,
    resharded: Iterable[tuple[GatheredAgain, NodeGroup]],
    forward: Collection[str],
) -> GraphModule:
    """Return a copy of ``joint``, one graph of forward and backward, with the parameters
    ``resharded``, of :func:`gathered_again` on its halves; ``forward`` are the names of the nodes
    of its first half.
    """
    graph = copied_graph(joint.graph)
    made = {node.name: node for node in graph.nodes}
    last_use = _last_uses(node for node in graph.nodes if node.name in forward)
    for one, group in resharded:
        parts: dict[str, Node] = {}
        for name, repeated in one.values:
            if name not in parts:
                value = made[name]
                parts[name] = hand_over_part(graph, value, group, last_use[value])
            old, start = made[repeated], made[one.gathers[0]]
            with graph.inserting_before(old):
                whole = gather_in_node(graph, parts[name], old, start, group)
            old.replace_all_uses_with(whole)
    return finished_with(joint, graph)


def passed_values(module: GraphModule) -> list[str]:
    """Return the names of the nodes that are inputs or outputs of ``module``."""
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    return inputs + [node.name for node in outputs_of(module.graph) if isinstance(node, Node)]


def forward_node_of(forward: GraphModule, backward: GraphModule) -> dict[Node, Node]:
    """Return node of backward -> the node of forward whose computation from a shard it repeats."""
    shards = _passed_shards(forward.graph, backward.graph)
    return {node: same for node, (same, _) in _made_again(forward.graph, shards).items()}


def _taking(
    backward: torch.fx.Graph, taken: Mapping[str, Sequence[_Taken]], gone: Collection[str]
) -> torch.fx.Graph:
    """Return a copy of ``backward`` that takes the values of ``taken``, by passed input, as inputs,
    without the inputs ``gone``.
    """
    graph: torch.fx.Graph = empty_graph_like(backward)
    values: dict[Node, Node] = {}
    parts: dict[Node, tuple[Node, Node, NodeGroup]] = {}
    known = {node.name: node for node in backward.nodes}
    for node in backward.nodes:
        if node in parts:
            part, start, group = parts[node]
            values[node] = gather_in_node(graph, part, node, start, group)
        elif (
            node not in values
            and node.name not in gone
            and all(i in values for i in node.all_input_nodes)
        ):
            values[node] = graph.node_copy(node, values.__getitem__)
            values[node].meta = dict(node.meta)
        given: dict[Node, Node] = {}
        for one in taken.get(node.name, ()) if node.op == "placeholder" else ():
            if one.value not in given:
                given[one.value] = graph.placeholder(one.value.name)
                meta = {key: item for key, item in one.value.meta.items() if key != "desc"}
                given[one.value].meta = meta
            value = given[one.value]
            if one.group is None:
                values[known[one.replaces]] = value
            else:
                parts[known[one.replaces]] = value, known[one.gather], one.group
    return graph


def _last_uses(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Return node -> the last call among ``nodes``, in their order, that reads the storage of the
    node, or the node itself.
    """
    found: dict[Node, Node] = {}
    for node in nodes:
        if node.op != "output":
            found[node] = node
            for given in node.all_input_nodes:
                found[_storage_of(given)] = node
    return found


def _passed_shards(forward: torch.fx.Graph, backward: torch.fx.Graph) -> dict[Node, Node]:
    """Return backward placeholder -> forward placeholder, of inputs that forward passes on, itself
    or a view of it.
    """
    handed = {node.name: node for node in outputs_of(forward) if isinstance(node, Node)}
    found = {}
    for node in backward.find_nodes(op="placeholder"):
        if node.name in handed and (base := _storage_of(handed[node.name])).op == "placeholder":
            found[node] = base
    return found


def _made_again(
    forward: torch.fx.Graph, shards: Mapping[Node, Node]
) -> dict[Node, tuple[Node, Node]]:
    """Return backward node -> forward node of the same value, and the shard that both come from."""
    handed = {node.name: node for node in outputs_of(forward) if isinstance(node, Node)}
    made = {passed: (handed[passed.name], passed) for passed in shards}
    backward = next(iter(shards)).graph if shards else None
    for node in backward.nodes if backward is not None else ():
        inputs = node.all_input_nodes
        if not serves_alone(node) or not inputs or any(i not in made for i in inputs):
            continue
        origins = {made[i][1] for i in inputs}
        if len(origins) != 1:
            continue
        twin = next(
            (user for user in made[inputs[0]][0].users if _same_call(node, user, made)), None
        )
        if twin is not None:
            made[node] = twin, origins.pop()
    return made


def _same_call(node: Node, other: Node, made: Mapping[Node, tuple[Node, Node]]) -> bool:
    def replaced(value: Any) -> Any:
        return tree_map_only(Node, lambda n: made[n][0], value)

    return (
        node.target == other.target
        and replaced(node.args) == other.args
        and replaced(dict(node.kwargs)) == dict(other.kwargs)
    )


def handed_over(chain: Mapping[Node, Node]) -> list[Node]:
    """Return the backward nodes whose values forward can hand over in place of the gathers of
    ``chain``; none where it has no gather.
    """
    gathered: set[Node] = set()
    for node in chain:
        if is_collective(node) or any(i in gathered for i in node.all_input_nodes):
            gathered.add(node)
    read = [node for node in chain if node in gathered and any(u not in chain for u in node.users)]
    if any(is_collective(node) for node in read):
        return []
    before_compute = list(dict.fromkeys(_storage_of(node) for node in read))
    above = {n for node in chain if is_collective(node) for n in _ancestors(node, chain)}
    waits = [node for node in chain if is_wait_tensor(node) and node not in above]
    return min(before_compute, waits, key=node_bytes)


def _only_group(values: Collection[Node], chain: Mapping[Node, Node]) -> str:
    above = {n for value in values for n in _ancestors(value, chain) if is_collective(n)}
    groups = {group_name(node) for node in above}
    return groups.pop() if len(groups) == 1 and all(map(is_all_gather, above)) else ""


def _ancestors(node: Node, chain: Mapping[Node, Node]) -> set[Node]:
    found: set[Node] = set()
    stack = [i for i in node.all_input_nodes if i in chain]
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack += [i for i in one.all_input_nodes if i in chain]
    return found


def _still_needed(passed: Node, chain: Mapping[Node, Node], values: Collection[Node]) -> bool:
    """Return whether backward reads the shard though it gets ``values``."""
    stack, seen = [passed], {passed}
    while stack:
        for user in stack.pop().users:
            if user in values or user in seen:
                continue
            if user not in chain:
                return True
            seen.add(user)
            stack.append(user)
    return False


def _storage_of(node: Node) -> Node:
    """Return the node that makes the storage which ``node`` shows."""
    while node.op == "call_function" and (
        node.target is getitem
        or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view)
    ):
        node = node.all_input_nodes[0]
    return node


def node_bytes(nodes: Iterable[Node]) -> int:
    return sum(tensor_bytes(tensor) for node in nodes for tensor in tensors_of(node))


def outputs_of(graph: torch.fx.Graph) -> list[Any]:
    values = graph.output_node().args[0]
    assert isinstance(values, list | tuple)
    return list(values)


def _hand_over(graph: torch.fx.Graph, passed: str, values: Collection[Node], *, drop: bool) -> None:
    """Put ``values`` behind the output ``passed`` (or in its place), with as many of its
    descriptions.
    """
    output, outputs = graph.output_node(), outputs_of(graph)
    places = [k for k, v in enumerate(outputs) if isinstance(v, Node) and v.name == passed]
    if not places:
        raise InputError(f"expected a forward graph that passes {passed} on, found none")
    at = places[-1]
    cut = slice(at if drop else at + 1, at + 1)
    for key in ("desc", "output_stack_traces"):
        if key in output.meta:
            described = list(output.meta[key])
            described[cut] = [described[at]] * len(values)
            output.meta[key] = described
    outputs[cut] = values
    output.args = (tuple(outputs),)


def _forget_recompute(value: Node) -> None:
    """Remove the tags that have the partitioner recompute ``value`` and its sources."""
    stack = [value]
    while stack:
        node = stack.pop()
        node.meta.pop("recompute", None)
        node.meta.pop("ac_graph_id", None)
        stack += [i for i in node.all_input_nodes if i.op == "call_function"]
