"""Reshard a gathered tensor in its node: each process rank keeps one part of it, and gathers the
parts of the ranks of its node.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from apsched.fx.tensors import is_contiguous
from apsched.names import gather_of_part, node_group_name, nodes_of_part

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_TAGS = ("recompute", "ac_graph_id", "from_node", "desc")
"""Metadata that is about the one node alone."""
_WHOLE = "_whole"
PART_KEY = "apsched_part"
"""Key of the metadata of nodes that cut a part off a gathered tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """The process ranks of a group that share a node with this one."""

    name: str
    ranks: tuple[int, ...]
    index: int = 0
    """The place of this process rank among them."""

    @property
    def num_ranks(self) -> int:
        """Parts of a parameter that is resharded in the node."""
        return len(self.ranks)


def node_groups(
    group_ranks: Mapping[str, Sequence[int]], ranks_per_node: int, process_rank: int = 0
) -> dict[str, NodeGroup]:
    """Return process group -> those of its ranks that share the node of ``process_rank``.

    A group is left out if it lies in one node, has one rank on each node, or has not equally many
    consecutive ranks on all, as FSDP2 requires for ``reshard_after_forward=8``.
    """
    found = {}
    for name, ranks in group_ranks.items():
        if process_rank not in ranks:
            continue
        nodes = [rank // ranks_per_node for rank in ranks]
        size, *others = sorted(set(Counter(nodes).values()))
        blocks = [set(nodes[k : k + size]) for k in range(0, len(nodes), size)]
        apart = not others and size > 1 and all(len(block) == 1 for block in blocks)
        if len(blocks) > 1 and apart:
            at = list(ranks).index(process_rank)
            first = at - at % size
            found[name] = NodeGroup(
                name=node_group_name(name),
                ranks=tuple(ranks[first : first + size]),
                index=at - first,
            )
    return found


def divisor(value: torch.Tensor) -> int:
    """Return the number of elements of ``value``, which can be split into parts of equal size; 1
    if it cannot: its elements are not one behind the other, or their number is a symbol.
    """
    count = value.numel()
    return count if isinstance(count, int) and count and is_contiguous(value) else 1


def hand_over_part(graph: Graph, value: Node, group: NodeGroup, last_use: Node) -> Node:
    """Append a copy of the part of ``value`` that this process rank keeps, behind ``last_use``, and
    return it: a flat tensor.

    A view would keep all of ``value`` in memory.
    """
    meta = {**_inherited(value), PART_KEY: True}
    size = value.meta["val"].numel() // group.num_ranks
    first = group.index * size
    flat_name, part_name, copy_name = nodes_of_part(value.name)
    with graph.inserting_after(last_use):
        flat = _call(graph, _aten.view.default, (value, [-1]), flat_name, meta)
    with graph.inserting_after(flat):
        args = (flat, 0, first, first + size)
        part = _call(graph, _aten.slice.Tensor, args, part_name, meta)
    with graph.inserting_after(part):
        return _call(graph, _aten.clone.default, (part,), copy_name, meta)


def gathered_in_node(name: str) -> str:
    """Return the name of the node of backward that gathers the value ``name`` of forward."""
    return f"{nodes_of_part(name)[-1]}{_WHOLE}"


def gather_in_node(graph: Graph, part: Node, like: Node, start: Node, group: NodeGroup) -> Node:
    """Append the gather of all parts of a node from ``part``, in the shape of ``like``, and return
    the whole tensor; it takes the place of the gather ``start``.
    """
    meta = _inherited(start)
    args = (part, group.num_ranks, group.name)
    gather = _call(
        graph, _c10d.all_gather_into_tensor.default, args, gather_of_part(part.name), meta
    )
    whole = _call(graph, _c10d.wait_tensor.default, (gather,), f"{part.name}_wait", meta)
    shape = list(like.meta["val"].shape)
    name = f"{part.name}{_WHOLE}"
    return _call(graph, _aten.view.default, (whole, shape), name, _inherited(like))


def _call(
    graph: Graph, target: Any, args: tuple[Any, ...], name: str, meta: Mapping[str, Any]
) -> Node:
    node = graph.create_node("call_function", target, args, name=name)
    values = (arg.meta["val"] if isinstance(arg, Node) else arg for arg in args)
    node.meta = {**meta, "val": target(*values)}
    return node


def _inherited(node: Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in _TAGS}
