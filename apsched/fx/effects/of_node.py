"""Effects of any FX node in addition to its result: writes, shared storages, draws, others; or that
they are unknown.

The effects of operators come from their schema, those of torch's own functions from watching them
run on fake tensors, those of higher-order operators from their content. Everything else is a
barrier.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from apsched.errors import InputError
from apsched.fx.collectives import (
    is_blocking_collective,
    is_collective,
    is_unknown_communication,
    is_wait_tensor,
    kind_inside,
    stated_group,
)
from apsched.fx.effects.effects import Effects, unknown_effects
from apsched.fx.effects.functions import composite_effects, function_effects, resizing_effects
from apsched.fx.effects.operators import is_composite, operator_effects, overload_of

RUN_ONE_CALL = {
    "run_and_save_rng_state": 0,
    "graphsafe_run_with_rng_state": 0,
    "run_with_rng_state": 1,
    "with_effects": 1,
    "out_dtype": 0,
}
"""Higher-order operator -> place of the operator that it calls on the arguments after it."""
_FUNCTIONAL_FORMS = frozenset(("auto_functionalized", "auto_functionalized_v2"))
_DRAW = frozenset(("run_and_save_rng_state", "graphsafe_run_with_rng_state", "run_with_rng_state"))
RUN_SUBGRAPHS = frozenset(
    (
        "associative_scan",
        "cond",
        "control_deps",
        "flex_attention",
        "flex_attention_backward",
        "foreach_map",
        "hints_wrapper",
        "invoke_quant",
        "invoke_quant_packed",
        "invoke_subgraph",
        "local_map_hop",
        "map",
        "map_impl",
        "run_const_graph",
        "scan",
        "strict_mode",
        "tag_activation_checkpoint",
        "while_loop",
        "while_loop_stack_output",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    )
)
"""Higher-order operators that run the subgraphs among their arguments, and do nothing else."""


def effects_of(node: torch.fx.Node) -> Effects:
    """Return the effects of ``node`` in addition to its result.

    Raises
    ------
    InputError
        Where no order keeps its effect: it changes a list.
    """
    if node.op != "call_function":
        return Effects(by_identity=True)
    try:
        return _call(node, overload_of(node) or node.target, node.args, node.kwargs)
    except InputError as error:
        raise InputError(f"node {node.name}: {error}") from None


def _call(
    node: torch.fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Effects:
    """Return the effects of a call in ``node``, which may be a part of it."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _higher_order(node, target, args, kwargs)
    if isinstance(target, torch._ops.OpOverload):
        kept_in_place = _kept_in_place(node, target)
        if kept_in_place is not None:
            return kept_in_place
        if not is_composite(target):
            return operator_effects(target, args, kwargs)
        return composite_effects(target, args, kwargs, node.meta.get("val"), node.all_input_nodes)
    return function_effects(target, args, kwargs, node.meta.get("val"), node.all_input_nodes)


def _kept_in_place(node: torch.fx.Node, target: torch._ops.OpOverload) -> Effects | None:
    """Return the effects of an operator beyond its schema: communication that is not known here,
    another size of a storage, streams and their events; None of any other.
    """
    if is_unknown_communication(target):
        return unknown_effects(node.all_input_nodes, communicates=(stated_group(node),))
    if target._schema.name.startswith("streams::"):  # what comes after it runs on another stream
        return Effects(by_identity=True, draws=True, acts=True, sets_context=True)
    return resizing_effects(target, node.all_input_nodes)


