"""Storages that a graph uses by their place: a part of another storage cannot stand for them."""

from collections.abc import Sequence

import torch

from apsched.fx.collectives import (
    argument,
    is_collective,
    is_unknown_communication,
    tensors_of,
)
from apsched.fx.subgraphs import with_all_inside
from apsched.graph.export.storages import NodeStorages

_BY_OFFSET = frozenset(
    ("aten::as_strided", "aten::as_strided_", "aten::as_strided_copy", "aten::as_strided_scatter")
)
_OTHERS = frozenset(
    (
        "aten::resize_",
        "aten::resize_as_",
        "aten::set_",
        "aten::storage_offset",
        "aten::sym_storage_offset",
        "aten::view_as_complex",  # needs an even offset
        "inductor::resize_storage_bytes_",
    )
)


def storages_at_fixed_places(
    nodes: Sequence[torch.fx.Node], storages: Sequence[NodeStorages]
) -> frozenset[int]:
    """Return the storages of which a node, or one in a graph that it runs, takes the offset or the
    size: views with an offset of their own, views as wider elements, resized storages. Also those
    that a later transfer writes: a wait is for all transfers of a storage.
    """
    found: set[int] = set()
    for node, used in zip(nodes, storages, strict=True):
        if any(map(_takes_place, with_all_inside([node]))):
            found.update(used.reads, used.writes)
        elif is_collective(node) or is_unknown_communication(node.target):
            found.update(used.writes)
    return frozenset(found)


def _takes_place(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name
    if name in _BY_OFFSET:
        return argument(node, "storage_offset", None) is not None
    if node.target is torch.ops.aten.view.dtype:
        return _is_of_wider_elements(node)
    return name in _OTHERS


def _is_of_wider_elements(view: torch.fx.Node) -> bool:
    """Whether the elements of ``view`` are wider than before (unless both are known: in bodies they
    may not be).
    """
    (source,) = view.all_input_nodes
    now, before = list(tensors_of(view)), list(tensors_of(source))
    return not (now and before) or now[0].element_size() > before[0].element_size()
