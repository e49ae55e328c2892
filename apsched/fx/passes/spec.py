"""States the conditions that every captured graph must meet, and every pass must keep."""

from collections.abc import Callable

import torch

from apsched.errors import InputError

_Where = Callable[[torch.fx.Node], str]


def at_node(node: torch.fx.Node) -> str:
    """Return the name of ``node`` for errors if the graph has no file."""
    return f"node {node.name}"


def check_graph(module: torch.fx.GraphModule, where: _Where = at_node) -> None:
    """Check the properties that the rest of apsched needs; ``where`` returns the name of a node's
    place for errors.

    The graph passes ``lint``; it has only placeholders, attributes, calls of operators and one
    output; every placeholder and call that returns something has ``meta["val"]``.
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
                f" node {node.name}; trace through AOTAutograd or make_fx, and of a program of"
                " torch.export hand in its graph_module in place of module()"
            )
        if node.op in ("placeholder", "call_function"):
            _check_value(node, where)


def _check_value(node: torch.fx.Node, where: _Where) -> None:
    if "val" not in node.meta:
        if _returns_nothing(node):
            return
        raise InputError(
            f'{where(node)}: expected meta["val"] (a fake tensor) on node {node.name}, found none; '
            "hand in example_inputs, or trace under a FakeTensorMode"
        )


def _returns_nothing(node: torch.fx.Node) -> bool:
    """Return whether ``node`` has no result that a node could use."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.returns
    return isinstance(node.target, torch._ops.HigherOrderOperator) and not node.users
