"""Writes, shared storages and draws of a call of an operator, from its schema.

The schema comes first (``Tensor(a)``, ``Tensor(a!)``). Tables add the facts that it omits:
``_unsafe_view`` and ``unsafe_split`` promise nothing but return views; ``wait_tensor`` returns its
argument; batch norm in training writes its running statistics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from apsched.fx.collectives import is_communication
from apsched.fx.effects.effects import Effects
from apsched.torch_compat import graphs as torch_private
from apsched.torch_compat.effects import resolved_packet

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
    "aten::batch_norm": ("running_mean", "running_var"),
    "aten::_batch_norm_impl_index": ("running_mean", "running_var"),
    "aten::instance_norm": ("running_mean", "running_var"),
}
_TRAINING = ("training", "train", "use_input_stats")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Schema:
    """The schema of an operator, by names of arguments."""

    writes: tuple[str, ...]
    out: tuple[str, ...]
    """Of those written, the ones whose former content is not read (``out=``)."""
    shares: tuple[tuple[str, ...], ...]
    """For each return value the arguments that it may be a view of."""
    returns_nothing: bool
    draws: bool
    dropout: float
    """Share of elements that it drops where the call does not say; 1 where it has no such
    argument."""


def overload_of(node: torch.fx.Node) -> torch._ops.OpOverload | None:
    """Return the operator that ``node`` calls; of a packet the overload that runs on its arguments,
    or None."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target
    if not isinstance(node.target, torch._ops.OpOverloadPacket) or any(
        "val" not in n.meta for n in node.all_input_nodes
    ):
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    overload: torch._ops.OpOverload | None = resolved_packet(node.target, args, kwargs)
    return overload


def operator_effects(
    operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Effects:
    """Return the effects of ``operator`` on its arguments: nodes, values, or lists of them."""
    schema = _schema(operator)
    passed = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | dict(
        kwargs
    )
    writes = schema.writes
    if operator._schema.name in _WRITES_THOUGH_SILENT and not any(
        passed.get(name) for name in _TRAINING
    ):
        writes = ()
    return Effects(
        writes=tuple(passed[name] for name in writes if passed.get(name) is not None),
        out=tuple(passed[name] for name in schema.out if passed.get(name) is not None),
        shares=tuple(
            tuple(passed[name] for name in names if passed.get(name) is not None)
            for names in schema.shares
        ),
        # attention without dropout carries the tag but draws nothing
        draws=schema.draws and passed.get("dropout_p", schema.dropout) != 0.0,
        acts=schema.returns_nothing,
    )


def is_composite(operator: torch._ops.OpOverload) -> bool:
    """Whether ``operator`` is made of others, so that its schema may be silent: it shares, writes
    and draws as they do."""
    if operator._schema.name in _SHARES_THOUGH_SILENT or is_communication(operator):
        return False
    return torch_private.is_composite(operator)


@lru_cache(maxsize=4096)
def _schema(operator: torch._ops.OpOverload) -> _Schema:
    schema = operator._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    silent = _SHARES_THOUGH_SILENT.get(schema.name)
    return _Schema(
        writes=tuple(a.name for a in written) + _WRITES_THOUGH_SILENT.get(schema.name, ()),
        out=tuple(a.name for a in written if a.kwarg_only or a.is_out),
        shares=tuple(
            silent if silent is not None else _shared_with(schema, returned)
            for returned in schema.returns
        ),
        returns_nothing=not schema.returns and not schema.is_mutable,
        draws=torch.Tag.nondeterministic_seeded in operator.tags,
        dropout=_default_dropout(schema),
    )


def _default_dropout(schema: Any) -> float:
    defaults = {a.name: a.default_value for a in schema.arguments}
    stated = defaults.get("dropout_p")
    return 1.0 if stated is None else float(stated)


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
