"""Sizes of captured graphs that depend on data, from traces of the job."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from apsched.calibrate.profile.sizes import Shape, profiled_sizes
from apsched.calibrate.profile.trace import Trace
from apsched.costs.compute.operation import as_traced, operation_text, tensor_text
from apsched.costs.compute.traffic import op_name
from apsched.fx.operands import bound_arguments, tensors_in
from apsched.torch_compat.sizes import depends_on_data, size_hint, solved


def sizes_of_profile(graphs: Iterable[torch.fx.Graph], traces: Sequence[Trace]) -> dict[str, int]:
    """Return symbol -> size, of the sizes of ``graphs`` that depend on data, in the order in which
    they run: the median over all steps of ``traces``.

    Sizes that no operator of the traces has are left out; symbols of which only the sum is seen
    share it evenly.
    """
    unknown: list[torch.SymInt] = []
    numbers: dict[str, int] = {}

    def shown(size: Any) -> str:
        if not depends_on_data(size):
            return str(size_hint(size))
        number = numbers.setdefault(str(size), len(unknown))
        if number == len(unknown):
            unknown.append(size)
        return f"<{number}>"

    shapes = [
        Shape(as_traced(operation_text(op_name(node.target), _arguments(node, shown))))
        for graph in graphs
        for node in graph.nodes
        if node.op == "call_function" and _has_values(node)
    ]
    if not unknown:
        return {}
    found = profiled_sizes(shapes, traces)
    return solved((unknown[number], size) for number, size in found.items())


def _has_values(node: torch.fx.Node) -> bool:
    """Return whether all arguments of a node have a value: the result of an assertion has none."""
    return all(source.op == "get_attr" or "val" in source.meta for source in node.all_input_nodes)


def _arguments(node: torch.fx.Node, shown: Any) -> list[str | list[str]]:
    """Return the tensors that a node takes, as an operation has them."""

    def text(tensor: torch.Tensor) -> str:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return tensor_text(dtype, tuple(map(shown, tensor.shape)))

    found: list[str | list[str]] = []
    for value in bound_arguments(node).values():
        if isinstance(value, torch.Tensor):
            found.append(text(value))
        elif listed := [text(tensor) for tensor in tensors_in(value)]:
            found.append(listed)
    return found
