"""Memory traffic of a node in bytes: its reads and writes of the storages behind its tensors.

Each tensor argument is read once and each result is written once; views touch nothing; an in-place
result is its argument, written once; an expanded argument counts the bytes behind it; lookups read
the rows they gather, not the table.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from apsched.fx.operands import shape_of, tensors_in, touched_bytes
from apsched.torch_compat.graphs import storage_key
from apsched.torch_compat.sizes import size_hint

COLLECTIVE_NAMESPACES = ("_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")
# read as many bytes as they give, besides indices
_LOOKUPS = frozenset(
    {
        "aten::embedding",
        "aten::index",
        "aten::index_select",
        "aten::gather",
        "aten::take",
        "aten::take_along_dim",
    }
)
# read and rewrite as many bytes of their first argument as the values have
_ROW_UPDATES = frozenset(
    {
        "aten::index_put_",
        "aten::_unsafe_index_put_",
        "aten::index_add_",
        "aten::index_copy_",
        "aten::scatter_",
        "aten::scatter_add_",
    }
)
_OVERWRITES = frozenset(
    {
        "aten::copy_",
        "aten::fill_",
        "aten::zero_",
        "aten::normal_",
        "aten::uniform_",
        "aten::bernoulli_",
        "aten::random_",
        "aten::_foreach_copy_",
    }
)
# views by their schema, which copy where the strides ask for it
_VIEW_OR_COPY = frozenset(
    {"aten::reshape", "aten::contiguous", "aten::flatten", "aten::reshape_as"}
)
_ALLOCATIONS = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
_NO_COPY = frozenset({"aten::_unsafe_view", "aten::lift_fresh", "prims::view_of"})


def op_name(target: object) -> str:
    """Return ``namespace::name`` of an operator without its overload; the plain name of any other
    callable.
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    return str(getattr(target, "__name__", target))


def touches_nothing(target: object, arguments: Mapping[str, Any], result: object) -> bool:
    """Say whether the node is a view, an allocation, or works on sizes alone: it takes no time on
    the device.
    """
    name = op_name(target)
    if name in _ALLOCATIONS or name in _NO_COPY:
        return True
    if isinstance(
        target, torch._ops.HigherOrderOperator
    ):  # one that returns nothing writes what it is handed (a Triton kernel)
        return next(tensors_in((list(arguments.values()), result)), None) is None
    if not isinstance(target, torch._ops.OpOverload):
        return name == "getitem" or next(tensors_in(result), None) is None
    if not target.is_view:
        # sizes, devices, scalars read back: no kernel, unless it writes in place and returns
        # nothing
        return next(tensors_in(result), None) is None and not target._schema.is_mutable
    return name not in _VIEW_OR_COPY or _shares_storage(arguments, result)


def traffic_bytes(target: object, arguments: Mapping[str, Any], result: object) -> int:
    """Return the bytes that the node reads and writes."""
    name = op_name(target)
    written = sum(map(touched_bytes, tensors_in(result)))
    if name in _LOOKUPS:
        _, *indices = arguments.values()
        return 2 * written + sum(map(touched_bytes, tensors_in(indices)))
    if name == "aten::nll_loss_forward":  # gathers one number a target
        picked: int = arguments["self"].element_size() * math.prod(shape_of(arguments["target"]))
        return picked + touched_bytes(arguments["target"]) + written
    if name == "aten::embedding_dense_backward":  # clears the table, then adds rows into it
        return (
            written
            + 3 * touched_bytes(arguments["grad_output"])
            + touched_bytes(arguments["indices"])
        )
    if name in _ROW_UPDATES:
        _, *rest = arguments.values()
        values = max(map(touched_bytes, tensors_in(rest)), default=0)
        return sum(map(touched_bytes, tensors_in(rest))) + 2 * values
    if (
        name == "bucketing::_pre_bucket_all_gather"
    ):  # fills this rank's slice of the gathered buffer
        return sum(map(touched_bytes, tensors_in(arguments["ag_ins"]))) + written // size_hint(
            arguments["group_size"]
        )
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        return _mutation_bytes(target, name, arguments, result)
    return _read_bytes(list(tensors_in(list(arguments.values())))) + written


def _mutation_bytes(
    target: torch._ops.OpOverload, name: str, arguments: Mapping[str, Any], result: object
) -> int:
    """In place and ``out=``: the written tensor is an argument; results that alias it are not
    written again.
    """
    reads: list[torch.Tensor] = []
    written = 0
    for argument in target._schema.arguments:
        tensors = list(tensors_in(arguments.get(argument.name)))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        written += sum(map(touched_bytes, tensors)) if is_written else 0
        if not is_written or not (argument.is_out or name in _OVERWRITES):
            reads += tensors
    results = result if isinstance(result, (list, tuple)) else (result,)
    fresh = [
        value
        for value, returned in zip(results, target._schema.returns, strict=False)
        if returned.alias_info is None
    ]
    return _read_bytes(reads) + written + sum(map(touched_bytes, tensors_in(fresh)))


def _read_bytes(tensors: list[torch.Tensor]) -> int:
    """Sum over storages; two views of one storage are read at most as often as the storage is
    large.
    """
    if len(tensors) < 2:
        return sum(map(touched_bytes, tensors))
    by_storage: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(storage_key(tensor), {})[id(tensor)] = tensor
    total = 0
    for views in by_storage.values():
        touched = sum(map(touched_bytes, views.values()))
        total += (
            touched
            if len(views) == 1
            else min(touched, size_hint(next(iter(views.values())).untyped_storage().nbytes()))
        )
    return total


def _shares_storage(arguments: Mapping[str, Any], result: object) -> bool:
    keys = {storage_key(tensor) for tensor in tensors_in(list(arguments.values()))}
    return all(storage_key(tensor) in keys for tensor in tensors_in(result))
