"""Placement of collectives: FSDP collectives, which can move, and those on the path of compute."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from apsched.fx.collectives import is_all_gather
from apsched.fx.node_shards import PART_KEY
from apsched.kinds import NodeKind

_LIGHT = frozenset(
    # casts, copies and scalings: what stands between a parameter and its gather, or a reduced
    # gradient and the output
    (
        "aten::_to_copy",
        "aten::clone",
        "aten::contiguous",
        "aten::reshape",
        "aten::copy",
        "aten::copy_",
        "aten::constant_pad_nd",
        "aten::cat",
        "aten::slice",
        "aten::div",
        "aten::div_",
        "aten::mul",
        "aten::mul_",
        "aten::add",
        "aten::add_",
        "aten::sub",
        "aten::neg",
        "aten::to",
        "aten::detach",
        "aten::empty",
        "aten::new_empty",
        "aten::empty_like",
        "aten::zeros",
        "aten::new_zeros",
        "aten::full",
        "prims::convert_element_type",
        "bucketing::_pre_bucket_all_gather",
        "bucketing::_pre_bucket_reduce_scatter",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Ranks of the starts that can move, and why."""

    from_inputs: frozenset[int]
    to_outputs: frozenset[int]
    from_parts: frozenset[int]


def placement_of(
    nodes: Sequence[torch.fx.Node],
    kinds: Sequence[NodeKind],
    wait_of_start: Mapping[int, int],
    parameters: frozenset[str],
) -> Placement:
    """Return the ranks of FSDP collectives: their input comes from graph inputs alone, their output
    goes to graph outputs alone, or they gather the parts of a parameter that is resharded in its
    node.

    Between a graph input and a start may stand views, other FSDP collectives, and compute that
    serves starts only: casts and the like, or anything that derives from parameters alone
    (``parameters``: names of placeholders). Between a wait and the outputs may stand views, other
    FSDP collectives, and casts, scalings, copies and sums that take nothing else but graph inputs
    and results of other collectives. A copy into a tensor takes its source alone.
    """
    rank_of = {node: rank for rank, node in enumerate(nodes)}
    before = [[rank_of[n] for n in node.all_input_nodes] for node in nodes]
    after = [[rank_of[n] for n in node.users] for node in nodes]
    taken = [[rank_of[n] for n in _taken_by(node)] for node in nodes]
    start_of_wait = {wait: start for start, wait in wait_of_start.items()}
    gathered = _from_inputs(nodes, kinds, before, _serves_starts(kinds, after), parameters)
    finished = _to_outputs(nodes, kinds, taken, after, start_of_wait)
    return Placement(
        from_inputs=frozenset(start for start in wait_of_start if gathered[start]),
        to_outputs=frozenset(start for start, wait in wait_of_start.items() if finished[wait]),
        from_parts=frozenset(start for start in wait_of_start if _gathers_part(nodes[start])),
    )


def _gathers_part(start: torch.fx.Node) -> bool:
    """Return whether ``start`` gathers the parts of a parameter that is resharded in its node."""
    return is_all_gather(start) and any(PART_KEY in n.meta for n in start.all_input_nodes)


def _serves_starts(kinds: Sequence[NodeKind], after: Sequence[list[int]]) -> list[bool]:
    """Return for each node whether all it does ends in starts."""
    serves = [False] * len(kinds)
    for rank in reversed(range(len(kinds))):
        users = after[rank]
        serves[rank] = kinds[rank] is NodeKind.START or (
            bool(users) and all(serves[user] for user in users)
        )
    return serves


def _from_inputs(
    nodes: Sequence[torch.fx.Node],
    kinds: Sequence[NodeKind],
    before: Sequence[list[int]],
    serves: Sequence[bool],
    parameters: frozenset[str],
) -> list[bool]:
    """Return for each node whether it takes from graph inputs alone, through nodes that may travel
    with a collective.
    """
    result = [False] * len(nodes)
    from_parameters = [False] * len(nodes)
    for rank, node in enumerate(nodes):
        if kinds[rank] is NodeKind.INPUT:
            result[rank] = True
            from_parameters[rank] = node.name in parameters
            continue
        result[rank] = all(result[b] for b in before[rank])
        from_parameters[rank] = all(from_parameters[b] for b in before[rank])
        if kinds[rank] is NodeKind.COMPUTE:
            result[rank] = (
                result[rank] and serves[rank] and (_is_light(node) or from_parameters[rank])
            )
    return result


def _to_outputs(
    nodes: Sequence[torch.fx.Node],
    kinds: Sequence[NodeKind],
    before: Sequence[list[int]],
    after: Sequence[list[int]],
    start_of_wait: Mapping[int, int],
) -> list[bool]:
    """Return for each node whether its result goes to graph outputs alone, through nodes that may
    travel with a collective.
    """
    view_of_input = [False] * len(nodes)
    reduced = [False] * len(nodes)
    for rank, kind in enumerate(kinds):
        view_of_input[rank] = kind is NodeKind.INPUT or (
            kind is NodeKind.VIEW and all(view_of_input[b] for b in before[rank])
        )
        reduced[rank] = kind is NodeKind.WAIT or (
            kind in (NodeKind.VIEW, NodeKind.COMPUTE)
            and any(reduced[b] for b in before[rank])
            and all(reduced[b] or view_of_input[b] for b in before[rank])
        )
    result = [False] * len(nodes)
    for rank in reversed(range(len(nodes))):
        kind = kinds[rank]
        ends = all(result[user] for user in after[rank])
        if kind is NodeKind.OUTPUT:
            result[rank] = True
        elif kind is NodeKind.COMPUTE:
            others = [b for b in before[rank] if not view_of_input[b]]
            added = len(others) <= 1 or all(reduced[b] for b in others)
            result[rank] = ends and _is_light(nodes[rank]) and added
        elif kind in (NodeKind.VIEW, NodeKind.WAIT, NodeKind.START):
            result[rank] = ends
    return result


def _taken_by(node: torch.fx.Node) -> Sequence[torch.fx.Node]:
    """Return the nodes whose values ``node`` takes: of the tensor that ``aten.copy`` copies into
    only the shape counts. DDP in a graph copies each sum into its gradient
    (torch/nn/parallel/distributed.py, ``_register_accum_grad_hook``).
    """
    if node.target is torch.ops.aten.copy.default:
        return [n for n in node.args[1:2] if isinstance(n, torch.fx.Node)]
    return node.all_input_nodes


def _is_light(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _LIGHT
