"""The kernels of a graph and their memory traffic, fused as Inductor fuses them
(torch/_inductor/ir.py, scheduler.py).

A *fusible* node is a pointwise operator, a reduction, or a copy that changes a layout. A pointwise
one whose users are all fusible is *inlined*: every kernel that needs it computes it again, and no
kernel writes it, unless several nodes take it and it reads much (``realize_reads_threshold``). The
other fusible nodes are *written*: each reads its sources through inlined nodes and views.

Two written nodes are in one kernel if they run over the same number of elements, the same number of
matrix products, attentions or waits lies behind both, and either one reads the result of the other,
or both read the same value and have results of one size. A kernel reads each value from outside
once, writes each value needed outside once, and has one floor. Nodes in place, random ones, and
copies into or out of a bucket stay alone. All of this follows from the dependencies, not from the
order, so that a schedule changes no price.

But a schedule may *cut* a kernel at a node: it runs other work between the earlier nodes of the
kernel and the nodes from that node on. The latter then carry a mark, and nodes with different marks
are in different kernels. A value that passes between the pieces is written and read, a value that
both read is read twice, and each piece has a floor.
"""

from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from apsched.costs.compute.flops import has_flops
from apsched.costs.compute.traffic import COLLECTIVE_NAMESPACES, op_name, touches_nothing
from apsched.fx.operands import (
    bound_arguments,
    result_of,
    shape_of,
    tensors_in,
    touched_bytes,
    value_of,
)
from apsched.fx.tensors import is_cast

_ALSO_POINTWISE = frozenset(
    {
        "aten::_to_copy",
        "prims::convert_element_type",
        "aten::clone",  # where it stands between others: to change a layout
        "aten::cat",  # lowered to a choice by index
        "aten::stack",
        "aten::constant_pad_nd",
        "aten::triu",
        "aten::tril",
        # a reduction inside, which the same kernel reads: taken as read once
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::_log_softmax",
        "aten::_log_softmax_backward_data",
        "aten::nll_loss_backward",  # a choice by the target's index
    }
)
_COPIES = frozenset({"aten::clone", "aten::cat", "aten::stack"})
_NOT_READ = {"aten::nll_loss_backward": "self"}
_REDUCTIONS = frozenset(
    {
        "aten::sum",
        "aten::mean",
        "aten::amax",
        "aten::amin",
        "aten::var",
        "aten::var_mean",
        "aten::prod",
        "aten::logsumexp",
    }
)
PIECE = "apsched_piece"
"""Key in a node's ``meta``: which piece of a kernel that was cut it is in; the empty string where
there is none.
"""
_MAX_CUT_SIZE = (
    64  # torch/_inductor/config.py: max_fusion_size; each cut of a kernel prices all of its nodes
)
_MAX_INLINED_READS = 4  # torch/_inductor/config.py: realize_reads_threshold


@dataclass(frozen=True, slots=True)
class Share:
    """The contribution of a node to its kernel."""

    traffic_bytes: int
    first: bool
    """It pays the floor of the kernel."""


@dataclass(slots=True)
class Fusion:
    """Everything about a graph that decides kernels, as :func:`fuse` finds it."""

    free: set[torch.fx.Node]
    level: dict[torch.fx.Node, int]
    """Most products and waits on a way to the node."""
    fusible: list[torch.fx.Node]
    """By the fusible nodes on a way to them, then by name."""
    place: dict[torch.fx.Node, int]
    """In ``fusible``."""
    reads: dict[torch.fx.Node, dict[torch.fx.Node, None]]
    """For each fusible node the tensors that it reads: results of written and of other nodes, or
    views of them, in order.
    """
    kernel: dict[torch.fx.Node, torch.fx.Node]
    """For each written node, which is a fusible one that is not inlined, the one that names its
    kernel.
    """


def fused_kernels(graph: torch.fx.Graph, fusion: Fusion | None = None) -> list[list[torch.fx.Node]]:
    """Return the nodes of every kernel of two or more, each in graph order; an inlined node is in
    the first that needs it. ``fusion`` is that of ``graph`` where it is known.
    """
    return _kernels(graph, fusion or fuse(graph))


