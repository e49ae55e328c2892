"""Effects of a call of a python function, found by watching it run on the fake tensors of its
arguments.

Only torch's own functions and python's operators are run: they have exactly the effects of the
operators that they dispatch. The same holds for operators that are made of others (``aten.dropout``
returns its argument outside of training).
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from apsched.errors import InputError
from apsched.fx.collectives import ANY_GROUP, is_communication
from apsched.fx.effects.effects import Effects, unknown_effects
from apsched.fx.effects.operators import operator_effects
from apsched.torch_compat import graphs as torch_private
from apsched.torch_compat.effects import is_torch_function, watched

_RESIZES_STORAGE = "inductor::resize_storage_bytes_"
_RESHAPES_IN_PLACE = frozenset(("aten::resize_", "aten::resize_as_", "aten::set_"))
_NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (
    *_NUMBERS,
    str,
    slice,
    range,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_PURE_BUILTINS = (
    abs,
    all,
    any,
    bool,
    divmod,
    float,
    getattr,
    int,
    len,
    list,
    max,
    min,
    pow,
    range,
    round,
    slice,
    sum,
    tuple,
)
_ASSERTS = (print, torch._assert, torch._check)
_IN_PLACE = frozenset(
    (
        "setitem",
        "delitem",
        "iadd",
        "iand",
        "iconcat",
        "ifloordiv",
        "ilshift",
        "imatmul",
        "imod",
        "imul",
        "ior",
        "ipow",
    )
)
_IN_PLACE |= frozenset(("irshift", "isub", "itruediv", "ixor"))


def resizing_effects(
    target: torch._ops.OpOverload, nodes: Sequence[torch.fx.Node]
) -> Effects | None:
    """Return the effects of an operator that changes the size of a storage; None of any other.

    Where it changes the shape of a tensor that is there, too, or puts another storage behind it,
    views that are taken of that tensor depend on their place, which nothing else shows: nothing
    crosses it.
    """
    if target._schema.name == _RESIZES_STORAGE:
        return unknown_effects(nodes)
    if target._schema.name in _RESHAPES_IN_PLACE:
        return replace(unknown_effects(nodes), sets_context=True)
    return None


def function_effects(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    nodes: Sequence[torch.fx.Node],
) -> Effects:
    """Return the effects of the call of a python function with ``result``; ``nodes`` are its
    arguments that are nodes.

    Raises
    ------
    InputError
        Where it changes a list or a dict.
    """
    if _is_one_of(target, _ASSERTS):
        return Effects(acts=True, by_identity=True)
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", "")
    of_python = (
        module in ("_operator", "math")
        or name.startswith("sym_")
        or _is_one_of(target, _PURE_BUILTINS)
    )
    passed = pytree.tree_leaves(
        pytree.tree_map(_value, (tuple(args), dict(kwargs)), is_leaf=_is_node)
    )
    given = pytree.tree_leaves(result)
    if (
        of_python
        and name in _IN_PLACE
        and not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(_value(args[0])))
    ):
        return Effects(
            by_identity=True, draws=True, acts=True, sets_context=True
        )  # x += 1 of a number renames x in generated code
    if of_python and name in _IN_PLACE and isinstance(_value(args[0]), list | dict):
        raise InputError(
            f"{name}: expected lists and dicts that stay as they are, found one that is changed;"
            " build a new one instead"
        )
    if (of_python and all(isinstance(leaf, _PLAIN) for leaf in (*passed, *given))) or _picks_unseen(
        target, args
    ):
        return Effects(by_identity=True, idle=True)
    if of_python or is_torch_function(target):
        seen = _watched(target, args, kwargs, result, nodes)
        if seen is not None:
            return seen
    takes_tensors = any(isinstance(leaf, torch.Tensor) for leaf in passed)
    if takes_tensors or any(isinstance(leaf, (torch.Tensor, *_NUMBERS)) for leaf in given):
        return unknown_effects(nodes)
    return Effects(by_identity=True, draws=True, acts=True, sets_context=True)


def composite_effects(
    composite: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    nodes: Sequence[torch.fx.Node],
) -> Effects:
    """Return the effects of an operator that is made of others: theirs, or those of its schema if
    fake tensors cannot run it.
    """
    stated = operator_effects(composite, args, kwargs)
    seen = _watched(composite, args, kwargs, result, nodes)
    return stated if seen is None else replace(seen, out=stated.out, acts=stated.acts or seen.acts)


class _StoppedError(Exception):
    """The operators seen do not determine the effects of the call; ``effects`` are the known
    ones.
    """

    def __init__(self, effects: Effects) -> None:
        super().__init__()
        self.effects = effects


class _Witness:
    """Takes down the effects of the operators that a call dispatches."""

    def __init__(self, nodes: Sequence[torch.fx.Node]) -> None:
        self._nodes = nodes
        self.written: set[int] = set()
        self.draws = self.acts = False
        self.idle = True

    def see(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take down one operator before it runs."""
        if not isinstance(target, torch._ops.OpOverload):
            raise _StoppedError(unknown_effects(self._nodes))
        if is_communication(target):
            raise _StoppedError(unknown_effects(self._nodes, communicates=(ANY_GROUP,)))
        if (resizing := resizing_effects(target, self._nodes)) is not None:
            raise _StoppedError(resizing)
        schema = target._schema
        effects = operator_effects(target, args, kwargs)
        self.written |= {
            _key(leaf)
            for leaf in pytree.tree_leaves(effects.writes)
            if isinstance(leaf, torch.Tensor)
        }
        self.draws |= effects.draws
        self.acts |= effects.acts
        self.idle &= schema.name.startswith(("prim::", "aten::sym_"))


