"""Values of the expressions of a repro file: constants, types, devices, operators and symbolic
sizes; Python evaluates none of them.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from apsched.torch_compat.graphs import import_op_library

NAMED_CONSTANTS: Mapping[str, float] = {"inf": math.inf, "nan": math.nan}
BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_SIZE_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_PLAIN_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "max": max,
    "min": min,
    "abs": abs,
    "pow": pow,
    "int": int,
    "float": float,
}
_SYMBOLIC_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    # torch/utils/_sympy/functions.py prints sizes with these names
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}
_ENUM_TYPES = (torch.dtype, torch.layout, torch.memory_format)
_MAX_EXPONENT = 64


class UnreadableError(Exception):
    """An expression that no file of torch has; the message has the expression. The reader adds file
    and line.
    """


def dotted_name(expression: ast.expr) -> str | None:
    """Return ``a.b.c`` of an attribute chain on a plain name; None for anything else."""
    parts: list[str] = []
    while isinstance(expression, ast.Attribute):
        parts.append(expression.attr)
        expression = expression.value
    if not isinstance(expression, ast.Name):
        return None
    return ".".join([expression.id, *reversed(parts)])


def torch_constant(name: str) -> object:
    """Return the torch.dtype, torch.layout or torch.memory_format that ``name`` (``torch.float32``)
    stands for.
    """
    root, _, attribute = name.partition(".")
    value = (
        getattr(torch, attribute, None) if root == "torch" and attribute.isidentifier() else None
    )
    if not isinstance(value, _ENUM_TYPES):
        raise UnreadableError(
            f"the name {name}, which is no type, layout or memory format of torch"
            f" {torch.__version__}"
        )
    return value


def called_function(name: str) -> Callable[..., Any]:
    """Return the operator or function of sizes that a graph may call by ``name``."""
    if name.startswith("torch.ops."):
        return _operator_of_torch(name)
    if (
        name.startswith("torch.")
        and name.split(".")[1].startswith(("sym_", "_sym_"))
        and name.count(".") == 1
    ):
        function = getattr(torch, name.split(".")[1], None)
        if callable(function):
            return function  # type: ignore[no-any-return]
    for prefix in ("operator.", "_operator.", "operator_", "_operator_"):
        short = name.removeprefix(prefix)
        if short != name and not short.startswith("_") and callable(getattr(operator, short, None)):
            return getattr(operator, short)  # type: ignore[no-any-return]
    plain = _PLAIN_FUNCTIONS.get(name.replace("math_", "math."))
    if plain is None:
        raise UnreadableError(
            f"a call of {name}, which AOTAutograd does not write (if Dynamo wrote the file, trace"
            " with TORCHDYNAMO_REPRO_AFTER=aot)"
        )
    return plain


def _operator_of_torch(name: str) -> Callable[..., Any]:
    """Return the operator ``torch.ops.<namespace>.<name>[.<overload>]``."""
    namespace, *path = name.removeprefix("torch.ops.").split(".")
    found = _lookup(namespace, path)
    if found is None and import_op_library(namespace):
        found = _lookup(namespace, path)
    if found is None:
        raise UnreadableError(
            f"the operator {name}, which torch {torch.__version__} does not know without the"
            " library that defines it (name its module: --import MODULE on the command line,"
            " imports= in Python)"
        )
    if isinstance(found, torch._ops.OpOverloadPacket):
        overloads = found.overloads()  # type: ignore[no-untyped-call]
        if len(overloads) != 1:
            raise UnreadableError(
                f"the operator {name} without its overload (one of {', '.join(overloads)})"
            )
        found = getattr(found, overloads[0])
    if not isinstance(found, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        raise UnreadableError(f"{name}, which is no operator")
    return found


def _lookup(namespace: str, path: list[str]) -> object:
    """Return the object at ``path`` inside ``torch.ops.<namespace>``; None if there is none."""
    found: object = getattr(torch.ops, namespace, None)
    for part in path:
        if (
            part.startswith("__")
            and part.endswith("__")
            and not isinstance(found, torch._ops._OpNamespace)
        ):
            return None
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            return None
    return found


def size_value(expression: ast.expr, symbol: Callable[[str], Any]) -> Any:
    """Return the integer (or symbolic integer) that ``expression`` stands for; ``symbol`` gives the
    value of a name.
    """
    match expression:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -size_value(operand, symbol)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _SIZE_ARITHMETIC):
            a, b = size_value(left, symbol), size_value(right, symbol)
            if isinstance(op, ast.Pow) and not (isinstance(b, int) and 0 <= b <= _MAX_EXPONENT):
                raise UnreadableError(
                    f"the size {ast.unparse(expression)} with an exponent that no size has"
                )
            try:
                return a // b if isinstance(op, ast.Div) else BINARY[type(op)](a, b)
            except ZeroDivisionError:
                raise UnreadableError(
                    f"the size {ast.unparse(expression)}, which divides by zero"
                ) from None
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if (
            name in _SYMBOLIC_FUNCTIONS and len(args) == 2
        ):
            return _SYMBOLIC_FUNCTIONS[name](*(size_value(arg, symbol) for arg in args))
    raise UnreadableError(f"{ast.unparse(expression)} where a size is expected")


def sizes_value(expression: ast.expr, symbol: Callable[[str], Any]) -> tuple[Any, ...]:
    """Return the tuple of sizes that ``expression`` (a tuple or list) stands for."""
    if not isinstance(expression, (ast.Tuple, ast.List)):
        raise UnreadableError(f"{ast.unparse(expression)} where a tuple of sizes is expected")
    return tuple(size_value(item, symbol) for item in expression.elts)


def device_value(expression: ast.expr) -> torch.device:
    """Return the device of ``device(type='cuda', index=0)``, ``torch.device('cuda:0')`` or
    ``'cuda'``, as in the file.
    """
    match expression:
        case ast.Constant(value=str() as text):
            parts: list[Any] = [text]
        case ast.Call(func=func, args=args, keywords=keywords) if dotted_name(func) in (
            "device",
            "torch.device",
        ):
            named = {keyword.arg: keyword.value for keyword in keywords}
            ordered = [*args, *(named[key] for key in ("type", "index") if key in named)]
            if not all(isinstance(item, ast.Constant) for item in ordered):
                raise UnreadableError(f"the device {ast.unparse(expression)}")
            parts = [item.value for item in ordered if isinstance(item, ast.Constant)]
        case _:
            raise UnreadableError(f"{ast.unparse(expression)} where a device is expected")
    try:
        return torch.device(*parts)
    except (RuntimeError, TypeError, ValueError):
        raise UnreadableError(
            f"the device {ast.unparse(expression)}, which torch does not know"
        ) from None


def stand_in(device: torch.device) -> torch.device:
    """Return the device that stands in for ``device`` on a machine that may not have it: every
    accelerator becomes ``cpu``.
    """
    return device if device.type in ("cpu", "meta") else torch.device("cpu")
