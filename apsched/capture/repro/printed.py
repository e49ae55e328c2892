"""Reads a graph that torch printed into a trace (``aot_forward_graph``), where no
``fx_graph_runnable`` was written: backends other than Inductor leave only this graph.

    class GraphModule(torch.nn.Module):
        def forward(self, primals_1: "f32[8, 64][64, 1]cpu", primals_2, primals_3: "Sym(s7)"):
            mm: "f32[8, 8][8, 1]cpu" = torch.ops.aten.mm.default(...)

The annotations have type, shape, strides and device of each input. This module makes from them the
functions of a runnable file, so that the rest is read as in such a file. Bodies of subgraphs stand
below. Storages of saved values come from the forward graph (:mod:`apsched.capture.repro.saved`).
"""

import ast
import re
from collections.abc import Mapping

from apsched.capture.repro.saved import SavedView
from apsched.capture.repro.source import ReproSource, fault
from apsched.errors import InputError
from apsched.torch_compat.repro import dtype_abbreviations

_TENSOR = re.compile(
    r"(?P<dtype>[a-z]\w*)\[(?P<shape>[^\]]*)\]\[(?P<stride>[^\]]*)\](?P<device>[a-z]+(?::\d+)?)"
)
_SYMBOL = re.compile(r"Sym\((?P<size>.*)\)")
_CLASS = re.compile(r"^(\s*)class ([^(\n]*)\((?:torch\.)?nn\.Module\):", re.MULTILINE)
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
_UNNAMED = "Printed"
_SHARED = "shared"
"""Begins the names of storages that several inputs may have."""


def parse_printed(
    name: str,
    text: str,
    symbols: Mapping[str, int],
    saved: Mapping[str, SavedView] | None = None,
) -> ReproSource:
    """Return the parts of the printed graph ``text``; lines are those of the file ``name``, and
    ``symbols`` the values of symbolic sizes, beside lines ``s7 = 16`` before the graph. ``saved``
    are views by the name of the input that has them.

    Raises
    ------
    InputError
        If it is no graph with its shapes; the message names the line.
    """
    named = _CLASS.sub(lambda m: f"{m[1]}class {_identifier(m[2])}(torch.nn.Module):", text)
    try:
        body = ast.parse(named).body
        found = next(n for n in body if isinstance(n, ast.ClassDef))
    except (*_NO_PYTHON, StopIteration) as error:
        raise fault(
            name,
            getattr(error, "lineno", None) or 1,
            "expected a graph that torch printed, found no Python; it is cut short, trace again",
        ) from None
    stated = {
        line.targets[0].id: line.value.value
        for line in body
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, int)
    }
    return _parts(name, found, {**symbols, **stated}, saved or {})


def _identifier(name: str) -> str:
    return name if name.isidentifier() else _UNNAMED


def _parts(
    path: str,
    printed: ast.ClassDef,
    symbols: Mapping[str, int],
    saved: Mapping[str, SavedView],
) -> ReproSource:
    """Return the parts of one printed class, with its subgraphs."""
    forward = next(
        (n for n in printed.body if isinstance(n, ast.FunctionDef) and n.name == "forward"), None
    )
    if forward is None:
        raise fault(path, printed.lineno, "expected a printed graph with forward, found none")
    load_args = _function("load_args(reader)", forward.lineno)
    written: set[str] = set()
    for k, argument in enumerate(forward.args.args[1:]):
        try:
            for statement in _input(path, k, argument, saved.get(argument.arg)):
                if statement not in written:  # the storage of an input before
                    _add(load_args, statement, argument.lineno)
                written |= {statement} if statement.startswith(_SHARED) else set()
        except _NO_PYTHON as error:
            if isinstance(error, InputError):
                raise
            raise _no_shape(path, argument) from None
    init = _function("__init__(self)", forward.lineno)
    for line in forward.body:
        try:
            if (constant := _constant(line)) is not None:
                _add(init, constant, line.lineno)
        except _NO_PYTHON:
            raise fault(
                path,
                line.lineno,
                f"expected the shape of a constant as torch prints it, found {ast.unparse(line)}",
            ) from None
    return ReproSource(
        path=path,
        init=init,
        forward=forward,
        load_args=load_args,
        symbols=symbols,
        group_sizes={},
        subgraphs={
            n.name: _parts(path, n, symbols, {})
            for n in printed.body
            if isinstance(n, ast.ClassDef)
        },
    )