def fused_shares(graph: torch.fx.Graph, fusion: Fusion | None = None) -> dict[torch.fx.Node, Share]:
    """Return the share of every fusible node that is in a kernel with another, inlined ones among
    them; the rest is priced alone.
    """
    fusion = fusion or fuse(graph)
    return _shares(fusion, fusion.fusible, fusion.kernel)


def shares_if_cut(
    graph: torch.fx.Graph, fusion: Fusion | None = None
) -> dict[torch.fx.Node, dict[torch.fx.Node, Share | None]]:
    """Return for each node before which its kernel may be cut the shares that written nodes then
    have; ``None``: the node is priced alone.

    No node costs less than in the whole kernel: a value that it reads first there it reads first in
    its piece, a value needed outside of the kernel is needed outside of the piece, and the first
    node of the kernel is the first of a piece. Long kernels stay whole.
    """
    fusion = fusion or fuse(graph)
    cuts: dict[torch.fx.Node, dict[torch.fx.Node, Share | None]] = {}
    for nodes in _kernels(graph, fusion):
        written = [node for node in nodes if node in fusion.kernel]
        if len(written) > _MAX_CUT_SIZE:
            continue
        in_depth = sorted(written, key=fusion.place.__getitem__)
        known: dict[int, dict[torch.fx.Node, Share | None]] = {}
        num_before = 0
        for node in nodes:
            if 0 < num_before < len(written):
                if num_before not in known:
                    known[num_before] = _shares_in_two(
                        fusion, in_depth, frozenset(written[num_before:])
                    )
                cuts[node] = known[num_before]
            num_before += node in fusion.kernel
    return cuts


def _shares_in_two(
    fusion: Fusion, written: list[torch.fx.Node], later: frozenset[torch.fx.Node]
) -> dict[torch.fx.Node, Share | None]:
    """Return the shares of the ``written`` nodes of one kernel where ``later`` ones are apart from
    the others.
    """
    parent = {node: node for node in written}
    _join(fusion, written, parent, lambda node: node in later)
    shares = _shares(fusion, written, ChainMap(parent, fusion.kernel))
    return {node: shares.get(node) for node in written}


def _kernels(graph: torch.fx.Graph, fusion: Fusion) -> list[list[torch.fx.Node]]:
    rank = {node: k for k, node in enumerate(graph.nodes)}
    kernel_of = dict(fusion.kernel)
    for node in reversed(fusion.fusible):
        if node not in kernel_of:
            users = [user for user in _users_behind_views(node, fusion.free) if user in kernel_of]
            nearest = min(users, key=lambda user: (fusion.level[user], user.name), default=None)
            if nearest is not None:
                kernel_of[node] = kernel_of[nearest]
    kernels: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node, kernel in kernel_of.items():
        kernels.setdefault(kernel, []).append(node)
    ordered = (sorted(nodes, key=rank.__getitem__) for nodes in kernels.values() if len(nodes) > 1)
    return sorted(ordered, key=lambda nodes: rank[nodes[0]])


def _shares(
    fusion: Fusion, nodes: Iterable[torch.fx.Node], kernel: Mapping[torch.fx.Node, torch.fx.Node]
) -> dict[torch.fx.Node, Share]:
    """Return the shares of ``nodes``, whole kernels in the order of ``fusion.fusible``, where
    ``kernel`` says who is in which.
    """
    nodes = list(nodes)
    sizes = Counter(kernel[node] for node in nodes if node in kernel)
    begun: set[torch.fx.Node] = set()
    read: set[tuple[torch.fx.Node, torch.fx.Node]] = set()
    unread_bytes: dict[tuple[torch.fx.Node, torch.fx.Node], int] = {}
    shares: dict[torch.fx.Node, Share] = {}
    for node in nodes:
        own_kernel = kernel.get(node)
        if own_kernel is None:
            shares[node] = Share(0, False)
            continue
        if sizes[own_kernel] == 1 and not _takes_inlined(node, fusion):
            continue
        traffic = 0
        for taken in fusion.reads[node]:
            source = _behind_views(taken, fusion.free)
            if kernel.get(source) is not own_kernel and (own_kernel, taken) not in read:
                read.add((own_kernel, taken))
                left = unread_bytes.setdefault(
                    (own_kernel, source), max(_bytes_of(source), _bytes_of(taken))
                )
                unread_bytes[own_kernel, source] = left - min(left, _bytes_of(taken))
                traffic += min(left, _bytes_of(taken))
        if _is_needed_outside(node, own_kernel, fusion, kernel):
            traffic += _bytes_of(node)
        shares[node] = Share(traffic, own_kernel not in begun)
        begun.add(own_kernel)
    return shares


