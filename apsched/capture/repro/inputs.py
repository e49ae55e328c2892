"""Reads ``load_args(reader)`` of a repro file into fake tensors and symbolic sizes."""

import ast
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apsched.capture.repro.source import ReproSource
from apsched.capture.repro.values import (
    UnreadableError,
    device_value,
    size_value,
    sizes_value,
    stand_in,
    torch_constant,
)
from apsched.errors import InputError
from apsched.torch_compat.graphs import symbolic_size
from apsched.torch_compat.sizes import DEPENDS_ON_DATA, size_hint, unknown_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproInput:
    """One input of the graph."""

    value: Any
    """A fake tensor, an integer, a symbolic integer, a generator, or None."""
    device: str
    """The device in the job, as in the file; empty if it is no tensor."""
    line: int
    missing: str
    """Why the file has no value for it; empty where it has."""


@dataclass(slots=True)
class Symbols:
    """The symbolic sizes of one file; each is made when first met."""

    source: ReproSource
    mode: FakeTensorMode
    hints: dict[str, int]
    known: dict[str, Any] = field(default_factory=dict)

    def __call__(self, name: str) -> Any:
        """Return the symbolic integer called ``name``."""
        if name not in self.known:
            assert self.mode.shape_env is not None
            if name not in self.hints and DEPENDS_ON_DATA.fullmatch(name):
                self.known[name] = unknown_size(self.mode.shape_env, name)
                return self.known[name]
            if name not in self.hints:
                raise UnreadableError(
                    f"the symbolic size {name}, whose value the file does not say (add a line"
                    f" '{name} = <size>' at its top)"
                )
            self.known[name] = symbolic_size(self.mode.shape_env, name, self.hints[name])
        return self.known[name]


@dataclass(frozen=True, slots=True)
class _Storage:
    data: torch.Tensor
    size_bytes: int
    device: torch.device


def read_inputs(source: ReproSource, mode: FakeTensorMode) -> tuple[ReproInput, ...]:
    """Return the inputs in the order of ``load_args``; tensors that share a storage in the file
    share it here.

    Raises
    ------
    InputError
        If a line of ``load_args`` is not one that torch writes; the message names it.
    """
    reader = _Reader(source, mode)
    for statement in source.load_args.body:
        try:
            reader.read(statement)
        except UnreadableError as error:
            raise source.fault(
                statement.lineno, f"expected a line of load_args as torch writes it, found {error}"
            ) from None
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InputError):
                raise
            reason = str(error).split("\n")[0]
            raise source.fault(
                statement.lineno,
                f"expected the shape of a tensor, found one that torch refuses: {reason}",
            ) from None
    return tuple(reader.inputs)