def _watched(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    nodes: Sequence[torch.fx.Node],
) -> Effects | None:
    """Return the effects of ``target`` by the operators that it dispatches; None if fake tensors
    cannot run it.
    """
    given = [node.meta.get("val") for node in nodes]
    mode = torch_private.fake_mode_of(
        [leaf for leaf in pytree.tree_leaves((given, result)) if isinstance(leaf, torch.Tensor)]
    )
    if mode is None:
        return None
    witness = _Witness(nodes)
    try:
        with (
            mode,
            torch.no_grad(),
        ):  # views of their own, as some functions change the shape of what they are handed
            passed = {
                node: pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, node.meta.get("val"))
                for node in nodes
            }
        real_args, real_kwargs = torch.fx.map_arg(
            (tuple(args), dict(kwargs)), lambda node: passed[node]
        )
        with torch_private.quiet_fake_tensors():
            found = watched(mode, lambda: target(*real_args, **real_kwargs), witness.see)
    except _StoppedError as stopped:
        return stopped.effects
    except Exception:  # of what cannot be run nothing is known
        return None
    keys = {
        node: {
            _key(leaf)
            for leaf in pytree.tree_leaves(passed[node])
            if isinstance(leaf, torch.Tensor)
        }
        for node in nodes
    }
    returned = (
        found if isinstance(found, list | tuple) and not isinstance(found, torch.Size) else (found,)
    )
    nested = any(isinstance(value, list | tuple | dict) for value in returned)
    return Effects(
        writes=tuple(node for node in nodes if keys[node] & witness.written),
        shares=(
            ()
            if nested or found is None
            else tuple(tuple(n for n in nodes if _shares(value, keys[n])) for value in returned)
        ),
        by_identity=nested,
        draws=witness.draws,
        acts=witness.acts,
        idle=witness.idle and not isinstance(result, torch.Tensor),
    )


def _shares(value: Any, keys: set[int]) -> bool:
    return isinstance(value, torch.Tensor) and _key(value) in keys


def _key(tensor: torch.Tensor) -> int:
    try:
        return torch_private.storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # no storage (sparse)
        return id(tensor)


def _picks_unseen(target: Any, args: Sequence[Any]) -> bool:
    """Whether it takes an item of something of which no value is known, as in subgraphs."""
    return target is operator.getitem and _value(args[0]) is _UNSEEN


def _is_one_of(target: Any, functions: Iterable[Any]) -> bool:
    return any(target is function for function in functions)


_UNSEEN = object()


def _value(argument: Any) -> Any:
    return argument.meta.get("val", _UNSEEN) if isinstance(argument, torch.fx.Node) else argument


def _is_node(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node)
