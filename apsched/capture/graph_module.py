"""Takes a ``torch.fx.GraphModule`` from the API, and states what every captured graph must be."""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_values import propagate
from apsched.collectives import argument, is_collective, is_wait_tensor
from apsched.errors import InputError
from apsched.torch_private import size_hint

_PARAMETER = re.compile(r"primals_(\d+)$")
_GRADIENT = re.compile(r"tangents_(\d+)$")
_Where = Callable[[torch.fx.Node], str]


def capture_graph_module(
    module: torch.fx.GraphModule,
    *,
    name: str | None = None,
    kept_inputs: Iterable[str] | None = None,
    example_inputs: Sequence[Any] | None = None,
) -> CapturedGraph:
    """Return the captured form of ``module``, which is not changed.

    ``name`` and ``kept_inputs`` default to what the names of the placeholders say, as AOTAutograd gives them (:func:`direction_of`,
    :func:`kept_by_name`). ``example_inputs`` (real or fake tensors and integers, one for each placeholder) are needed only where nodes
    have no ``meta["val"]``; nothing is computed on them.

    Raises
    ------
    InputError
        If the graph breaks the contract of :func:`check_graph`; the message names the node.
    """
    if not isinstance(module, torch.fx.GraphModule):
        raise InputError(f"expected a torch.fx.GraphModule, found {type(module).__name__}; trace it with torch.compile or make_fx first")
    if example_inputs is not None:
        module = _with_values(module, example_inputs)
    check_graph(module)
    placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
    name = name or direction_of(module.graph)
    kept = kept_by_name(placeholders) if kept_inputs is None else frozenset(kept_inputs)
    unknown = sorted(kept.difference(placeholders))
    if unknown:
        raise InputError(
            f"expected kept_inputs to name placeholders of the graph, found {unknown[0]!r}; the graph has {_few(placeholders)}"
        )
    return CapturedGraph(name=name, module=module, kept_inputs=kept, parameter_names={})


def direction_of(graph: torch.fx.Graph) -> str:
    """Return ``forward``, ``backward``, ``joint`` or ``graph`` (unknown), by the names that AOTAutograd gives inputs.

    A forward graph takes ``primals_*``; a backward graph takes ``tangents_*`` and what was saved. A joint graph takes all
    ``primals_*`` and ``tangents_*``, nothing else, and has outputs beyond one gradient for each primal.
    """
    names = [node.target for node in graph.find_nodes(op="placeholder") if isinstance(node.target, str)]
    primals = {int(match[1]) for name in names if (match := _PARAMETER.match(name))}
    gradients = [name for name in names if _GRADIENT.match(name)]
    if not gradients:
        return "forward" if primals else "graph"
    complete = len(primals) + len(gradients) == len(names) and primals == set(range(1, len(primals) + 1))
    outputs = tree_leaves(graph.output_node().args[0], is_leaf=lambda item: item is None)
    return "joint" if primals and complete and len(outputs) > len(primals) else "backward"


def kept_by_name(placeholders: Iterable[str]) -> frozenset[str]:
    """Return the placeholders that the caller keeps alive: ``primals_*``, or all where the names are not AOTAutograd's.

    What a backward graph takes beside them is freed at its last use: the saved activations and the incoming gradients.
    """
    names = list(placeholders)
    if not any(_PARAMETER.match(name) or _GRADIENT.match(name) for name in names):
        return frozenset(names)
    return frozenset(name for name in names if _PARAMETER.match(name))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "none"


def at_node(node: torch.fx.Node) -> str:
    """Return how an error names ``node`` where the graph has no file."""
    return f"node {node.name}"


def check_graph(module: torch.fx.GraphModule, where: _Where = at_node) -> None:
    """Check what the rest of apsched relies on; ``where`` says how an error names a node's place.

    The graph passes ``lint``; it has only placeholders, attributes, calls of operators and one output; every placeholder and call
    that returns something has ``meta["val"]``, with sizes that do not depend on data; each collective has a wait.
    """
    try:
        module.graph.lint()
    except (RuntimeError, ValueError, AttributeError) as error:
        raise InputError(f"expected a graph that passes torch's lint, found: {error}; repair the pass that made it") from None
    if not module.graph.find_nodes(op="output"):
        raise InputError("expected a graph with an output node, found none; add graph.output(...)")
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise InputError(
                f"{where(node)}: expected a graph of operators, found {node.op} of {node.target} at node {node.name}; "
                "trace through AOTAutograd or make_fx"
            )
        if node.op in ("placeholder", "call_function"):
            _check_value(node, where)
        if _is_collective(node, where) and not _is_waited_for(node):
            raise InputError(
                f"{where(node)}: expected a wait_tensor of the collective {node.name}, found none; "
                "its result is never ready: keep the functional collective and its wait in one graph"
            )


def _check_value(node: torch.fx.Node, where: _Where) -> None:
    if "val" not in node.meta:
        if _returns_nothing(node):
            return
        raise InputError(
            f'{where(node)}: expected meta["val"] (a fake tensor) on node {node.name}, found none; '
            "hand in example_inputs, or trace under a FakeTensorMode"
        )
    for value in tree_leaves(node.meta["val"]):
        if isinstance(value, torch.Tensor):
            try:
                _ = [size_hint(size) for size in (*value.shape, *value.stride(), value.storage_offset())]
            except ValueError as error:
                raise InputError(
                    f"{where(node)}: expected sizes known before the step, found at node {node.name}: {error}; "
                    "trace with a fixed split (balanced routing), so that its bytes are known"
                ) from None


def _returns_nothing(node: torch.fx.Node) -> bool:
    """Return whether ``node`` has no result that anybody could use."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.returns
    return isinstance(node.target, torch._ops.HigherOrderOperator) and not node.users


def _is_collective(node: torch.fx.Node, where: _Where) -> bool:
    """Return whether ``node`` starts a collective; refuse communication that apsched cannot schedule, at its place."""
    try:
        return is_collective(node)
    except InputError as error:
        raise InputError(f"{where(node)}: {str(error).removeprefix(f'{at_node(node)}: ')} (node {node.name})") from None


def _is_waited_for(start: torch.fx.Node) -> bool:
    """Return whether something waits for ``start``: by its result, an item of it, or a tensor that it writes."""
    assert isinstance(start.target, torch._ops.OpOverload)
    results = [start, *(user for user in start.users if user.target is operator.getitem)]
    for written in start.target._schema.arguments:
        if written.alias_info is not None and written.alias_info.is_write:
            results += [item for item in tree_leaves(argument(start, written.name, None)) if isinstance(item, torch.fx.Node)]
    return any(is_wait_tensor(user) for result in results for user in result.users)


def _with_values(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Return a copy of ``module`` whose nodes have the values that follow from ``example_inputs``."""
    placeholders = module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(example_inputs):
        raise InputError(f"expected {len(placeholders)} example_inputs, one for each placeholder, found {len(example_inputs)}")
    graph = torch.fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    copy = torch.fx.GraphModule(module, graph)
    mode = next((value.fake_mode for value in example_inputs if isinstance(value, FakeTensor)), None)
    mode = mode or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = [mode.from_tensor(value, static_shapes=True) if _is_real(value) else value for value in example_inputs]
    propagate(copy, inputs, mode, at_node)
    return copy


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
