"""Floating point operations of a node: torch's registry, corrected and completed. A multiply-add is
two.

Beyond ``torch.utils.flop_counter``: causal attention computes only the pairs below the diagonal;
the attention kernels for CPU and for other backends have formulas; grouped matrix products
(experts) have one, and so have products with scales, with an activation, of integers, of
asynchronous tensor parallelism, and ``linear``; of packed sequences (``varlen_attn``) the tokens
are counted, not so many of the longest. ``flex_attention`` counts as dense attention times the
share of the blocks that its mask keeps: 1 less the ``sparsity_hint`` in ``meta["custom"]`` (torch's
own), or as the block mask says where that is a constant of the graph, else 1; the operations of
``score_mod`` on each score are not counted.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry

from apsched.costs.compute.fused_transfers import multiplies_and_transfers, product_flops
from apsched.costs.compute.traffic import op_name
from apsched.errors import InputError
from apsched.fx.effects.of_node import attribute_of
from apsched.fx.operands import shape_of, tensors_in
from apsched.torch_compat.sizes import size_hint

_GROUPED = frozenset(
    {"aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"}
)
# products that the registry lacks: the name of the argument whose last dimension is summed over
_SUMMED_OVER = {
    "aten::_scaled_mm_v2": "self",
    "aten::_int_mm": "self",
    "aten::_addmm_activation": "mat1",
    "aten::addmm_": "mat1",
    "aten::baddbmm_": "batch1",
    "aten::linear": "input",
}

_PACKED = "torch_attn::_varlen_attn"
_FLEX = ("flex_attention", "flex_attention_backward")
_KV_NUM_BLOCKS, _KV_INDICES, _FULL_KV_NUM_BLOCKS = 2, 3, 4
"""Places in a block mask as a tuple (torch/nn/attention/flex_attention.py, BlockMask.as_tuple)."""
_ATTENTIONS = ("aten::_scaled_dot_product", _PACKED)


def is_attention(name: str) -> bool:
    """Say whether the operator is a fused attention kernel."""
    return "attention" in name or "_attn" in name


def is_grouped(name: str) -> bool:
    """Say whether the operator multiplies one pair of matrices a group."""
    return name in _GROUPED


def has_flops(target: object) -> bool:
    """Say whether the operator is a matrix product, a convolution or attention."""
    name = op_name(target)
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    return (
        name.startswith(_ATTENTIONS)
        or name in _GROUPED
        or name in _SUMMED_OVER
        or multiplies_and_transfers(name)
        or packet in flop_registry
    )


def count_flops(node: torch.fx.Node, arguments: Mapping[str, Any], result: object) -> int:
    """Return the operations of matrix products, convolutions and attention; 0 for all else, which
    memory bounds.
    """
    target, name = node.target, op_name(node.target)
    if name.startswith("aten::_scaled_dot_product") and "query" in arguments:
        return _attention_flops(arguments)
    if name.startswith(_PACKED) or arguments.get("cum_seq_q") is not None:
        return _packed_flops(arguments)
    if name in _GROUPED:
        return _grouped_flops(*list(tensors_in(list(arguments.values())))[:2])
    if name in _SUMMED_OVER:
        return (
            2
            * sum(prod(shape_of(tensor)) for tensor in tensors_in(result))
            * shape_of(arguments[_SUMMED_OVER[name]])[-1]
        )
    if multiplies_and_transfers(name):
        return product_flops(name, arguments, result)
    if name in _FLEX:
        return _flex_flops(node, arguments, backward=name == _FLEX[1])
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    flops = _registered_flops(formula, node, arguments, result)
    return flops // 2 if arguments.get("is_causal") or arguments.get("custom_mask_type") else flops


def _registered_flops(
    formula: Any, node: torch.fx.Node, arguments: Mapping[str, Any], result: object
) -> int:
    """Call a formula of the registry: one that torch wraps takes shapes, with that of the result as
    ``out_shape`` (torch/utils/flop_counter.py, shape_wrapper); the others take tensors.
    """
    of_shapes = getattr(formula, "__wrapped__", None)
    values = [value if of_shapes is None else _shapes(value) for value in arguments.values()]
    positional = values[: len(node.args)]
    keywords = dict(zip(node.kwargs, values[len(node.args) :], strict=True))
    try:
        if of_shapes is not None:
            return size_hint(of_shapes(*positional, **keywords, out_shape=_shapes(result)))
        return size_hint(formula(*positional, **keywords, out_val=result))
    except (AssertionError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"cannot count the operations of node {node.name!r} ({node.target}): torch's formula"
            f" refuses its arguments ({error})"
        ) from error


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return shape_of(value)
    return [_shapes(item) for item in value] if isinstance(value, (list, tuple)) else value


def _packed_flops(arguments: Mapping[str, Any]) -> int:
    """Sequences one after the other, T tokens in n of them, the longest Q by K: no more than T K
    pairs, nor n Q K; a window bounds K.
    """
    num_tokens, heads, dim = shape_of(arguments["query"])
    value_dim = shape_of(arguments["value"])[-1]
    ends = arguments.get("cu_seq_q", arguments.get("cum_seq_q"))
    num_sequences, longest, keys = (
        shape_of(ends)[0] - 1,
        size_hint(arguments["max_q"]),
        size_hint(arguments["max_k"]),
    )
    left, right = arguments.get("window_size") or (
        arguments.get("window_size_left"),
        arguments.get("window_size_right"),
    )
    left, right = (
        None if side is None or size_hint(side) < 0 else size_hint(side) for side in (left, right)
    )
    causal = bool(arguments.get("is_causal")) or (left is None and right == 0)
    queries = min(num_tokens, num_sequences * longest)
    if left is not None and (causal or right is not None) and left + (right or 0) + 1 < keys:
        pairs = queries * (left + (0 if causal else right or 0) + 1)
    else:
        pairs = queries * (keys + 1) // 2 if causal else queries * keys
    backward = "grad_out" in arguments
    return 2 * heads * pairs * (3 * dim + 2 * value_dim if backward else dim + value_dim)


def _attention_flops(arguments: Mapping[str, Any]) -> int:
    """Two products forward; backward five: scores again, and two for each of the forward ones
    (FlashAttention, arXiv 2205.14135).
    """
    batch, heads, num_queries, dim = shape_of(arguments["query"])
    num_keys, value_dim = shape_of(arguments["value"])[-2:]
    pairs = (
        _causal_pairs(num_queries, num_keys)
        if arguments.get("is_causal")
        else num_queries * num_keys
    )
    backward = "grad_out" in arguments or "grad_out_" in arguments
    dims = 3 * dim + 2 * value_dim if backward else dim + value_dim
    return 2 * batch * heads * pairs * dims


def _flex_flops(node: torch.fx.Node, arguments: Mapping[str, Any], *, backward: bool) -> int:
    batch, heads, num_queries, dim = shape_of(arguments["0"])
    num_keys, value_dim = shape_of(arguments["2"])[-2:]
    dims = 3 * dim + 2 * value_dim if backward else dim + value_dim
    return round(2 * batch * heads * num_queries * num_keys * dims * _kept_share(node))


def _kept_share(node: torch.fx.Node) -> float:
    hint = node.meta.get("custom", {}).get("sparsity_hint")
    if isinstance(hint, int | float):
        return 1.0 - min(max(hint, 0.0), 1.0)
    mask = next((a for a in node.args if isinstance(a, list | tuple) and len(a) > _KV_INDICES), ())
    kept, indices, full = (
        _constant(mask[place]) if len(mask) > place else None
        for place in (_KV_NUM_BLOCKS, _KV_INDICES, _FULL_KV_NUM_BLOCKS)
    )
    if kept is None or indices is None or not indices.numel():
        return 1.0
    num_kept = int(kept.sum()) + (0 if full is None else int(full.sum()))
    return min(num_kept / indices.numel(), 1.0)


def _constant(argument: Any) -> torch.Tensor | None:
    """Return the tensor that a get_attr node reads, where its numbers are known."""
    if not isinstance(argument, torch.fx.Node) or argument.op != "get_attr":
        return None
    value = attribute_of(argument)
    known = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return value if known and value.device.type != "meta" else None


def _causal_pairs(num_queries: int, num_keys: int) -> int:
    """Query i sees keys 0 to i (torch aligns ``is_causal`` at the top left)."""
    square = min(num_queries, num_keys)
    return square * (square + 1) // 2 + (num_queries - square) * num_keys


def _grouped_flops(left: torch.Tensor, right: torch.Tensor) -> int:
    """Each row (or column, or slice of the inner dim) belongs to one group, so the groups together
    are one product.

    2-D by 3-D: M x K rows by their group's K x N; 3-D by 2-D: the same from the right; 2-D by 2-D:
    the inner dim is cut; 3-D by 3-D: a batched product.
    """
    batches = shape_of(left)[:-2] if left.dim() == right.dim() == 3 else ()
    rows, inner = shape_of(left)[-2:]
    return 2 * prod(batches) * rows * inner * shape_of(right)[-1]
