"""A reduction for each gradient, where the partitioner has merged those of equal gradients."""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from apsched.fx.collectives import collective_kind
from apsched.fx.graph_copies import copied, finished
from apsched.fx.passes.parameters import PARAMETER_KEY, is_scaling, serves_alone
from apsched.kinds import CollectiveKind
from apsched.torch_compat.graphs import gradient_of

_REDUCTIONS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


def with_own_reductions(backward: GraphModule) -> GraphModule:
    """Return ``backward`` with a reduction for each gradient; itself, where each has one.

    Two parameters may have the same gradient (the biases of ``a(x) + b(x)``). The partitioner then
    merges their reductions (torch/_functorch/compile_utils.py, fx_graph_cse). FSDP2 and DDP reduce
    both.
    """
    reductions = Counter(node for _, _, chain in _gradients(backward.graph) for node in chain)
    if max(reductions.values(), default=1) == 1:
        return backward
    result = copied(backward)
    output = result.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    taken: set[Node] = set()
    for place, name, chain in list(_gradients(result.graph)):
        copies = _copies(result.graph, [node for node in chain if node in taken])
        for node in chain:
            own = copies.get(node, node)
            _use(own, copies)
            own.meta["custom"] = {**own.meta.get("custom", {}), PARAMETER_KEY: name}
        taken.update(chain)
        values[place] = copies.get(values[place], values[place])
    output.args = (tuple(values), *output.args[1:])
    return finished(result)


def _gradients(graph: torch.fx.Graph) -> Iterator[tuple[int, str, list[Node]]]:
    """Yield the place of each gradient in the output, its parameter, and the nodes from its first
    reduction on, in the order of the graph; none where nothing reduces it.
    """
    output = graph.output_node()
    descriptors = output.meta.get("desc") or ()
    for place, (value, descriptor) in enumerate(zip(output.args[0], descriptors, strict=False)):  # type: ignore[arg-type]
        name = gradient_of(descriptor)
        if name is None or not isinstance(value, Node):
            continue
        chain: list[Node] = []
        first = 0
        while (serves_alone(value) or is_scaling(value)) and len(value.all_input_nodes) == 1:
            chain.append(value)
            if collective_kind(value) in _REDUCTIONS:
                first = len(chain)
            (value,) = value.all_input_nodes
        yield place, name, chain[:first][::-1]


def _copies(graph: torch.fx.Graph, nodes: list[Node]) -> dict[Node, Node]:
    """Return node -> its copy, right behind it."""
    made: dict[Node, Node] = {}
    for node in nodes:
        with graph.inserting_after(node):
            made[node] = graph.node_copy(node)
        made[node].meta = dict(node.meta)
    return made


def _use(node: Node, copies: Mapping[Node, Node]) -> None:
    for before in node.all_input_nodes:
        if before in copies:
            node.replace_input_with(before, copies[before])