def _bytes_of(node: torch.fx.Node) -> int:
    return sum(map(touched_bytes, tensors_in(value_of(node))))


def _takes_inlined(node: torch.fx.Node, fusion: Fusion) -> bool:
    sources = (_behind_views(taken, fusion.free) for taken in node.all_input_nodes)
    return any(source in fusion.reads and source not in fusion.kernel for source in sources)


def _is_needed_outside(
    node: torch.fx.Node,
    own_kernel: torch.fx.Node,
    fusion: Fusion,
    kernel: Mapping[torch.fx.Node, torch.fx.Node],
) -> bool:
    """Say whether anything but the kernel ``own_kernel`` takes the result of ``node``, directly
    or through inlined nodes.
    """
    seen: set[torch.fx.Node] = set()
    stack = _users_behind_views(node, fusion.free)
    while stack:
        user = stack.pop()
        if user in fusion.reads and user not in fusion.kernel:
            if user not in seen:
                seen.add(user)
                stack += _users_behind_views(user, fusion.free)
        elif kernel.get(user) is not own_kernel:
            return True
    return False


def fuse(graph: torch.fx.Graph) -> Fusion:
    """Return everything that decides the kernels of ``graph``."""
    free = {node for node in graph.nodes if _is_free(node)}
    level, fusible = _levels(graph, free)
    chosen = set(fusible)
    reads: dict[torch.fx.Node, dict[torch.fx.Node, None]] = {}
    written: list[torch.fx.Node] = []
    inlined: set[torch.fx.Node] = set()
    for node in fusible:
        node_reads: dict[torch.fx.Node, None] = {}
        for taken in _read_arguments(node):
            source = _behind_views(taken, free)
            node_reads.update(reads[source] if source in inlined else {taken: None})
        reads[node] = node_reads
        users = _users_behind_views(node, free)
        is_taken_inside = bool(users) and all(user in chosen for user in users)
        reads_little = len(users) == 1 or len(node_reads) <= _MAX_INLINED_READS
        if is_taken_inside and reads_little and op_name(node.target) not in _REDUCTIONS:
            inlined.add(node)
        else:
            written.append(node)
    fusion = Fusion(
        free=free,
        level=level,
        fusible=fusible,
        place={node: k for k, node in enumerate(fusible)},
        reads=reads,
        kernel={node: node for node in written},
    )
    _join(fusion, written, fusion.kernel, lambda node: node.meta.get(PIECE, ""))
    return fusion


def _join(
    fusion: Fusion,
    nodes: list[torch.fx.Node],
    parent: dict[torch.fx.Node, torch.fx.Node],
    piece: Callable[[torch.fx.Node], object],
) -> None:
    """Put written nodes into kernels, in ``parent``: those that read one another, or that read the
    same, in one piece.
    """
    readers: dict[tuple[torch.fx.Node, int, int, int, object], torch.fx.Node] = {}

    def find(node: torch.fx.Node) -> torch.fx.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in nodes:
        elements, result = _elements(node), _result_elements(node)
        may_vanish = is_cast(node) and _is_sent(node, fusion.free)  # a copy-in casts on the way
        for taken in fusion.reads[node]:
            source = _behind_views(taken, fusion.free)
            if source in fusion.kernel:
                near = (
                    source in parent
                    and fusion.level[source] == fusion.level[node]
                    and _elements(source) == elements
                )
                if near and piece(source) == piece(node):
                    parent[find(node)] = find(source)
            elif not (_is_received(source) or may_vanish):
                other = readers.setdefault(
                    (source, fusion.level[node], elements, result, piece(node)), node
                )
                parent[find(node)] = find(other)
    for node in nodes:
        parent[node] = find(node)


def _elements(node: torch.fx.Node) -> int:
    """Return the number of elements that the node runs over: those of its result, or of the input
    of its reduction.
    """
    if op_name(node.target) in _REDUCTIONS:
        return max(
            (
                prod(shape_of(tensor))
                for taken in node.all_input_nodes
                for tensor in tensors_in(value_of(taken))
            ),
            default=0,
        )
    return _result_elements(node)


