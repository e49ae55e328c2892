"""Provenance of nodes: the module or parameter they serve, and whether they run forward or
backward.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from apsched.capture.captured import CapturedGraph
from apsched.fx.passes.parameters import PARAMETER_KEY
from apsched.kinds import NodeKind
from apsched.names import direction_named
from apsched.torch_compat.compilers import plain_parameter_name
from apsched.torch_compat.graphs import gradient_of


def module_names(
    captured: CapturedGraph,
    nodes: Sequence[torch.fx.Node],
    kinds: Sequence[NodeKind],
    wait_of_start: Mapping[int, int],
    parameters: Mapping[int, str],
) -> list[str]:
    """Return for each node the name of its module; for FSDP collectives and their waits the name of
    the parameter they serve.
    """
    names = [innermost_module(node) for node in nodes]
    for rank, node in enumerate(nodes):
        if kinds[rank] is NodeKind.INPUT:
            names[rank] = captured.parameter_names.get(node.name, names[rank])
    for start, parameter in parameters.items():
        names[start] = names[wait_of_start[start]] = parameter
    return names


def parameters_served(
    captured: CapturedGraph,
    nodes: Sequence[torch.fx.Node],
    kinds: Sequence[NodeKind],
    wait_of_start: Mapping[int, int],
    fsdp: frozenset[int],
) -> dict[int, str]:
    """Return for the starts of FSDP collectives the parameter that they serve, where it is
    known.
    """
    parameter_before = _parameter_before(captured, nodes, kinds)
    parameter_after = _parameter_after(captured, nodes, kinds, fsdp)
    return {
        start: parameter
        for start, wait in wait_of_start.items()
        if start in fsdp
        and (
            parameter := _noted_parameter(nodes[start])
            or parameter_before[start]
            or parameter_after[wait]
        )
    }


def directions(captured: CapturedGraph, nodes: Sequence[torch.fx.Node]) -> list[str]:
    """Return ``forward`` or ``backward`` for each node.

    The name of the graph tells; in a joint graph the tags of tracers and partitioners
    (``autograd_backward``, ``partitioner_tag``) and descent from a tangent tell, and where there is
    none of these, ``seq_nr``: a backward node has the number of its forward node, which lies
    behind.
    """
    if named := direction_named(captured.name):
        return [named] * len(nodes)
    rank_of = {node: rank for rank, node in enumerate(nodes)}
    backward = [False] * len(nodes)
    for rank, node in enumerate(nodes):
        tag = str(node.meta.get("partitioner_tag", ""))
        tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        marked = bool(node.meta.get("autograd_backward")) or tag == "is_backward" or tangent
        backward[rank] = marked or (
            node.op != "output" and any(backward[rank_of[n]] for n in node.all_input_nodes)
        )
    if captured.name == "joint" and not any(backward):
        backward = _by_sequence_number(nodes)
    return ["backward" if b else "forward" for b in backward]


def _by_sequence_number(nodes: Sequence[torch.fx.Node]) -> list[bool]:
    latest, result = -1, []
    for node in nodes:
        number = node.meta.get("seq_nr", -1) if node.op == "call_function" else -1
        result.append(0 <= number < latest)
        latest = max(latest, number)
    return result


def _noted_parameter(node: torch.fx.Node) -> str:
    """Return the parameter that capture noted on ``node``, or an empty string."""
    custom = node.meta.get("custom")
    return str(custom.get(PARAMETER_KEY, "")) if isinstance(custom, Mapping) else ""


def innermost_module(node: torch.fx.Node) -> str:
    """Return the name of the innermost module around ``node``, as the tracer recorded it."""
    custom = node.meta.get("custom")
    if isinstance(custom, Mapping) and isinstance(name := custom.get("module_fqn"), str):
        return name
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not isinstance(stack, Mapping) or not stack:
        return ""
    entry = list(stack.values())[-1]
    path = entry[0] if isinstance(entry, list | tuple) and entry else entry
    return _plain(str(path))


def _plain(path: str) -> str:
    """Return a module path without the parts that Dynamo and wrappers add:
    ``L['self']._modules['layers']['0']`` is ``layers.0``.
    """
    if path.startswith("L["):
        parts = [
            part.strip("'\"") for part in path.replace("]", "").replace(".", "[").split("[")[2:]
        ]
        path = ".".join(part for part in parts if part and part != "_modules")
    return plain_parameter_name(path)


def _parameter_before(
    captured: CapturedGraph, nodes: Sequence[torch.fx.Node], kinds: Sequence[NodeKind]
) -> list[str]:
    """Return for each node the one parameter that it derives from, if there is one and nothing else
    but graph inputs.
    """
    rank_of = {node: rank for rank, node in enumerate(nodes)}
    result = [""] * len(nodes)
    for rank, node in enumerate(nodes):
        if kinds[rank] is NodeKind.INPUT:
            result[rank] = captured.parameter_names.get(node.name, "")
        else:
            names = {result[rank_of[n]] for n in node.all_input_nodes}
            result[rank] = names.pop() if len(names) == 1 else ""
    return result


def _parameter_after(
    captured: CapturedGraph,
    nodes: Sequence[torch.fx.Node],
    kinds: Sequence[NodeKind],
    fsdp: frozenset[int],
) -> list[str]:
    """Return for each node the one parameter whose gradient its result ends in, by the descriptors
    of AOTAutograd on the outputs.
    """
    result = [""] * len(nodes)
    rank_of = {node: rank for rank, node in enumerate(nodes)}
    gradient_of = _gradient_outputs(nodes[-1]) if nodes and kinds[-1] is NodeKind.OUTPUT else {}
    for rank in reversed(range(len(nodes))):
        node = nodes[rank]
        users = {
            gradient_of.get(node, "")
            if kinds[rank_of[u]] is NodeKind.OUTPUT
            else result[rank_of[u]]
            for u in node.users
        }
        moves = kinds[rank] is not NodeKind.START or rank in fsdp
        result[rank] = users.pop() if len(users) == 1 and moves else ""
    return result


def gradients_returned(
    captured: CapturedGraph, nodes: Sequence[torch.fx.Node], kinds: Sequence[NodeKind]
) -> tuple[str, ...]:
    """Return the names of the parameters whose gradients are outputs, sorted: by the descriptors of
    AOTAutograd, and where outputs have none, the inputs that the capture knows.
    """
    found = _gradient_outputs(nodes[-1]) if nodes and kinds[-1] is NodeKind.OUTPUT else {}
    names = captured.parameter_names
    known = found.values() or [names.get(name, name) for name in captured.gradient_inputs]
    return tuple(sorted(set(known)))


def _gradient_outputs(output: torch.fx.Node) -> dict[torch.fx.Node, str]:
    """Return output -> name of the parameter whose gradient it is
    (torch/_functorch/_aot_autograd/descriptors.py: GradAOTOutput).
    """
    values = output.args[0] if output.args else ()
    described: Any = output.meta.get("desc")
    if (
        not isinstance(values, list | tuple)
        or not isinstance(described, list | tuple)
        or len(values) != len(described)
    ):
        return {}
    names = map(gradient_of, described)
    return {
        v: name
        for v, name in zip(values, names, strict=True)
        if isinstance(v, torch.fx.Node) and name
    }
