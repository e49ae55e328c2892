"""Prices of nodes that hold more than one operator, or communication that nothing schedules.

The price of a higher-order operator is the sum over the calls inside of it, each priced as any
other node: ``cond`` costs its more expensive branch, ``map`` and ``scan`` cost their body as often
as it runs, a loop whose end depends on its values costs one round. One that is a kernel of its own
(``flex_attention``, Triton) is priced by the cost model, as any operator.

A transfer that is not scheduled is priced as if the compute stream waited for it: its launch, and
its own time. An operator that waits for its own transfers is priced with them
(:mod:`apsched.costs.compute.fused_transfers`). An unknown operator has the time of an all-to-all of
the tensors that it takes. Where the number of process ranks of its group is not known, it costs its
launch.
"""

from collections.abc import Iterator, Mapping

from torch.fx import Graph, Node

from apsched.costs.compute.fused_transfers import inner_transfers
from apsched.costs.compute.traffic import touches_nothing
from apsched.costs.model import CostModel
from apsched.fx.collectives import (
    describe,
    is_blocking_collective,
    is_collective,
    is_unknown_communication,
    is_wait_tensor,
    stated_group,
    tensor_bytes,
    tensors_of,
)
from apsched.fx.operands import bound_arguments, result_of
from apsched.fx.subgraphs import inside_of
from apsched.graph.records import priced_kind
from apsched.kinds import CollectiveKind


def whole_us(cost_model: CostModel, node: Node, sizes: Mapping[str, int]) -> float:
    """Return the time of ``node`` on the compute stream, in microseconds, with the calls inside of
    it and its transfers; ``sizes`` as :func:`apsched.fx.collectives.group_sizes` returns them.
    """
    inside = inside_of(node)
    if inside is None:
        return _one_call_us(cost_model, node, sizes)
    times_us = [_graph_us(cost_model, graph, sizes) for graph in inside.graphs]
    return inside.times * (max(times_us) if inside.one_of_them else sum(times_us))


def priced_calls(node: Node) -> Iterator[Node]:
    """Yield the calls of which ``node`` is made, each one operator: itself, or those inside."""
    inside = inside_of(node)
    if inside is None:
        yield node
        return
    for graph in inside.graphs:
        for call in _working(graph):
            yield from priced_calls(call)


def _graph_us(cost_model: CostModel, graph: Graph, sizes: Mapping[str, int]) -> float:
    return sum(whole_us(cost_model, node, sizes) for node in _working(graph))


def _working(graph: Graph) -> Iterator[Node]:
    return (
        node
        for node in graph.nodes
        if node.op == "call_function"
        and not is_wait_tensor(node)
        and not touches_nothing(node.target, bound_arguments(node), result_of(node))
    )


def _one_call_us(cost_model: CostModel, node: Node, sizes: Mapping[str, int]) -> float:
    time_us = cost_model.compute_us(node)
    for inner in inner_transfers(node):
        transfer_us = cost_model.collective_us(
            priced_kind(inner.kind), inner.group, inner.group_size, inner.size_bytes
        )
        time_us = inner.whole_us(time_us, transfer_us)
    return time_us + _transfer_us(cost_model, node, sizes)


def _transfer_us(cost_model: CostModel, node: Node, sizes: Mapping[str, int]) -> float:
    if is_collective(node) or is_blocking_collective(node):
        call = describe(node, sizes)
        return cost_model.collective_us(
            priced_kind(call.kind), call.group, call.group_size, call.size_bytes
        )
    group = stated_group(node) if is_unknown_communication(node.target) else ""
    if group not in sizes:
        return 0.0
    taken = (tensor for source in node.all_input_nodes for tensor in tensors_of(source))
    size_bytes = sum(tensor_bytes(tensor) for tensor in taken)
    return cost_model.collective_us(CollectiveKind.ALL_TO_ALL, group, sizes[group], size_bytes)
