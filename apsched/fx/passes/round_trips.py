"""Values that are moved there and back: users of the result may take the original value
instead.
"""

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from apsched.fx.collectives import argument, group_name, input_nodes, is_wait_tensor
from apsched.fx.effects.of_node import effects_of
from apsched.fx.graph_copies import copied, finished
from apsched.fx.passes.layouts import is_part, moved_along, moves_of
from apsched.fx.passes.run_passes import Pass
from apsched.torch_compat.graphs import process_rank_in_group

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_ALIASES = (_aten.alias.default, _aten.detach.default)


def undo_round_trips(process_rank_of: Callable[[str], int] = process_rank_in_group) -> Pass:
    """Return the pass that rewires consumers past an alias, and past a redistribution that only
    undoes another (AutoParallel #479).

    Three things give back what went in: an alias; this process rank's own part of what it gathered;
    an all-to-all back to where another came from. Their consumers take the original, so that the
    redistributed value lives only for those who need it, and aliases and collectives that no
    node needs go. ``process_rank_of`` says which rank this process has in a group.

    Left alone is what a graph returns, since outputs may not become aliases of inputs, and what
    a node writes into.
    """

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        while pairs := _undone(result, process_rank_of):
            for node, original in pairs.items():
                while original in pairs:
                    original = pairs[original]
                node.replace_all_uses_with(original)
            finished(result)
        return result

    return Pass(name="undo_round_trips", run=run)


def _undone(module: GraphModule, process_rank_of: Callable[[str], int]) -> dict[Node, Node]:
    """Return each node whose value is that of an earlier one, with that one."""
    found: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.target in _ALIASES:
            found[node] = node.all_input_nodes[0]
        elif is_wait_tensor(node):
            start = node.all_input_nodes[0]
            if start.target is _c10d.all_gather_into_tensor.default:
                found |= _own_parts(node, start, process_rank_of)
            elif (
                start.target is _c10d.all_to_all_single.default
                and (source := _sent_back(start)) is not None
            ):
                found[node] = source
    return {
        node: original
        for node, original in found.items()
        if node.users and not _is_seen(node) and not _is_seen(original, inside=True)
    }


def _own_parts(wait: Node, start: Node, process_rank_of: Callable[[str], int]) -> dict[Node, Node]:
    """Return what is made of a gathered value, and is only what this process rank gave to it."""
    source = input_nodes(start)[0]
    value = source.meta["val"]
    candidates = [
        (node, layout)
        for node, layout in moves_of(wait)
        if isinstance(layout, torch.Tensor) and layout.shape == value.shape
    ]
    if not candidates:
        return {}
    offset = process_rank_of(group_name(start)) * value.numel()
    return {
        node: source
        for node, layout in candidates
        if is_part(layout, value.shape, offset) and _same_strides(node, source)
    }


def _sent_back(second: Node) -> Node | None:
    """Return what the all-to-all ``second`` brings back to where it came from."""
    node, chain = input_nodes(second)[0], list[Node]()
    while not is_wait_tensor(node) and len(node.all_input_nodes) == 1:
        chain.insert(0, node)
        node = node.all_input_nodes[0]
    if not is_wait_tensor(node):
        return None
    first = node.all_input_nodes[0]
    if first.target is not second.target or group_name(first) != group_name(second):
        return None
    splits, splits_back = (
        [argument(n, name, None) for name in names]
        for n, names in ((first, _SPLITS), (second, _SPLITS[::-1]))
    )
    value = node.meta["val"]
    source = input_nodes(first)[0]
    if (
        splits != splits_back
        or not is_part(moved_along(value, chain, node), value.shape, 0)
        or not _same_strides(second, source)
    ):
        return None
    return source


_SPLITS = ("output_split_sizes", "input_split_sizes")


def _same_strides(node: Node, source: Node) -> bool:
    own, other = node.meta["val"], source.meta["val"]
    return bool(
        own.shape == other.shape and own.stride() == other.stride() and own.dtype == other.dtype
    )


def _is_seen(node: Node, *, inside: bool = False) -> bool:
    """Return whether the caller sees the tensor of ``node``, or a node writes into it
    (``inside``: only the latter).
    """
    for user in node.users:
        if user.op == "output" and not inside:
            return True
        if effects_of(user).writes:
            return True
    return False
