"""The operation of an FX node (see :mod:`apsched.costs.compute.operation`)."""

from typing import Any

import torch

from apsched.costs.compute.operation import operation_text, tensor_text
from apsched.costs.compute.traffic import op_name
from apsched.fx.operands import bound_arguments, result_of, shape_of, tensors_in
from apsched.torch_compat.sizes import size_hint


def node_operation(node: torch.fx.Node) -> str:
    """Return the operation of ``node`` as one line; empty for inputs and outputs."""
    if node.op != "call_function":
        return ""
    arguments = [
        shown for value in bound_arguments(node).values() if (shown := _argument(value)) is not None
    ]
    return operation_text(
        op_name(node.target),
        arguments,
        [_tensor(result) for result in tensors_in(result_of(node))],
    )


def _argument(value: Any) -> str | list[str] | None:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    listed = [_tensor(tensor) for tensor in tensors_in(value)]
    return listed or None


def _tensor(tensor: torch.Tensor) -> str:
    strides = tuple(map(size_hint, tensor.stride())) if tensor.layout is torch.strided else None
    return tensor_text(str(tensor.dtype).removeprefix("torch."), shape_of(tensor), strides)
