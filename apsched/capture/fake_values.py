"""Gives every node of a graph its ``meta["val"]`` by running it on fake tensors."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from apsched.errors import InputError
from apsched.fx.collectives import argument
from apsched.fx.effects.of_node import attribute_of
from apsched.fx.graph_copies import copied
from apsched.torch_compat.graphs import fake_mode_of, quiet_fake_tensors

_REASON_LENGTH = 300
_RNG_STATE_BYTES = 16
"""Of the generator's state on an accelerator."""
PROPAGATE = (
    "run torch.fx.passes.fake_tensor_prop.FakeTensorProp(gm).propagate(*inputs) first, with the"
    " inputs of the graph"
)
"""The advice where a graph has no values."""


class _Propagator(torch.fx.Interpreter):
    """Runs a graph node by node and keeps each result; the first node that fails is the error."""

    def __init__(self, module: torch.fx.GraphModule, where: Callable[[torch.fx.Node], str]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._where = where

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{self._where(n)}: expected shapes that {n._pretty_print_target(n.target)} accepts"
                f" at node {n.name}, found: {_reason(error)}; check that the graph and its inputs"
                " belong together and come from this version of torch"
            ) from None
        if n.op != "output":
            n.meta["val"] = value
        return value


def propagate(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    where: Callable[[torch.fx.Node], str],
) -> None:
    """Set ``meta["val"]`` on every node of ``module`` but the output; ``where`` returns the name of
    a node's place for errors.

    Raises
    ------
    InputError
        If a node cannot be run on its arguments.
    """
    with quiet_fake_tensors(), mode, torch.no_grad():
        _Propagator(module, where).run(*inputs, enable_io_processing=False)


def with_missing_values(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return ``module`` with ``meta["val"]`` on every placeholder and call, a copy where some had
    none.

    The value of a call is its result on the fake values of its arguments; None stands for a
    placeholder that no node takes as a tensor, and for a value without a use.

    Raises
    ------
    InputError
        If a placeholder that is a tensor has none, or a call cannot be run.
    """
    if not any(map(_lacks_value, module.graph.nodes)):
        return module
    copy = copied(module)
    known = tree_leaves([node.meta.get("val") for node in copy.graph.nodes])
    mode = fake_mode_of(known) or FakeTensorMode()
    symbols = (
        nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    )
    with quiet_fake_tensors(), symbols, mode, torch.no_grad():
        for node in copy.graph.nodes:
            if _lacks_value(node):
                node.meta["val"] = (
                    _input_value(node) if node.op == "placeholder" else _call_value(node, mode)
                )
    return copy


def _lacks_value(node: torch.fx.Node) -> bool:
    """Whether ``node`` has no value and needs one; attributes speak for themselves."""
    if "val" in node.meta or node.op not in ("placeholder", "call_function"):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or bool(node.target._schema.returns)


def _input_value(node: torch.fx.Node) -> Any:
    for user in node.users:
        formals = (
            user.target._schema.arguments if isinstance(user.target, torch._ops.OpOverload) else ()
        )
        for formal in formals:
            is_tensor = str(formal.type) in ("Tensor", "List[Tensor]")
            if is_tensor and node in tree_leaves(argument(user, formal.name, None)):
                raise InputError(
                    f'node {node.name}: expected meta["val"] (a fake tensor) on the placeholder,'
                    f" of which {user.name} takes a tensor, found none; {PROPAGATE}"
                )
    return None


def _call_value(node: torch.fx.Node, mode: FakeTensorMode) -> Any:
    if not node.users and isinstance(node.target, torch._ops.HigherOrderOperator):
        return None  # it is there for what it does

    def value_of(source: torch.fx.Node) -> Any:
        if source.op != "get_attr":
            return source.meta.get("val")
        constant = attribute_of(source)
        if isinstance(constant, torch.Tensor):
            return mode.from_tensor(constant, static_shapes=True)
        return constant

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
    try:
        return _called(node.target, args, kwargs)
    except Exception as error:
        raise InputError(
            f'node {node.name}: expected meta["val"], found none, and'
            f" {node._pretty_print_target(node.target)} cannot be run on the values of its"
            f" arguments: {_reason(error)}; {PROPAGATE}"
        ) from None


def _called(target: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a call; of one with a generator's state without any generator, which
    may be that of a device that is not here.
    """
    name = str(target.name()) if isinstance(target, torch._ops.HigherOrderOperator) else ""  # type: ignore[no-untyped-call]
    if name == "run_and_save_rng_state":
        operator, *rest = args
        return torch.empty(_RNG_STATE_BYTES, dtype=torch.uint8), operator(*rest, **kwargs)
    if name == "run_with_rng_state":
        _, operator, *rest = args
        return operator(*rest, **kwargs)
    if name == "graphsafe_run_with_rng_state":
        operator, *rest = args
        return operator(*rest, **{key: kwargs[key] for key in kwargs if key != "rng_state"})
    return target(*args, **kwargs)


def _reason(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:_REASON_LENGTH]
