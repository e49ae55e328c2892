"""Facts about the nodes of an FX graph, before any price: kinds, storages, waits, and the
collectives that can move.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from apsched.capture.captured import CapturedGraph
from apsched.errors import InputError
from apsched.fx.collectives import (
    CollectiveCall,
    describe,
    group_sizes,
    has_gradient,
    input_nodes,
    is_blocking_collective,
    is_collective,
    is_wait_tensor,
    tensor_bytes,
    tensors_of,
)
from apsched.fx.effects.effects import Effects
from apsched.fx.subgraphs import with_all_inside
from apsched.fx.tensors import is_cast, is_contiguous
from apsched.graph.export.fixed_places import storages_at_fixed_places
from apsched.graph.export.order_edges import order_edges
from apsched.graph.export.placement import Placement, placement_of
from apsched.graph.export.storages import NodeStorages, StorageTable, release, trace_storages
from apsched.graph.export.waits import (
    Waits,
    keep_unscheduled,
    match_waits,
    read_beside_waits,
    wait_for_all_results,
)
from apsched.kinds import BUCKET_KINDS, CollectiveKind, NodeKind
from apsched.torch_compat.sizes import same_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """An FX graph, taken apart; all by rank."""

    nodes: tuple[torch.fx.Node, ...]
    rank_of: dict[torch.fx.Node, int]
    kinds: tuple[NodeKind, ...]
    table: StorageTable
    waits: Waits
    calls: dict[int, CollectiveCall]
    """Of starts, scheduled or not, and of collectives that block."""
    group_sizes: dict[str, int]
    """Of the process groups that are used, in subgraphs too."""
    placement: Placement
    fsdp: frozenset[int]
    """Starts of FSDP collectives."""
    at_fixed_places: frozenset[int]
    """Storages that the graph uses by their place."""


def analyse(captured: CapturedGraph, group_ranks: Mapping[str, tuple[int, ...]]) -> Analysis:
    """Return the analysis of ``captured``; InputError names the node that cannot be understood."""
    nodes = tuple(captured.module.graph.nodes)
    for node in nodes:
        if node.op in ("call_module", "call_method"):
            raise InputError(
                f"node {node.name}: expected a graph of operators, found {node.op} {node.target};"
                " trace it with make_fx or AOTAutograd"
            )
    table = trace_storages(captured, nodes)
    waits = match_waits(nodes, table.of_node)
    sizes = group_sizes(with_all_inside(nodes), group_ranks)
    calls = {
        rank: describe(node, sizes)
        for rank, node in enumerate(nodes)
        if is_collective(node) or is_blocking_collective(node)
    }
    keep_unscheduled(waits, calls, table.of_node)
    wait_for_all_results(waits, table.of_node)
    release(table, _holds(waits, calls))
    touched = zip(nodes, table.of_node, table.effects, strict=True)
    scheduled = {*waits.wait_of_start, *waits.wait_of_start.values()}
    kinds = tuple(
        _kind(*touch, scheduled=rank in scheduled, later=rank in waits.later_waits)
        for rank, touch in enumerate(touched)
    )
    placement = placement_of(nodes, kinds, waits.wait_of_start, frozenset(captured.parameter_names))
    return Analysis(
        nodes=nodes,
        rank_of={node: rank for rank, node in enumerate(nodes)},
        kinds=kinds,
        table=table,
        waits=waits,
        calls=calls,
        group_sizes=sizes,
        placement=placement,
        fsdp=placement.from_inputs | placement.to_outputs | placement.from_parts,
        at_fixed_places=storages_at_fixed_places(nodes, table.of_node),
    )


def edges_of(analysis: Analysis) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the data edges, and the order edges that are no data edges; sinks come before the
    output.
    """
    data = [
        (analysis.rank_of[u], rank)
        for rank, node in enumerate(analysis.nodes)
        for u in node.all_input_nodes
    ]
    later = [(first, wait) for wait, first in analysis.waits.later_waits.items() if first >= 0]
    groups = {
        rank: call.group
        for rank, call in analysis.calls.items()
        if is_collective(analysis.nodes[rank])
    }
    order = order_edges(
        analysis.table.effects,
        analysis.kinds,
        analysis.table.of_node,
        _holds(analysis.waits, analysis.calls),
        later,
        groups,
        read_beside_waits(analysis.waits, analysis.nodes, analysis.table.of_node),
    )
    if analysis.kinds and analysis.kinds[-1] is NodeKind.OUTPUT:
        last = len(analysis.nodes) - 1
        has_successor = {u for u, _ in data} | {u for u, _ in order}
        order += ((rank, last) for rank in range(last) if rank not in has_successor)
    known = set(data)
    return data, [edge for edge in dict.fromkeys(order) if edge not in known]