def _function(signature: str, line: int) -> ast.FunctionDef:
    (found,) = ast.parse(f"def {signature}:\n    pass\n").body
    assert isinstance(found, ast.FunctionDef)
    found.lineno = line
    return found


def _add(function: ast.FunctionDef, statement: str, line: int) -> None:
    """Add ``statement`` to the body of ``function``, at ``line`` of the file."""
    (added,) = ast.parse(statement).body
    for node in ast.walk(added):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = line
    function.body.append(added)


def _input(path: str, k: int, argument: ast.arg, saved: SavedView | None) -> tuple[str, ...]:
    """Return the lines of ``load_args`` for one input, which may be a view that forward saved."""
    if argument.annotation is None:
        return (f"reader.opaque({argument.arg!r})",)
    text = argument.annotation.value if isinstance(argument.annotation, ast.Constant) else ""
    if match := _SYMBOL.fullmatch(str(text)):
        return (f"reader.symint(None, expr={match['size']!r})",)
    match = _TENSOR.fullmatch(str(text))
    dtype = dtype_abbreviations().get(match["dtype"]) if match else None
    if match is None or dtype is None:
        raise _no_shape(path, argument)
    shape, stride = (_sizes(match[part]) for part in ("shape", "stride"))
    last = " + ".join(["1", *(f"(({n}) - 1)*({s})" for n, s in zip(shape, stride, strict=False))])
    size = "0" if "0" in shape else f"{dtype.itemsize}*({last})"
    storage, offset = f"buf{k}", "0"
    if saved is not None and saved.is_of(dtype, shape, stride):
        storage, size, offset = f"{_SHARED}{saved.storage}", saved.size_bytes, saved.offset
    return (
        f"{storage} = reader.storage(None, {size}, device={match['device']!r})",
        f"reader.tensor({storage}, {_tuple(shape)}, {_tuple(stride)}, dtype={dtype},"
        f" storage_offset={offset})",
    )


def _no_shape(path: str, argument: ast.arg) -> InputError:
    assert argument.annotation is not None
    return fault(
        path,
        argument.lineno,
        f"expected type, shape, strides and device of {argument.arg}, such as"
        f" 'f32[8, 64][64, 1]cpu', found {ast.unparse(argument.annotation)}; hand in"
        " fx_graph_runnable",
    )


def _constant(line: ast.stmt) -> str | None:
    """Return the line of ``__init__`` for an attribute that ``line`` reads: a tensor where its
    shape is printed, else a subgraph.
    """
    match line:
        case ast.AnnAssign(
            annotation=ast.Constant(value=str() as text),
            value=ast.Attribute(value=ast.Name(id="self"), attr=name),
        ) if (found := _TENSOR.fullmatch(text)) and found["dtype"] in dtype_abbreviations():
            dtype = dtype_abbreviations()[found["dtype"]]
            return f"self.{name} = torch.empty({_tuple(_sizes(found['shape']))}, dtype={dtype})"
        case (
            ast.AnnAssign(value=ast.Attribute(value=ast.Name(id="self"), attr=name))
            | ast.Assign(value=ast.Attribute(value=ast.Name(id="self"), attr=name))
        ):
            return f"self.{name} = ..."
    return None


def _sizes(text: str) -> list[str]:
    """Return the sizes of ``8, Max(1, s7)``, as text."""
    sizes = ast.parse(f"({text}{',' if text.strip() else ''})", mode="eval").body
    return [ast.unparse(size) for size in sizes.elts] if isinstance(sizes, ast.Tuple) else [text]


def _tuple(sizes: list[str]) -> str:
    return f"({''.join(f'{size}, ' for size in sizes)})"
