"""Builds the FX graph of a repro file from the text of its ``forward``: one node a line, same
names, same order.
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apsched.capture.repro.constants import read_attributes
from apsched.capture.repro.inputs import ReproInput, read_inputs
from apsched.capture.repro.source import ReproSource
from apsched.capture.repro.values import (
    BINARY,
    COMPARE,
    NAMED_CONSTANTS,
    UNARY,
    UnreadableError,
    called_function,
    device_value,
    dotted_name,
    stand_in,
    torch_constant,
)

LINE = "apsched_line"
DEVICE = "apsched_device"
"""Key of ``node.meta``: the device that the file names, where another stands in for it."""


def build_graph(
    source: ReproSource, inputs: tuple[ReproInput, ...], mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """Return the graph as captured: nothing is decomposed, removed or renamed. Nodes carry their
    line, not yet their values.

    Raises
    ------
    InputError
        If a line of ``forward`` is not one that torch writes, or an operator is unknown; the
        message names it.
    """
    reader = _Reader(source)
    reader.placeholders(inputs)
    for statement in source.forward.body:
        try:
            reader.read(statement)
        except UnreadableError as error:
            raise source.fault(
                statement.lineno,
                f"expected a line of forward as AOTAutograd writes it, found {error}",
            ) from None
    if not reader.returned:
        raise source.fault(
            source.forward.end_lineno or 1,
            "expected forward to end with return, found none; the file is cut short, write it"
            " again",
        )
    root = read_attributes(source, reader.attributes, mode)
    for name in reader.attributes.keys() & source.subgraphs.keys():
        subgraph = source.subgraphs[name]
        setattr(root, name, build_graph(subgraph, read_inputs(subgraph, mode), mode))
    return torch.fx.GraphModule(root, reader.graph, class_name="Repro")


class _Reader:
    def __init__(self, source: ReproSource) -> None:
        self.graph = torch.fx.Graph()
        self.attributes: dict[str, int] = {}
        self.returned = False
        self._source = source
        self._values: dict[str, torch.fx.Node] = {}
        self._freed: set[str] = set()
        self._device = ""

    def placeholders(self, inputs: tuple[ReproInput, ...]) -> None:
        """Make a placeholder for each parameter of ``forward``."""
        signature = self._source.forward.args
        names = [item.arg for item in (*signature.posonlyargs, *signature.args)][1:]
        line = self._source.forward.lineno
        if signature.vararg or signature.kwarg or signature.kwonlyargs:
            raise self._source.fault(
                line,
                "expected forward(self, primals_1, ...), found * arguments, which AOTAutograd does"
                " not write",
            )
        if len(names) != len(inputs):
            raise self._source.fault(
                self._source.load_args.lineno,
                f"expected {len(names)} inputs in load_args, as forward takes, found {len(inputs)};"
                " the file is cut short or was edited, write it again",
            )
        for name, item in zip(names, inputs, strict=True):
            node = self._add("placeholder", name, name, (), {}, item.line)
            if item.device not in ("", "cpu", "meta"):
                node.meta[DEVICE] = item.device

    def read(self, statement: ast.stmt) -> None:
        """Take one statement of ``forward``."""
        if self.returned:
            raise UnreadableError(f"{ast.unparse(statement)!r} after return")
        match statement:
            case ast.Assign(targets=targets, value=ast.Constant(value=None)):
                self._free(targets)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self._assign(name, value, statement.lineno)
            case ast.Return(value=value):
                result = None if value is None else self._argument(value)
                self.graph.output(result).meta[LINE] = statement.lineno
                self.returned = True
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return
            case _:
                raise UnreadableError(f"{ast.unparse(statement).splitlines()[0]!r}")

    def _free(self, targets: list[ast.expr]) -> None:
        for target in targets:
            if not isinstance(target, ast.Name):
                raise UnreadableError(f"{ast.unparse(target)} = None")
            self._values.pop(target.id, None)
            self._freed.add(target.id)

    def _assign(self, name: str, value: ast.expr, line: int) -> None:
        """Add the node of ``name = value``."""
        self._device = ""
        match value:
            case ast.Name(id=other):
                self._values[name] = self._node(
                    other
                )  # a placeholder whose name Python reserves, under its name in the graph
                return
            case ast.Call(func=func, args=args, keywords=keywords):
                function = self._called(func)
                positional = tuple(self._argument(arg) for arg in args)
                named = {
                    keyword.arg: self._keyword(keyword)
                    for keyword in keywords
                    if keyword.arg is not None
                }
                if len(named) != len(keywords):
                    raise UnreadableError("a call with ** arguments")
                node = self._add("call_function", name, function, positional, named, line)
            case ast.Subscript(value=base, slice=index):
                node = self._add(
                    "call_function",
                    name,
                    operator.getitem,
                    (self._argument(base), self._index(index)),
                    {},
                    line,
                )
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                node = self._add(
                    "call_function",
                    name,
                    BINARY[type(op)],
                    (self._argument(left), self._argument(right)),
                    {},
                    line,
                )
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARE:
                node = self._add(
                    "call_function",
                    name,
                    COMPARE[type(op)],
                    (self._argument(left), self._argument(right)),
                    {},
                    line,
                )
            case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
                node = self._add(
                    "call_function", name, UNARY[type(op)], (self._argument(operand),), {}, line
                )
            case ast.Attribute() if (path := dotted_name(value)) and path.startswith("self."):
                attribute = path.removeprefix("self.")
                self.attributes.setdefault(attribute, line)
                node = self._add("get_attr", name, attribute, (), {}, line)
            case _:
                raise UnreadableError(f"{ast.unparse(value)!r}")
        if self._device:
            node.meta[DEVICE] = self._device

    def _add(
        self,
        op: str,
        name: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        line: int,
    ) -> torch.fx.Node:
        node = self.graph.create_node(op, target, args, kwargs, name=name)
        node.meta[LINE] = line
        self._values[name] = node
        self._freed.discard(name)
        return node

    def _called(self, func: ast.expr) -> Callable[..., Any]:
        path = dotted_name(func)
        if path is None or path.split(".")[0] in self._values or path.startswith("self."):
            raise UnreadableError(
                f"a call of {ast.unparse(func)}: a method or a module, as in a graph before"
                " AOTAutograd (trace with TORCHDYNAMO_REPRO_AFTER=aot)"
            )
        return called_function(path)

    def _node(self, name: str) -> torch.fx.Node:
        node = self._values.get(name)
        if node is None:
            raise UnreadableError(
                f"the value {name} after its last use"
                if name in self._freed
                else f"the name {name}, which no line before defines"
            )
        return node

    def _keyword(self, keyword: ast.keyword) -> Any:
        """Return a keyword argument; ``device='cuda'`` is a device, other strings are strings."""
        if (
            keyword.arg == "device"
            and isinstance(keyword.value, ast.Constant)
            and isinstance(keyword.value.value, str)
        ):
            return self._stand_in(keyword.value)
        return self._argument(keyword.value)

    def _stand_in(self, expression: ast.expr) -> torch.device:
        """Return the device that stands in for the one named, and remember that one."""
        device = device_value(expression)
        if stand_in(device) != device:
            self._device = str(device)
        return stand_in(device)

    def _index(self, expression: ast.expr) -> Any:
        if isinstance(expression, ast.Slice):
            return slice(
                *(
                    None if part is None else self._argument(part)
                    for part in (expression.lower, expression.upper, expression.step)
                )
            )
        return self._argument(expression)

    def _argument(self, expression: ast.expr) -> Any:
        """Return the argument that ``expression`` writes: nodes, constants, and tuples, lists and
        dicts of them.
        """
        match expression:
            case ast.Constant(value=value) if not isinstance(value, bytes):
                return value
            case ast.Name(id=name) if name in NAMED_CONSTANTS and name not in self._values:
                return NAMED_CONSTANTS[name]
            case ast.Name(id=name):
                return self._node(name)
            case ast.Tuple(elts=items):
                return tuple(self._argument(item) for item in items)
            case ast.List(elts=items):
                return [self._argument(item) for item in items]
            case ast.Dict(keys=keys, values=values) if all(
                isinstance(key, ast.Constant) for key in keys
            ):
                return {
                    key.value: self._argument(value)
                    for key, value in zip(keys, values, strict=True)
                    if isinstance(key, ast.Constant)
                }
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                return self._signed(sign, operand)
            case ast.BinOp(
                left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=complex())
            ) if not isinstance(left, ast.Name):
                return BINARY[type(expression.op)](
                    self._argument(left), self._argument(expression.right)
                )
            case ast.Call(func=func) if dotted_name(func) in ("device", "torch.device"):
                return self._stand_in(expression)
            case ast.Call(func=ast.Name(id="slice"), args=args, keywords=[]) if 1 <= len(args) <= 3:
                return slice(*(self._argument(arg) for arg in args))
            case ast.Attribute() if path := dotted_name(expression):
                return (
                    called_function(path) if path.startswith("torch.ops.") else torch_constant(path)
                )
        raise UnreadableError(f"the argument {ast.unparse(expression)}")

    def _signed(self, sign: ast.unaryop, operand: ast.expr) -> Any:
        value = self._argument(operand)
        if not isinstance(value, int | float | complex):
            raise UnreadableError(f"the argument {ast.unparse(operand)} with a sign")
        return UNARY[type(sign)](value)
