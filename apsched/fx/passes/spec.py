"""States what every captured graph must be, and every pass must leave behind."""

import operator
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves

from apsched.errors import InputError
from apsched.fx.collectives import argument, is_collective, is_wait_tensor

_Where = Callable[[torch.fx.Node], str]


def at_node(node: torch.fx.Node) -> str:
    """Return how an error names ``node`` where the graph has no file."""
    return f"node {node.name}"


def check_graph(module: torch.fx.GraphModule, where: _Where = at_node) -> None:
    """Check what the rest of apsched relies on; ``where`` says how an error names a node's place.

    The graph passes ``lint``; it has only placeholders, attributes, calls of operators and one
    output; every placeholder and call that returns something has ``meta["val"]``; each collective
    has a wait.
    """
    try:
        module.graph.lint()
    except (RuntimeError, ValueError, AttributeError) as error:
        raise InputError(
            f"expected a graph that passes torch's lint, found: {error}; repair the pass that"
            " made it"
        ) from None
    if not module.graph.find_nodes(op="output"):
        raise InputError("expected a graph with an output node, found none; add graph.output(...)")
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise InputError(
                f"{where(node)}: expected a graph of operators, found {node.op} of {node.target} at"
                f" node {node.name}; trace through AOTAutograd or make_fx"
            )
        if node.op in ("placeholder", "call_function"):
            _check_value(node, where)
        if _is_collective(node, where) and not _is_waited_for(node):
            raise InputError(
                f"{where(node)}: expected a wait_tensor of the collective {node.name}, found none;"
                " its result is never ready: keep the functional collective and its wait in one"
                " graph"
            )


def _check_value(node: torch.fx.Node, where: _Where) -> None:
    if "val" not in node.meta:
        if _returns_nothing(node):
            return
        raise InputError(
            f'{where(node)}: expected meta["val"] (a fake tensor) on node {node.name}, found none; '
            "hand in example_inputs, or trace under a FakeTensorMode"
        )


def _returns_nothing(node: torch.fx.Node) -> bool:
    """Return whether ``node`` has no result that anybody could use."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.returns
    return isinstance(node.target, torch._ops.HigherOrderOperator) and not node.users


def _is_collective(node: torch.fx.Node, where: _Where) -> bool:
    """Return whether ``node`` starts a collective; refuse communication that apsched cannot
    schedule, at its place.
    """
    try:
        return is_collective(node)
    except InputError as error:
        raise InputError(
            f"{where(node)}: {str(error).removeprefix(f'{at_node(node)}: ')} (node {node.name})"
        ) from None


def _is_waited_for(start: torch.fx.Node) -> bool:
    """Return whether something waits for ``start``: by its result, an item of it, or a tensor that
    it writes.
    """
    assert isinstance(start.target, torch._ops.OpOverload)
    results = [start, *(user for user in start.users if user.target is operator.getitem)]
    for written in start.target._schema.arguments:
        if written.alias_info is not None and written.alias_info.is_write:
            results += [
                item
                for item in tree_leaves(argument(start, written.name, None))
                if isinstance(item, torch.fx.Node)
            ]
    return any(is_wait_tensor(user) for result in results for user in result.users)