def _result_elements(node: torch.fx.Node) -> int:
    return max((prod(shape_of(tensor)) for tensor in tensors_in(value_of(node))), default=0)


def _levels(
    graph: torch.fx.Graph, free: set[torch.fx.Node]
) -> tuple[dict[torch.fx.Node, int], list[torch.fx.Node]]:
    """Return for each node the most products and waits on a path to it, and the fusible nodes,
    sorted by the most fusible nodes on a path to them, then by name.

    The result of a bucket's member has the counts that it has if that member is launched alone.
    """
    level: dict[torch.fx.Node, int] = {}
    depth: dict[torch.fx.Node, int] = {}
    of_member: dict[str, tuple[int, int]] = {}
    fusible = []
    for node in graph.nodes:
        level[node] = max((level[taken] for taken in node.all_input_nodes), default=0)
        depth[node] = max((depth[taken] for taken in node.all_input_nodes), default=0)
        for member, sent, casts in _members_sent(node):
            of_member[member] = level[sent] + 1, depth[sent] + casts
        members = _note(node).get("members", ())
        if len(members) == 1 and members[0] in of_member:
            level[node], depth[node] = of_member[members[0]]
        elif node.op == "call_function" and (has_flops(node.target) or _waits(node)):
            level[node] += 1
        elif (
            node.op == "call_function"
            and node not in free
            and _is_fusible(node)
            and not _copies_bucket(node, free)
        ):
            depth[node] += 1
            fusible.append(node)
    return level, sorted(fusible, key=lambda node: (depth[node], node.name))


def _members_sent(node: torch.fx.Node) -> Iterator[tuple[str, torch.fx.Node, bool]]:
    """Yield each member of the bucket that ``node`` copies in, or launches without a copy: its
    name, the value that it sends, and whether the copy casts that value.
    """
    lists = [argument for argument in node.args if isinstance(argument, list)]
    if _note(node).get("role") in ("copy_in", "start") and lists:
        for member, place, sent in zip(_note(node)["members"], lists[0], lists[-1], strict=True):
            yield member, sent, value_of(place).dtype != value_of(sent).dtype


def _is_fusible(node: torch.fx.Node) -> bool:
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or target._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
    ):
        return False
    if _has_role(node) or next(tensors_in(node.meta.get("val")), None) is None:
        return False
    name = op_name(target)
    return torch.Tag.pointwise in target.tags or name in _ALSO_POINTWISE or name in _REDUCTIONS


def _copies_bucket(node: torch.fx.Node, free: set[torch.fx.Node]) -> bool:
    """Say whether the node copies into or out of the buffer of a collective: by any author of
    the bucket, it costs the bytes that it moves.
    """
    if op_name(node.target) not in _COPIES:
        return False
    return _is_sent(node, free) or any(
        _is_received(_behind_views(taken, free)) for taken in node.all_input_nodes
    )


def _read_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes whose values the operator reads, not only the shape of."""
    unread = _NOT_READ.get(op_name(node.target))
    if unread is None:
        return list(node.all_input_nodes)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    skipped = node.args[names.index(unread)]
    return [taken for taken in node.all_input_nodes if taken is not skipped]


def _is_collective(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and op_name(node.target).startswith(COLLECTIVE_NAMESPACES)


def _is_sent(node: torch.fx.Node, free: set[torch.fx.Node]) -> bool:
    """Say whether a collective takes the value, alone or in a bucket."""
    return any(_is_collective(user) or _has_role(user) for user in _users_behind_views(node, free))


def _is_received(node: torch.fx.Node) -> bool:
    """Say whether a bucket may give this value as a part of a larger one: sharing it must not join
    kernels.
    """
    return _waits(node) or _has_role(node)


def _note(node: torch.fx.Node) -> Mapping[str, Any]:
    """Return the note of write-back on a node that it made (``apsched.writeback.emit``); empty for
    others.
    """
    note: Mapping[str, Any] = node.meta.get("apsched", {})
    return note


def _has_role(node: torch.fx.Node) -> bool:
    return bool(_note(node).get("role", ""))


def _is_free(node: torch.fx.Node) -> bool:
    """Whether ``node`` shows memory of its first input, or works on sizes; a wait is a border,
    whatever it shows, and so are nodes of a bucket.
    """
    if node.op != "call_function" or _waits(node) or _has_role(node):
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