def is_bucketable(analysis: Analysis, start: int) -> bool:
    """Whether the collective of ``start`` may share a launch with others."""
    node, call, wait = (
        analysis.nodes[start],
        analysis.calls[start],
        analysis.nodes[analysis.waits.wait_of_start[start]],
    )
    if start not in analysis.fsdp or call.kind not in BUCKET_KINDS:
        return False
    if call.coalesced or call.in_place or num_members(node) > 1 or has_gradient(node):
        return False
    if call.kind != CollectiveKind.ALL_GATHER and not analysis.at_fixed_places.isdisjoint(
        analysis.table.of_node[start].allocates
    ):
        return False  # its result is a part of the bucket's
    if tuple(node.users) != (wait,) or wait.args[:1] != (node,):
        return False
    tensors = [*tensors_of(node), *(t for source in input_nodes(node) for t in tensors_of(source))]
    if not all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
        return False  # a bucket's buffer has a size that is known now
    return (
        len(tensors) == 2
        and all(is_contiguous(t) for t in tensors)
        and tensors[0].dtype == tensors[1].dtype
        and not (call.kind == CollectiveKind.ALL_GATHER and tensors[0].is_complex())
        # gathers into a buffer refuse complex numbers (distributed_c10d.py)
        and _sizes_match(call)
    )


def cast_before(analysis: Analysis, start: int) -> torch.fx.Node | None:
    """Return the cast whose result only the gather of ``start`` sends, where a bucket can copy in
    the source of the cast.

    ``None`` for a cast of a computed value: both are one kernel, and nothing is saved without it.
    """
    if analysis.calls[start].kind != CollectiveKind.ALL_GATHER or not is_bucketable(
        analysis, start
    ):
        return None
    node = input_nodes(analysis.nodes[start])[0]
    size_bytes = analysis.calls[start].input_bytes
    while len(node.users) == 1 and len(node.all_input_nodes) == 1:
        results, sources = list(tensors_of(node)), list(tensors_of(node.all_input_nodes[0]))
        if len(results) != 1 or len(sources) != 1:
            return None
        if tensor_bytes(results[0]) != size_bytes or not same_sizes(
            [results[0].numel()], [sources[0].numel()]
        ):
            return None
        if not (is_contiguous(results[0]) and is_contiguous(sources[0])):
            return None
        if is_cast(node):
            changes = results[0].dtype != sources[0].dtype
            return node if changes and not _is_computed(analysis, node.all_input_nodes[0]) else None
        if analysis.kinds[analysis.rank_of[node]] is not NodeKind.VIEW:
            return None
        if results[0].dtype != sources[0].dtype:
            return None  # a view as bytes: a copy that casts makes other bytes
        node = node.all_input_nodes[0]
    return None


def _is_computed(analysis: Analysis, node: torch.fx.Node) -> bool:
    while analysis.kinds[analysis.rank_of[node]] is NodeKind.VIEW and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return analysis.kinds[analysis.rank_of[node]] is NodeKind.COMPUTE


def num_members(node: torch.fx.Node) -> int:
    """Return the number of captured collectives that a start stands for, from the note of
    write-back.
    """
    note = node.meta.get("apsched", {})
    return max(len(note.get("members", ())), 1) if note.get("role") == "start" else 1


def _sizes_match(call: CollectiveCall) -> bool:
    """Whether input and output are each other's shares along dim 0, with nothing padded."""
    small, large = sorted((call.input_bytes, call.output_bytes))
    return large == small * (1 if call.kind == CollectiveKind.ALL_REDUCE else call.group_size)


def _holds(waits: Waits, calls: Mapping[int, CollectiveCall]) -> list[tuple[int, int]]:
    return [
        (start, wait) for start, wait in waits.wait_of_start.items() if calls[start].holds_input
    ]


def _kind(
    node: torch.fx.Node, used: NodeStorages, effects: Effects, *, scheduled: bool, later: bool
) -> NodeKind:
    if node.op in ("placeholder", "get_attr"):
        return NodeKind.INPUT
    if node.op == "output":
        return NodeKind.OUTPUT
    if is_wait_tensor(node):
        if later:
            return NodeKind.VIEW
        return NodeKind.WAIT if scheduled else NodeKind.COMPUTE
    if is_collective(node):
        return NodeKind.START if scheduled else NodeKind.COMPUTE
    views = bool(used.aliases) and not used.allocates and not effects.any
    return NodeKind.VIEW if effects.idle or views or _is_size(node) else NodeKind.COMPUTE


def _is_size(node: torch.fx.Node) -> bool:
    """Whether ``node`` is an operator that reads a size or a stride, which python does at once."""
    value = node.meta.get("val")
    if not isinstance(value, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
        return False
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.partition(
        "::"
    )[2].startswith("sym_")
