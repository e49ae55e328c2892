"""Takes a ``torch.fx.GraphModule`` from the API."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_values import propagate, with_missing_values
from apsched.errors import InputError
from apsched.fx.control_deps import without_control_deps
from apsched.fx.effects.operators import overload_of
from apsched.fx.graph_copies import copied
from apsched.fx.passes.parameters import parameter_names as described_parameters
from apsched.fx.passes.spec import at_node, check_graph
from apsched.fx.repeated_waits import without_repeated_waits

_PARAMETER = re.compile(r"primals_(\d+)$")
_GRADIENT = re.compile(r"tangents_(\d+)$")


def capture_graph(
    module: torch.fx.GraphModule,
    *,
    name: str | None = None,
    kept_inputs: Iterable[str] | None = None,
    parameter_names: Mapping[str, str] | None = None,
    example_inputs: Sequence[Any] | None = None,
) -> CapturedGraph:
    """Return the captured form of ``module``, which is not changed; overload packets become the
    overloads that they run; control dependencies of a scheduler and repeated waits are removed.

    ``name`` and ``kept_inputs`` default to those that the names of AOTAutograd's placeholders imply
    (:func:`direction_of`, :func:`kept_by_name`), ``parameter_names`` (placeholder -> parameter) to
    those of its descriptors. ``example_inputs`` (real or fake tensors and integers, one for each
    placeholder) are needed only if placeholders have no ``meta["val"]``; calls that have none are
    run on fake values, without computation.

    Raises
    ------
    InputError
        If the graph breaks the contract of :func:`apsched.fx.passes.spec.check_graph`; the message
        names the node.
    """
    if not isinstance(module, torch.fx.GraphModule):
        raise InputError(
            f"expected a torch.fx.GraphModule, found {type(module).__name__}; trace it with"
            " torch.compile or make_fx first"
        )
    if example_inputs is not None:
        module = _with_values(module, example_inputs)
    module = without_repeated_waits(_with_overloads(without_control_deps(module)))
    module = with_missing_values(module)
    check_graph(module)
    placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
    name = name or direction_of(module.graph)
    kept = kept_by_name(placeholders) if kept_inputs is None else frozenset(kept_inputs)
    unknown = sorted(kept.difference(placeholders))
    if unknown:
        raise InputError(
            f"expected kept_inputs to name placeholders of the graph, found {unknown[0]!r}; the"
            f" graph has {_few(placeholders)}"
        )
    names = described_parameters(module.graph) if parameter_names is None else parameter_names
    return CapturedGraph(name=name, module=module, kept_inputs=kept, parameter_names=names)


def direction_of(graph: torch.fx.Graph) -> str:
    """Return ``forward``, ``backward``, ``joint`` or ``graph`` (unknown), by the names that
    AOTAutograd gives inputs.

    A forward graph takes ``primals_*``; a backward graph takes ``tangents_*`` and saved values. A
    joint graph takes all ``primals_*`` and ``tangents_*``, nothing else, and has outputs beyond one
    gradient for each primal.
    """
    names = [
        node.target for node in graph.find_nodes(op="placeholder") if isinstance(node.target, str)
    ]
    primals = {int(match[1]) for name in names if (match := _PARAMETER.match(name))}
    gradients = [name for name in names if _GRADIENT.match(name)]
    if not gradients:
        return "forward" if primals else "graph"
    complete = len(primals) + len(gradients) == len(names) and primals == set(
        range(1, len(primals) + 1)
    )
    outputs = tree_leaves(graph.output_node().args[0], is_leaf=lambda item: item is None)
    return "joint" if primals and complete and len(outputs) > len(primals) else "backward"


def kept_by_name(placeholders: Iterable[str]) -> frozenset[str]:
    """Return the placeholders that the caller keeps alive: ``primals_*``, or all where the names
    are not AOTAutograd's.

    The other inputs of a backward graph are freed at their last use: the saved activations and the
    incoming gradients.
    """
    names = list(placeholders)
    if not any(_PARAMETER.match(name) or _GRADIENT.match(name) for name in names):
        return frozenset(names)
    return frozenset(name for name in names if _PARAMETER.match(name))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "none"


def _with_values(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> torch.fx.GraphModule:
    """Return a copy of ``module`` whose nodes have the values that follow from
    ``example_inputs``.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(example_inputs):
        raise InputError(
            f"expected {len(placeholders)} example_inputs, one for each placeholder, found"
            f" {len(example_inputs)}"
        )
    graph = torch.fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    copy = torch.fx.GraphModule(module, graph)
    mode = next(
        (value.fake_mode for value in example_inputs if isinstance(value, FakeTensor)), None
    )
    mode = mode or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = [
        mode.from_tensor(value, static_shapes=True) if _is_real(value) else value
        for value in example_inputs
    ]
    propagate(copy, inputs, mode, at_node)
    return copy


def _with_overloads(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return ``module`` with the overload in place of each overload packet; itself where it calls
    none.
    """
    if not any(isinstance(node.target, torch._ops.OpOverloadPacket) for node in module.graph.nodes):
        return module
    copy = copied(module)
    for node in copy.graph.nodes:
        node.target = overload_of(node) or node.target
    copy.recompile()
    return copy


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