class _Reader:
    """Follows torch's ``InputReader`` (torch/_dynamo/debug_utils.py), on fake tensors."""

    def __init__(self, source: ReproSource, mode: FakeTensorMode) -> None:
        self.inputs: list[ReproInput] = []
        self._mode = mode
        self._storages: dict[str, _Storage] = {}
        self._symbols = Symbols(
            source, mode, {**_hints_of_inputs(source.load_args), **source.symbols}
        )

    def read(self, statement: ast.stmt) -> None:
        """Take one statement of ``load_args``."""
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return  # a comment in quotes: what torch says of an input that it could not write
            case ast.If(test=ast.Call(func=ast.Name(id="hasattr"))):
                return  # sets values for repeat_interleave; sizes do not depend on it
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if (
                _method(call) == "storage"
            ):
                self._storages[name] = self._storage(call)
            case ast.Assign(value=ast.Call() as call) | ast.Expr(value=ast.Call() as call) if (
                _method(call)
            ):
                self.inputs.append(self._input(call))
            case _:
                raise UnreadableError(f"{ast.unparse(statement).splitlines()[0]!r}")

    def _storage(self, call: ast.Call) -> _Storage:
        named = _keywords(call)
        if len(call.args) < 2:
            raise UnreadableError("a storage without its size in bytes")
        size_bytes = size_value(call.args[1], self._symbols)
        if size_hint(size_bytes) < 0:
            raise UnreadableError(f"a storage of {size_hint(size_bytes)} bytes")
        device = device_value(named["device"]) if "device" in named else torch.device("cpu")
        with self._mode:
            data = torch.empty(size_bytes, dtype=torch.uint8, device=stand_in(device))
        return _Storage(data, size_bytes, device)

    def _input(self, call: ast.Call) -> ReproInput:
        line = call.lineno
        match _method(call):
            case "tensor":
                value, device = self._tensor(call)
                return ReproInput(value=value, device=str(device), line=line, missing="")
            case "symint":
                return ReproInput(value=self._symint(call), device="", line=line, missing="")
            case "generator":
                return ReproInput(value=torch.Generator(), device="", line=line, missing="")
            case "const":
                return ReproInput(
                    value=None,
                    device="",
                    line=line,
                    missing="was left out as a constant when the job was compiled",
                )
            case "unsupported" | "opaque":
                return ReproInput(
                    value=None,
                    device="",
                    line=line,
                    missing="is of a type that torch does not write to files",
                )
            case other:
                raise UnreadableError(
                    f"reader.{other}, which torch {torch.__version__} does not have"
                )

    def _tensor(self, call: ast.Call) -> tuple[torch.Tensor, torch.device]:
        """Return a fake tensor with the shape, strides, offset and type of a ``reader.tensor``
        line, and its device.
        """
        if len(call.args) < 2 or not isinstance(call.args[0], ast.Name):
            raise UnreadableError("a tensor without its storage and shape")
        storage = self._storages.get(call.args[0].id)
        if storage is None:
            raise UnreadableError(
                f"a tensor in {call.args[0].id}, a storage that no line before defines"
            )
        named = _keywords(call)
        shape = sizes_value(call.args[1], self._symbols)
        if any(size_hint(size) < 0 for size in shape):
            raise UnreadableError(f"a tensor with the negative shape {ast.unparse(call.args[1])}")
        stride = call.args[2] if len(call.args) > 2 else named.get("stride")
        strides = (
            _contiguous(shape)
            if stride is None or _is_none(stride)
            else sizes_value(stride, self._symbols)
        )
        if len(strides) != len(shape):
            raise UnreadableError(
                f"a tensor of {len(shape)} dimensions with {len(strides)} strides"
            )
        offset = (
            size_value(named["storage_offset"], self._symbols) if "storage_offset" in named else 0
        )
        dtype = torch_constant(ast.unparse(named["dtype"])) if "dtype" in named else torch.float32
        if not isinstance(dtype, torch.dtype):
            raise UnreadableError(f"{ast.unparse(named['dtype'])} where a dtype is expected")
        _check_fits(storage, shape, strides, offset, dtype)
        with self._mode, torch.no_grad():
            whole = storage.size_bytes - storage.size_bytes % dtype.itemsize
            data = (
                storage.data
                if size_hint(whole) == size_hint(storage.size_bytes)
                else storage.data[:whole]
            )
            return data.view(dtype).as_strided(shape, strides, offset), storage.device

    def _symint(self, call: ast.Call) -> Any:
        named = _keywords(call)
        expression = named.get("expr")
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            try:
                return size_value(ast.parse(expression.value, mode="eval").body, self._symbols)
            except SyntaxError:
                raise UnreadableError(f"the size {expression.value!r}") from None
        if len(call.args) != 1:
            raise UnreadableError("a symbolic size without a value")
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, float | bool):
            return call.args[0].value
        return size_value(call.args[0], self._symbols)


def _hints_of_inputs(load_args: ast.FunctionDef) -> dict[str, int]:
    """Return the values of sizes that are inputs themselves: ``reader.symint(16, expr='s77')``."""
    hints = {}
    for statement in load_args.body:
        match statement:
            case ast.Expr(
                value=ast.Call(
                    args=[ast.Constant(value=int() as hint)],
                    keywords=[ast.keyword(arg="expr", value=ast.Constant(value=str() as name))],
                )
            ):
                if name.isidentifier():
                    hints[name] = hint
    return hints


def _method(call: ast.Call) -> str:
    """Return ``x`` of ``reader.x(...)``, else an empty string."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="reader"), attr=attr):
            return attr
    return ""


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}


def _is_none(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is None


def _contiguous(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the strides of a contiguous tensor."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * torch.sym_max(size, 1)  # type: ignore[no-untyped-call]
    return tuple(reversed(strides))


def _check_fits(
    storage: _Storage,
    shape: tuple[Any, ...],
    strides: tuple[Any, ...],
    offset: Any,
    dtype: torch.dtype,
) -> None:
    """Refuse a tensor that reaches beyond its storage, at either end."""
    if any(size_hint(stride) < 0 for stride in strides):  # torch 2.11 takes them for fake tensors
        raise UnreadableError("a tensor with a negative stride; negative strides are not supported")
    sizes = [size_hint(size) for size in shape]
    if 0 in sizes:
        return
    last = size_hint(offset) + sum(
        (size - 1) * size_hint(stride) for size, stride in zip(sizes, strides, strict=True)
    )
    needed = (last + 1) * dtype.itemsize
    if needed > size_hint(storage.size_bytes):
        raise UnreadableError(
            f"a tensor that needs {needed} bytes in a storage of {size_hint(storage.size_bytes)}"
            " bytes"
        )
