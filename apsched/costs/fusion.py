"""Which nodes become one kernel, and what memory traffic is left: pointwise chains and the reductions at their ends, as Inductor
fuses them (torch/_inductor/scheduler.py).

Two nodes are in one kernel if one takes the other's result (through views, if need be), both are pointwise operators or
reductions, and as many matrix products, attentions or collectives lie behind the one as behind the other. A kernel reads each value
from outside once, writes each value that is used outside once, and has one floor. Nodes in place, random ones and copies stay alone. All
of this follows from what depends on what, not from the order, so that a schedule changes no price.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from apsched.costs.flops import has_flops
from apsched.costs.operands import bound_arguments, result_of, tensors_in, touched_bytes, value_of
from apsched.costs.traffic import op_name, touches_nothing

_ALSO_POINTWISE = frozenset({"aten::_to_copy", "prims::convert_element_type"})
_REDUCTIONS = frozenset(
    {"aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var", "aten::var_mean", "aten::prod", "aten::logsumexp"}
)


@dataclass(frozen=True, slots=True)
class Share:
    """What a node contributes to its kernel."""

    traffic_bytes: int
    first: bool
    """It pays the floor of the kernel."""


def fused_kernels(graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
    """Return the nodes of every kernel of two or more, each in graph order."""
    free = {node for node in graph.nodes if _is_free(node)}
    rank = {node: k for k, node in enumerate(graph.nodes)}
    kernels: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node, kernel in _kernel_of(graph, free).items():
        kernels.setdefault(kernel, []).append(node)
    ordered = (sorted(nodes, key=rank.__getitem__) for nodes in kernels.values() if len(nodes) > 1)
    return sorted(ordered, key=lambda nodes: rank[nodes[0]])


def fused_shares(graph: torch.fx.Graph) -> dict[torch.fx.Node, Share]:
    """Return the share of every node that is in a kernel with another; the rest is priced alone."""
    free = {node for node in graph.nodes if _is_free(node)}
    kernel = _kernel_of(graph, free)
    sources = {node: [_behind_views(taken, free) for taken in node.all_input_nodes] for node in kernel}
    sizes = Counter(kernel.values())
    read: set[tuple[torch.fx.Node, torch.fx.Node]] = set()
    begun: set[torch.fx.Node] = set()
    shares: dict[torch.fx.Node, Share] = {}
    for node, mine in kernel.items():
        if sizes[mine] < 2:
            continue
        traffic = 0
        for taken, source in zip(node.all_input_nodes, sources[node], strict=True):
            if kernel.get(source) is not mine and (mine, taken) not in read:
                read.add((mine, taken))
                traffic += sum(map(touched_bytes, tensors_in(value_of(taken))))
        if any(kernel.get(user) is not mine for user in _users_behind_views(node, free)):
            traffic += sum(map(touched_bytes, tensors_in(value_of(node))))
        shares[node] = Share(traffic, mine not in begun)
        begun.add(mine)
    return shares


def _kernel_of(graph: torch.fx.Graph, free: set[torch.fx.Node]) -> dict[torch.fx.Node, torch.fx.Node]:
    """Return for each fusible node the one that names its kernel, in the order of :func:`_fusible_nodes`."""
    products, fusible = _fusible_nodes(graph, free)
    kernel = {node: node for node in fusible}

    def find(node: torch.fx.Node) -> torch.fx.Node:
        while kernel[node] is not node:
            kernel[node] = kernel[kernel[node]]
            node = kernel[node]
        return node

    for node in fusible:
        for taken in node.all_input_nodes:
            source = _behind_views(taken, free)
            if source in kernel and products[source] == products[node]:
                kernel[find(node)] = find(source)
    return {node: find(node) for node in fusible}


def _fusible_nodes(graph: torch.fx.Graph, free: set[torch.fx.Node]) -> tuple[dict[torch.fx.Node, int], list[torch.fx.Node]]:
    """Return for each node the most products and waits on a way to it, and the fusible nodes: by those on a way to them, then by name."""
    products: dict[torch.fx.Node, int] = {}
    depth: dict[torch.fx.Node, int] = {}
    fusible = []
    for node in graph.nodes:
        products[node] = max((products[taken] for taken in node.all_input_nodes), default=0)
        depth[node] = max((depth[taken] for taken in node.all_input_nodes), default=0)
        if node.op == "call_function" and (has_flops(node.target) or _waits(node)):
            products[node] += 1
        elif node.op == "call_function" and node not in free and _is_fusible(node):
            depth[node] += 1
            fusible.append(node)
    return products, sorted(fusible, key=lambda node: (depth[node], node.name))


def _is_fusible(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    name = op_name(target)
    if name == "aten::clone":  # asked for to change a layout, or to copy a bucket out: a kernel of its own
        return False
    return torch.Tag.pointwise in target.tags or name in _ALSO_POINTWISE or name in _REDUCTIONS


def _is_free(node: torch.fx.Node) -> bool:
    """Whether ``node`` shows memory of its first input, or works on sizes; a wait is a border, whatever it shows."""
    if node.op != "call_function" or _waits(node):
        return False
    return touches_nothing(node.target, bound_arguments(node), result_of(node))


def _waits(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and op_name(node.target).endswith("wait_tensor")


def _behind_views(node: torch.fx.Node, free: set[torch.fx.Node]) -> torch.fx.Node:
    """Return the node whose memory a view shows."""
    while node in free and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _users_behind_views(node: torch.fx.Node, free: set[torch.fx.Node]) -> list[torch.fx.Node]:
    found, stack = [], list(node.users)
    while stack:
        user = stack.pop()
        if user in free:
            stack += user.users
        else:
            found.append(user)
    return found
