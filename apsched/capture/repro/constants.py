"""Reads the constants and submodules that ``__init__`` of a repro file sets: ``self.x = ...``,
``self.register_buffer('x', ...)``.
"""

import ast
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apsched.capture.repro.source import ReproSource
from apsched.capture.repro.values import (
    UnreadableError,
    device_value,
    dotted_name,
    size_value,
    sizes_value,
    stand_in,
    torch_constant,
)
from apsched.errors import InputError

_SHAPED = {
    "torch.randn",
    "torch.rand",
    "torch.empty",
    "torch.zeros",
    "torch.ones",
    "torch.randint",
}  # torch/_dynamo/debug_utils.py writes these
_WRAPPED = {"torch.nn.Parameter", "Parameter"}
_PRINTED = {"tensor", "torch.tensor"}
_PRINTED_FAKE = {"FakeTensor"}


class MissingSubgraph(torch.nn.Module):
    """A subgraph of a higher-order operator that the file names but does not hold; its shapes may
    be known without it.
    """

    def forward(self, *inputs: Any) -> Any:
        """Refuse: the file does not hold the subgraph."""
        raise RuntimeError(
            "the file does not hold the subgraph that this operator calls, as torch writes only its"
            " name"
        )


def read_attributes(
    source: ReproSource, wanted: dict[str, int], mode: FakeTensorMode
) -> torch.nn.Module:
    """Return a module with the attributes that ``forward`` reads, ``wanted`` (name -> line of first
    use), as fake tensors.

    Raises
    ------
    InputError
        If ``__init__`` does not set one of them, or not in a way that torch writes.
    """
    root = torch.nn.Module()
    values = _assigned(source)
    for name, line in wanted.items():
        if name not in values:
            raise source.fault(
                line,
                f"expected __init__ to set self.{name}, found no such line; the file was edited,"
                " write it again",
            )
        expression = values[name]
        if not _is_tensor(expression):
            setattr(root, name, MissingSubgraph())
            continue
        try:
            with mode:
                root.register_buffer(name, _tensor(expression))
        except UnreadableError as error:
            raise source.fault(
                expression.lineno, f"expected a constant tensor as torch writes it, found {error}"
            ) from None
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            if isinstance(error, InputError):
                raise
            reason = str(error).split("\n")[0]
            raise source.fault(
                expression.lineno,
                f"expected a constant tensor, found one that torch refuses: {reason}",
            ) from None
    return root


def _assigned(source: ReproSource) -> dict[str, ast.expr]:
    """Return the values that ``__init__`` assigns to each attribute of self."""
    values: dict[str, ast.expr] = {}
    for statement in source.init.body if source.init is not None else []:
        match statement:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value
            ):
                values[name] = value
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr="register_buffer"),
                    args=[ast.Constant(value=str() as name), value],
                )
            ):
                values[name] = value
    return values


def _is_tensor(expression: ast.expr) -> bool:
    """Return whether ``expression`` writes a tensor (anything else is a submodule)."""
    if not isinstance(expression, ast.Call):
        return False
    if (
        isinstance(expression.func, ast.Attribute)
        and expression.func.attr in ("to", "cuda")
        and isinstance(expression.func.value, ast.Call)
    ):
        return _is_tensor(expression.func.value)
    return dotted_name(expression.func) in _SHAPED | _WRAPPED | _PRINTED | _PRINTED_FAKE


def _tensor(expression: ast.expr) -> torch.Tensor:
    """Return the tensor that ``expression`` writes; runs under a fake mode."""
    match expression:
        case ast.Call(func=ast.Attribute(value=ast.Call() as inner, attr="to" | "cuda")):
            return _tensor(inner)  # the device: every one is mapped to the same stand-in
        case ast.Call(func=func, args=[ast.Call() as inner]) if dotted_name(func) in _WRAPPED:
            return _tensor(inner)
        case ast.Call(func=func, args=args, keywords=keywords):
            named = {keyword.arg: keyword.value for keyword in keywords if keyword.arg is not None}
            dtype = _dtype(named["dtype"]) if "dtype" in named else None
            device = (
                stand_in(device_value(named["device"]))
                if "device" in named
                else torch.device("cpu")
            )
            if dotted_name(func) in _PRINTED and args:
                return torch.tensor(_literal(args[0]), dtype=dtype, device=device)
            size = named.get("size", args[0] if args else None)
            if size is not None:
                return torch.empty(
                    sizes_value(size, _no_symbol), dtype=dtype or torch.float32, device=device
                )
    raise UnreadableError(f"{ast.unparse(expression)[:80]}")


def _dtype(expression: ast.expr) -> torch.dtype:
    dtype = torch_constant(ast.unparse(expression))
    if not isinstance(dtype, torch.dtype):
        raise UnreadableError(f"{ast.unparse(expression)} where a dtype is expected")
    return dtype


def _literal(expression: ast.expr) -> Any:
    """Return the numbers of a printed tensor."""
    match expression:
        case ast.List(elts=items):
            return [_literal(item) for item in items]
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_literal(operand)
        case ast.Constant(value=bool() | int() | float() | complex() as value):
            return value
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _literal(left) + _literal(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _literal(left) - _literal(right)
    return size_value(expression, _no_symbol)


def _no_symbol(name: str) -> Any:
    raise UnreadableError(f"the name {name} in a constant")
