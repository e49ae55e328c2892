"""Which storages a call shares with its arguments, and which it writes.

The operator's schema is asked first (``Tensor(a)``, ``Tensor(a!)``). Where a schema leaves it open
or is silent, reality decides: ``reshape`` and its like copy when they must, which one run on fake
tensors tells; ``_unsafe_view`` and ``unsafe_split`` promise nothing but return views;
``wait_tensor`` returns its argument. Without a schema (higher-order operators, python functions)
the fake results tell, when they share a storage with a fake argument.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from apsched.fx.tensors import storage_key
from apsched.torch_compat import graphs as torch_private

_SHARES_THOUGH_SILENT = {
    "aten::_unsafe_view": ("self",),
    "aten::unsafe_split": ("self",),
    "aten::unsafe_split_with_sizes": ("self",),
    "_c10d_functional::wait_tensor": ("tensor",),
    "_c10d_functional_autograd::wait_tensor": ("tensor",),
    "c10d_functional::wait_tensor": ("self",),
    "_c10d_functional::_wrap_tensor_autograd": ("input",),
}
# running statistics in training mode (aten/src/ATen/native/Normalization.cpp)
_WRITES_THOUGH_SILENT = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorEffects:
    """What the schema of an operator says, by names of arguments."""

    writes: tuple[str, ...]
    out: tuple[str, ...]
    """Of those written, the ones whose former content is not read (``out=``)."""
    shares: tuple[tuple[str, ...], ...]
    """For each return value the arguments that it may be a view of."""
    may_copy: bool
    """A view where the layout allows it, else a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEffects:
    """What one call does; arguments are given by what was passed (nodes, or lists of nodes)."""

    writes: tuple[Any, ...] = ()
    out: tuple[Any, ...] = ()
    shares: tuple[tuple[Any, ...], ...] = field(default=())
    """For each return value the arguments that it shares storage with."""
    by_identity: bool = False
    """Nothing is known but the fake results: a shared fake storage is a shared storage."""


def call_effects(node: torch.fx.Node) -> CallEffects:
    """Return what the call ``node`` writes and shares."""
    if not isinstance(node.target, torch._ops.OpOverload):
        mutates = getattr(node.target, "__name__", "") == "triton_kernel_wrapper_mutation"
        return CallEffects(by_identity=True, writes=tuple(node.all_input_nodes) if mutates else ())
    effects = operator_effects(node.target)
    passed = bound_arguments(node)
    writes = effects.writes
    if (
        writes
        and node.target._schema.name in _WRITES_THOUGH_SILENT
        and not passed.get("training", passed.get("train"))
    ):
        writes = ()
    shares = effects.shares
    if effects.may_copy and any(shares) and _copies(node):
        shares = tuple(() for _ in shares)
    return CallEffects(
        writes=tuple(passed[name] for name in writes if passed.get(name) is not None),
        out=tuple(passed[name] for name in effects.out if passed.get(name) is not None),
        shares=tuple(
            tuple(passed[name] for name in names if passed.get(name) is not None)
            for names in shares
        ),
    )


def bound_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Return what was passed to an operator call, by the names of its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = (a.name for a in node.target._schema.arguments)
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


@lru_cache(maxsize=4096)
def operator_effects(operator: torch._ops.OpOverload) -> OperatorEffects:
    """Return what the schema of ``operator`` says, corrected where it is known to be silent."""
    schema = operator._schema
    writes = tuple(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )
    silent = _SHARES_THOUGH_SILENT.get(schema.name)
    shares = tuple(
        silent if silent is not None else _shared_with(schema, returned)
        for returned in schema.returns
    )
    return OperatorEffects(
        writes=writes + _WRITES_THOUGH_SILENT.get(schema.name, ()),
        out=tuple(
            a.name
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and (a.kwarg_only or a.is_out)
        ),
        shares=shares,
        may_copy=not writes and silent is None and torch_private.is_composite(operator),
    )


def _shared_with(schema: Any, returned: Any) -> tuple[str, ...]:
    if returned.alias_info is None:
        return ()
    annotated = [a for a in schema.arguments if a.alias_info is not None]
    wanted = returned.alias_info.before_set | returned.alias_info.after_set
    if not wanted:  # a list of views, Tensor(a)[]: python does not show the set of its elements
        return tuple(a.name for a in annotated)
    return tuple(
        a.name for a in annotated if wanted & (a.alias_info.before_set | a.alias_info.after_set)
    )


def _copies(node: torch.fx.Node) -> bool:
    """Whether a call that is a view where it can be one is a copy here, found by running it on the
    fake tensors of its arguments.
    """
    values = [n.meta.get("val") for n in node.all_input_nodes]
    result = node.meta.get("val")
    if (mode := torch_private.fake_mode_of(values)) is not None:
        try:
            with mode, torch.no_grad():
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                result = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # what fake tensors cannot run, the schema decides
            return False
    shared = {storage_key(value) for value in values if isinstance(value, torch.Tensor)}
    return all(
        storage_key(leaf) not in shared
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor)
    )
