"""Arguments and results of a node, as numbers: arguments by schema name, shapes with symbolic sizes
at their hints.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from apsched.errors import InputError
from apsched.fx.effects.of_node import attribute_of
from apsched.torch_compat.sizes import size_hint


def value_of(argument: object) -> Any:
    """Return ``argument`` with nodes (also inside lists, tuples and dicts) replaced by their
    ``meta["val"]``; subgraphs by None.
    """
    if isinstance(argument, torch.fx.Node):
        if "val" not in argument.meta and argument.op == "get_attr":  # a subgraph, or a constant
            constant = attribute_of(argument)
            return constant if isinstance(constant, torch.Tensor) else None
        if "val" not in argument.meta:
            raise InputError(
                f"node {argument.name!r} has no meta['val'], so its shape is unknown; capture with"
                " fake tensors or run FakeTensorProp"
            )
        return argument.meta["val"]
    if isinstance(argument, (list, tuple)):
        return (
            type(argument)([value_of(item) for item in argument])
            if type(argument) in (list, tuple)
            else [value_of(i) for i in argument]
        )
    if isinstance(argument, Mapping):
        return {key: value_of(item) for key, item in argument.items()}
    return argument


def result_of(node: torch.fx.Node) -> Any:
    """Return the value of ``node``; ``None`` of an operator that returns nothing (an assertion),
    which has none.
    """
    if (
        "val" not in node.meta
        and isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.returns
    ):
        return None
    return value_of(node)


def bound_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Return the values of the arguments by their names in the schema (by position where there is
    no schema).
    """
    values: dict[str, Any] = {}
    schema = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    for position, argument in enumerate(node.args):
        name = schema[position].name if position < len(schema) else str(position)
        values[name] = value_of(argument)
    values.update({name: value_of(argument) for name, argument in node.kwargs.items()})
    return values


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``, which may be nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in numbers."""
    return tuple([size_hint(size) for size in tensor.shape])


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of memory behind ``tensor``: an expanded dim (stride 0) counts once."""
    if tensor.layout is not torch.strided:
        return math.prod(shape_of(tensor)) * tensor.element_size()
    sizes = [
        size_hint(size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if type(stride) is not int or stride != 0
    ]
    return (
        math.prod(sizes) * tensor.element_size()
        if tensor.dim() == len(sizes) or 0 not in shape_of(tensor)
        else 0
    )
