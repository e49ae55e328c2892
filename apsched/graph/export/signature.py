"""The signature of an FX node: its computation, without names and without constants that differ
from process rank to process rank.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from apsched.graph.identity import digest
from apsched.torch_compat.sizes import size_hint

_NUMBERS = (bool, int, float, complex, str, torch.SymBool, torch.SymInt, torch.SymFloat)


def node_signature(
    node: torch.fx.Node,
    rank_of: Mapping[torch.fx.Node, int],
    group_size: int,
    *,
    sized: bool = True,
) -> str:
    """Return the digest of ``node``: operator, arguments by their structure, shapes, strides,
    dtypes and the size of its group (or 0); not ``sized``: dimensions in place of sizes.
    """
    call = (node.op, target_name(node), group_size)
    args = [_structure(a, rank_of) for a in node.args]
    kwargs = [
        (name, _structure(node.kwargs[name], rank_of))
        for name in sorted(node.kwargs)
        if name not in ("group_name", "pg_name")
    ]
    return digest(call, args, kwargs, _shape(node.meta.get("val"), sized=sized))


def target_name(node: torch.fx.Node) -> str:
    """Return a name of the target of ``node`` equal in every process: ``aten.mm.default``; empty
    for placeholders and attributes.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return ""
    if isinstance(node.target, str | torch._ops.OpOverload):
        return str(node.target)
    module = getattr(node.target, "__module__", "") or ""
    return f"{module}.{getattr(node.target, '__name__', type(node.target).__name__)}".removeprefix(
        "_"
    ).removeprefix(".")


def _structure(argument: Any, rank_of: Mapping[torch.fx.Node, int]) -> Any:
    """Return an argument with nodes replaced by their ranks and numbers by their type."""
    if isinstance(argument, torch.fx.Node):
        return rank_of[argument]
    if isinstance(argument, list | tuple):
        return [_structure(item, rank_of) for item in argument]
    if isinstance(argument, Mapping):
        return [(str(key), _structure(argument[key], rank_of)) for key in argument]
    if argument is None or isinstance(
        argument, bool | torch.dtype | torch.layout | torch.memory_format
    ):
        return str(argument)
    if isinstance(argument, torch.device):
        return argument.type
    return type(argument).__name__


def _shape(value: Any, *, sized: bool) -> Any:
    if isinstance(value, torch.Tensor) and not sized:
        return value.dim(), str(value.dtype), value.device.type
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return _hints(value.shape), _hints(strides), str(value.dtype), value.device.type
    if isinstance(value, list | tuple):
        return [_shape(item, sized=sized) for item in value]
    if isinstance(value, _NUMBERS):
        return type(value).__name__
    return type(None).__name__  # an opaque input, such as a device mesh: a trace has no value of it


def _hints(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Return sizes by their hints: names of symbols are not the same in every process."""
    return tuple(map(size_hint, sizes))
