"""The operation of a node, as one line that a profiler, a measurement and a graph agree on.

    aten::mm(float32[128,64], float32[64,192]{1,64}) -> float32[128,192]

Tensors have dtype and shape, and strides where they are not contiguous; a list of tensors stands in
parentheses; other arguments are left out. A profiler sees less: no results, no dtype inside lists,
and numbers as tensors of no dimension. :func:`as_traced` keeps only the parts that it sees.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

_STRIDES = re.compile(r"\{[^}]*\}")
_LIST = re.compile(r"\(([^()]*)\)")
_DTYPE = re.compile(r"\w+(?=\[)")
_NUMBER = re.compile(r"\w+\[\]")


def tensor_text(
    dtype: str, shape: Sequence[int | str], strides: tuple[int, ...] | None = None
) -> str:
    """Return a tensor as text; ``strides`` only show where the tensor is not contiguous."""
    text = f"{dtype}[{','.join(map(str, shape))}]"
    if strides is None or _is_contiguous([int(size) for size in shape], strides):
        return text
    return f"{text}{{{','.join(map(str, strides))}}}"


def operation_text(operator: str, arguments: list[Any], results: list[str] | None = None) -> str:
    """Return an operation as text; an argument is a tensor's text, or a list of them."""
    shown = [
        argument if isinstance(argument, str) else f"({', '.join(argument)})"
        for argument in arguments
    ]
    text = f"{operator}({', '.join(shown)})"
    return f"{text} -> {', '.join(results)}" if results else text


def as_traced(operation: str) -> str:
    """Return the part of an operation that a profiler sees, too."""
    operator, _, rest = operation.partition(" -> ")[0].partition("(")
    arguments = _LIST.sub(
        lambda match: f"({_DTYPE.sub('', match[1])})", _STRIDES.sub("", rest.removesuffix(")"))
    )
    shapes = (part for part in _split(arguments) if not _NUMBER.fullmatch(part))
    return f"{operator}({', '.join(shapes)})"


def operator_of(operation: str) -> str:
    """Return the operator of an operation."""
    return operation.partition("(")[0]


def _split(arguments: str) -> list[str]:
    """Return arguments one by one: commas inside brackets divide nothing."""
    parts, depth, begin = [], 0, 0
    for k, letter in enumerate(arguments):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(arguments[begin:k].strip())
            begin = k + 1
    last = arguments[begin:].strip()
    return [*parts, last] if last else parts


def _is_contiguous(shape: Sequence[int], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    return all(
        size == 1 or stride == math.prod(shape[k + 1 :])
        for k, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )
