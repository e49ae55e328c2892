"""Chains of a joint graph: micro-batches that do not depend on each other.

The dependencies of nodes determine the chains. Inputs of the graph that are neither parameters nor
buffers are its *sources*; nodes that depend on no source (gathered parameters, masks) are shared.
Nodes that lead to a matrix product or attention are the *core* of a graph: the sum of the losses,
the sum of the gradients of a parameter and its reduction are not among them. Core nodes that depend
on a source, joined where one takes the result of the other, fall into parts: the chains. A part
without a node of forward is no chain (the gradient of the first weight of a linear model). A tensor
that micro-batches share joins nothing, and neither do its slices. A node outside of the core
belongs to the chain that it depends on, where that is one, and is shared otherwise.

The tags are set before the partition: saved tensors carry them into backward.
"""

import operator
from collections.abc import Callable, Collection

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from apsched.errors import InputError
from apsched.fx.effects.of_node import higher_order_name
from apsched.fx.graph_copies import copied
from apsched.fx.passes.run_passes import Pass
from apsched.torch_compat.graphs import is_parameter_or_buffer

CHAIN_KEY = "apsched_chain"
"""``node.meta["custom"][CHAIN_KEY]`` is the number of the chain of a node; shared ones have none.
"""
_PRIMALS, _TANGENTS = "primals", "tangents"


def mark_chains(expected: int | None = None) -> Pass:
    """Return the pass that tags each node of a joint graph with its chain, where there are several.

    The pass raises InputError, which names a node, where the graph does not have ``expected``
    chains.
    """

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        set_chains(result.graph, expected=expected)
        return result

    return Pass(name="mark_chains", run=run)


def set_chains(
    graph: torch.fx.Graph,
    *,
    expected: int | None = None,
    sources: Collection[Node] | None = None,
) -> None:
    """Tag the nodes of ``graph`` in place, as :func:`mark_chains`. ``sources`` are its inputs that
    belong to one micro-batch, by default those that AOTAutograd describes so.
    """
    if sources is None:
        sources = {node for node in graph.find_nodes(op="placeholder") if _is_source(node)}
    chains = chains_of(graph, sources)
    found = max(chains.values(), default=-1) + 1
    if expected is not None and found != expected:
        raise InputError(_refusal(graph, found, expected, sources))
    for node, chain in chains.items() if found > 1 else ():
        node.meta["custom"] = {**node.meta.get("custom", {}), CHAIN_KEY: chain}


def chain_of(node: Node) -> int:
    """Return the chain that ``node`` is tagged with; -1 where it has none."""
    chain = node.meta.get("custom", {}).get(CHAIN_KEY, -1)
    return chain if isinstance(chain, int) else -1


def chains_of(graph: torch.fx.Graph, sources: Collection[Node]) -> dict[Node, int]:
    """Return node -> chain, numbered in the order of the graph, for the nodes of ``graph`` that
    belong to one; ``sources`` are the inputs of one micro-batch each.
    """
    core = _core(graph, sources)
    part_of = _parts(core)
    behind_tangents = _behind_tangents(graph)
    number: dict[Node, int] = {}
    chains: dict[Node, frozenset[int]] = {}
    for node in graph.nodes:
        if node in core and (node not in behind_tangents or part_of(node) in number):
            chains[node] = frozenset((number.setdefault(part_of(node), len(number)),))
        elif node.op == "call_function":
            before = (chains[source] for source in node.all_input_nodes if source in chains)
            chains[node] = frozenset().union(*before)
    return {node: min(found) for node, found in chains.items() if len(found) == 1}


def _core(graph: torch.fx.Graph, sources: Collection[Node]) -> set[Node]:
    """Return the nodes that depend on a source, are no mere part of it, and lead to a product."""
    depends: set[Node] = set()
    parts: set[Node] = set()
    for node in graph.nodes:
        if node in sources or any(source in depends for source in node.all_input_nodes):
            depends.add(node)
        if node in sources or (_is_view(node) and all(n in parts for n in node.all_input_nodes)):
            parts.add(node)
    leads: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and (
            _is_product(node) or any(user in leads for user in node.users)
        ):
            leads.add(node)
    return {node for node in leads if node in depends and node not in parts}


def _behind_tangents(graph: torch.fx.Graph) -> set[Node]:
    """Return the nodes of backward, where it takes tangents: those that depend on one."""
    found: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith(_TANGENTS)
        if tangent or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _parts(core: set[Node]) -> Callable[[Node], Node]:
    """Return a function: core node -> the node that stands for all those that it is joined to."""
    parent = {node: node for node in core}

    def part_of(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in core:
        for source in node.all_input_nodes:
            if source in core:
                parent[part_of(source)] = part_of(node)
    return part_of


def _is_source(node: Node) -> bool:
    return node.name.startswith(_PRIMALS) and not is_parameter_or_buffer(node.meta.get("desc"))


def _is_view(node: Node) -> bool:
    return node.target is operator.getitem or (
        isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    )


def _is_product(node: Node) -> bool:
    """Return whether ``node`` is a matrix product, a convolution or attention."""
    target = node.target
    if "attention" in higher_order_name(node):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target.overloadpacket.__name__
    return target.overloadpacket in flop_registry or "attention" in name or "grouped_mm" in name


def _refusal(graph: torch.fx.Graph, found: int, expected: int, sources: Collection[Node]) -> str:
    """Return why ``graph`` has no ``expected`` chains: where the inputs of two of them meet."""
    expectation = (
        f"expected {expected} micro-batches that do not depend on each other, found {found}"
        " in the graph"
    )
    core = _core(graph, sources)
    behind: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        own_sources = frozenset((node,)) if node in sources else frozenset()
        behind[node] = own_sources.union(*(behind[source] for source in node.all_input_nodes))
        if found < expected and node in core and _meet(node, behind, core):
            return (
                f"node {node.name}: {expectation}; results of two of them meet here (a running"
                " statistic, a state that one leaves to the next): take one micro-batch at a time"
            )
    return f"{expectation}; take one micro-batch at a time"


def _meet(node: Node, behind: dict[Node, frozenset[Node]], core: set[Node]) -> bool:
    """Return whether ``node`` takes core results that rest on different sources."""
    taken = [behind[source] for source in node.all_input_nodes if source in core]
    return any(not a & b for k, a in enumerate(taken) for b in taken[:k])