def _higher_order(
    node: torch.fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Effects:
    name = target.name()
    if name == "print":
        return Effects(acts=True, by_identity=True)
    if name == "triton_kernel_wrapper_functional":
        return Effects(by_identity=True)
    if (
        name == "triton_kernel_wrapper_mutation"
    ):  # which of its arguments a kernel writes, it does not say
        return Effects(writes=tuple(node.all_input_nodes), by_identity=True)
    if name in RUN_ONE_CALL and len(args) > RUN_ONE_CALL[name]:
        place = RUN_ONE_CALL[name]
        passed = {key: value for key, value in kwargs.items() if key != "rng_state"}
        inner = _call(node, args[place], args[place + (2 if name == "out_dtype" else 1) :], passed)
        draws, acts = inner.draws or name in _DRAW, inner.acts or name == "with_effects"
        return replace(
            inner, shares=(), out=(), by_identity=True, draws=draws, acts=acts, idle=False
        )
    if name in _FUNCTIONAL_FORMS and args and isinstance(args[0], torch._ops.OpOverload):
        inner = operator_effects(args[0], (), {})
        return Effects(by_identity=True, draws=inner.draws, acts=inner.acts)
    if name in RUN_SUBGRAPHS:
        return _of_subgraphs(node, args, kwargs)
    return unknown_effects(node.all_input_nodes)


def _of_subgraphs(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effects:
    """Return the effects of the subgraphs among the arguments together; unknown if there is none,
    or one that cannot be read.
    """
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    found = [
        attribute_of(leaf) if isinstance(leaf, torch.fx.Node) and leaf.op == "get_attr" else leaf
        for leaf in leaves
    ]
    bodies = [
        _body(leaf)
        for leaf in found
        if callable(leaf) and not isinstance(leaf, torch.fx.Node | torch.Tensor)
    ]
    operands = tuple(node.all_input_nodes)
    if not bodies or any(body.unknown for body in bodies):
        return unknown_effects(operands, communicates=_groups(bodies))
    return Effects(
        writes=operands if any(body.writes for body in bodies) else (),
        by_identity=True,
        draws=any(body.draws for body in bodies),
        acts=any(body.acts for body in bodies),
        communicates=_groups(bodies),
    )


def _groups(effects: Iterable[Effects]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(group for e in effects for group in e.communicates))


def _body(body: Any) -> Effects:
    """Return the effects of one function that a higher-order operator runs; ``writes`` are those to
    its arguments.
    """
    if isinstance(body, torch._ops.OpOverload):
        inner = operator_effects(body, (), {})
        return (
            unknown_effects(())
            if body._schema.is_mutable
            else Effects(draws=inner.draws, acts=inner.acts)
        )
    if not isinstance(body, torch.fx.GraphModule):
        return unknown_effects(())
    nodes = list(body.graph.nodes)
    effects = {node: _inside(node) for node in nodes}
    groups = _groups(effects.values())
    unknown = any(e.unknown or e.sets_context for e in effects.values()) or any(
        n.op in ("call_module", "call_method") for n in nodes
    )
    own = {
        node
        for node in nodes
        if node.op == "call_function"
        and not effects[node].by_identity
        and not any(effects[node].shares)
    }
    written = [
        n
        for e in effects.values()
        for n in pytree.tree_leaves(e.writes)
        if isinstance(n, torch.fx.Node) and n not in own
    ]
    holds_tensors = any(
        node.op == "get_attr" and not isinstance(attribute_of(node), torch.fx.GraphModule)
        for node in nodes
    )
    if unknown or (
        written and holds_tensors
    ):  # what it holds itself, nothing outside of it stands for
        return unknown_effects((), communicates=groups)
    return Effects(
        writes=tuple(written),
        draws=any(e.draws for e in effects.values()),
        acts=any(e.acts for e in effects.values()),
        communicates=groups,
    )


def _inside(node: torch.fx.Node) -> Effects:
    """Return the effects of ``node`` in a body, where nothing schedules its communication: a
    transfer that it waits for may have been started outside.
    """
    effects = effects_of(node)
    if is_collective(node) or is_blocking_collective(node) or kind_inside(node.target):
        return replace(effects, communicates=(stated_group(node),))
    return replace(effects, writes=(node.args[0],)) if is_wait_tensor(node) else effects


def higher_order_name(node: torch.fx.Node) -> str:
    """Return the name of the higher-order operator that ``node`` calls; empty for all else."""
    target: Any = node.target
    known = isinstance(target, torch._ops.HigherOrderOperator)
    return str(target.name()) if known else ""


def attribute_of(node: torch.fx.Node) -> Any:
    """Return the value that a get_attr node reads, a tensor or a subgraph; :func:`missing` if there
    is none.
    """
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, missing)
    return value


def missing() -> None:
    """Stand for an attribute that a module does not hold: it can be called, but not read."""
