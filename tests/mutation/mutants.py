"""Small faults in functions: where one can be made, and the code of a function that has it.

A fault is made in the syntax tree of a file and compiled; no file changes. Faults are made in
bodies of functions alone: not in docstrings, annotations, decorators, defaults, or in what makes a
message (``raise``, f-strings).
"""

import ast
import random
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,  # codespell:ignore notin
    ast.NotIn: ast.In,  # codespell:ignore notin
}
_RECKONED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_EXTREMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmin": "argmax",
    "argmax": "argmin",
}
_TEXTS = (ast.JoinedStr, ast.Raise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault."""

    file: str
    """From the root of the checkout."""
    site: int
    """Which of the sites of the file."""
    kind: str
    function: str
    first_line: int
    """First line of the function, decorators included."""
    last_line: int
    lines: tuple[int, int]
    """First and last line of the statement, or of the head of a compound one."""
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.lines[0]}#{self.site}"


@dataclass(slots=True, kw_only=True)
class _Site:
    owner: ast.AST
    field: str
    index: int | None
    new: ast.AST
    kind: str
    lines: tuple[int, int]

    @property
    def old(self) -> ast.AST:
        value = getattr(self.owner, self.field)
        return value if self.index is None else value[self.index]

    def make(self) -> None:
        ast.copy_location(self.new, self.old)
        if self.index is None:
            setattr(self.owner, self.field, self.new)
        else:
            getattr(self.owner, self.field)[self.index] = self.new


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Return all faults that can be made in ``file``."""
    found: list[Mutant] = []
    for name, function in _functions(ast.parse((root / file).read_text())):
        for site in _sites(function):
            found.append(
                Mutant(
                    file=file,
                    site=len(found),
                    kind=site.kind,
                    function=name,
                    first_line=_first_line(function),
                    last_line=function.end_lineno or function.lineno,
                    lines=site.lines,
                    before=_text(site.old),
                    after=_text(site.new),
                )
            )
    return found


def code_of(root: Path, mutant: Mutant, filename: str) -> CodeType:
    """Return the code of the function of ``mutant`` with its fault, as if from ``filename``."""
    tree = ast.parse((root / mutant.file).read_text())
    sites = (site for _, function in _functions(tree) for site in _sites(function))
    next(site for k, site in enumerate(sites) if k == mutant.site).make()
    module = compile(ast.fix_missing_locations(tree), filename, "exec")
    (code,) = [
        code
        for code in _codes(module)
        if code.co_qualname == mutant.function and code.co_firstlineno == mutant.first_line
    ]
    return code


def sampled(root: Path, files: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """Return ``number`` faults, the same for the same files and seed; of each file as large a share
    as it has of all, and one at least.
    """
    rng = random.Random(seed)
    every = {file: mutants_of(root, file) for file in files}
    every = {file: found for file, found in every.items() if found}
    total = sum(map(len, every.values()))
    share = {file: max(1, number * len(found) // total) for file, found in every.items()}
    for file in sorted(every, key=lambda file: -(number * len(every[file]) % total)):
        share[file] += sum(share.values()) < number
    return [
        mutant
        for file, found in every.items()
        for mutant in sorted(rng.sample(found, min(share[file], len(found))), key=lambda m: m.site)
    ]


def found_again(root: Path, name: str, change: tuple[str, str, str, str]) -> Mutant | None:
    """Return the fault that was called ``name`` where it is now, after other changes of its file:
    the same ``change`` (function, kind, before, after), the nearest by its site; ``None`` where
    there is none any more.
    """
    file, line, site = re.fullmatch(r"(.+):(\d+)#(\d+)", name).groups()  # type: ignore[union-attr]
    if not (root / file).exists():
        return None
    alike = (
        mutant
        for mutant in mutants_of(root, file)
        if (mutant.function, mutant.kind, mutant.before, mutant.after) == change
    )
    return min(
        alike,
        key=lambda m: (abs(m.site - int(site)), abs(m.lines[0] - int(line))),
        default=None,
    )


def _functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield outermost functions and methods by their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If):
            yield from _functions(node, prefix)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _sites(function: ast.AST) -> Iterator[_Site]:
    for statement in _body_without_docstring(function):
        yield from _in_statement(function, "body", function.body.index(statement), statement)


def _body_without_docstring(function: ast.AST) -> list[ast.stmt]:
    return function.body[ast.get_docstring(function) is not None :]


def _in_statement(owner: ast.AST, field: str, index: int, statement: ast.stmt) -> Iterator[_Site]:
    """Yield the sites of a statement, those of the statements inside it among them."""
    lines = _head(statement)
    if isinstance(statement, _TEXTS):
        return
    if _may_go(statement):
        yield _Site(
            owner=owner,
            field=field,
            index=index,
            new=ast.Pass(),
            kind="statement removed",
            lines=lines,
        )
    if isinstance(statement, ast.Return) and statement.value is not None:
        yield _Site(
            owner=statement,
            field="value",
            index=None,
            new=ast.Constant(None),
            kind="return value dropped",
            lines=lines,
        )
    if isinstance(statement, ast.FunctionDef):
        yield from _sites(statement)
        return
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _RECKONED:
        yield _Site(
            owner=statement,
            field="op",
            index=None,
            new=_RECKONED[type(statement.op)](),
            kind="arithmetic",
            lines=lines,
        )
    for name, value in ast.iter_fields(statement):
        if name == "annotation":
            continue
        parts = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for k, part in parts:
            if isinstance(part, ast.stmt):
                yield from _in_statement(statement, name, k, part)
            elif isinstance(part, ast.AST):
                yield from _in_expression(statement, name, k, part, lines)


def _in_expression(
    owner: ast.AST, field: str, index: int | None, node: ast.AST, lines: tuple[int, int]
) -> Iterator[_Site]:
    if isinstance(node, _TEXTS):
        return
    if isinstance(node, ast.match_case | ast.ExceptHandler):
        for k, inner in enumerate(node.body):
            yield from _in_statement(node, "body", k, inner)
        return

    def site(new: ast.AST, kind: str) -> _Site:
        return _Site(owner=owner, field=field, index=index, new=new, kind=kind, lines=lines)

    is_condition = field == "test" or (field == "ifs" and isinstance(owner, ast.comprehension))
    if is_condition:
        yield site(ast.UnaryOp(ast.Not(), deepcopy(node)), "condition negated")
    if isinstance(node, ast.Compare):
        for k, op in enumerate(node.ops):
            new = deepcopy(node)
            new.ops[k] = _COMPARED[type(op)]()
            yield site(new, "comparison")
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield site(ast.BoolOp(other, deepcopy(node.values)), "and, or")
    elif isinstance(node, ast.BinOp) and type(node.op) in _RECKONED and not _is_display(node):
        new = deepcopy(node)
        new.op = _RECKONED[type(node.op)]()
        yield site(new, "arithmetic")
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for more in (1, -1):
            yield site(ast.Constant(node.value + more), f"constant {more:+d}")
    elif isinstance(node, ast.Name) and field == "func" and node.id in _EXTREMES:
        yield site(ast.Name(_EXTREMES[node.id], ast.Load()), "min, max")
    elif isinstance(node, ast.Attribute) and node.attr in _EXTREMES:
        yield site(
            ast.Attribute(deepcopy(node.value), _EXTREMES[node.attr], ast.Load()), "min, max"
        )
    for name, value in ast.iter_fields(node):
        parts = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for k, part in parts:
            if isinstance(part, ast.expr | ast.comprehension | ast.keyword | ast.Slice):
                yield from _in_expression(node, name, k, part, lines)


def _may_go(statement: ast.stmt) -> bool:
    """Whether the code has a meaning without the statement: no name is left without a value."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and not _reports(statement.value)
    if isinstance(statement, ast.Assign):
        return all(isinstance(t, ast.Subscript | ast.Attribute) for t in statement.targets)
    return isinstance(statement, ast.AugAssign | ast.Continue | ast.Break | ast.Delete)


def _reports(call: ast.Call) -> bool:
    return "report" in ast.unparse(call.func)


def _is_display(node: ast.BinOp) -> bool:
    """Whether the sum is one of lists, tuples or texts, by its look."""
    shown = (ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr)
    return any(
        isinstance(side, shown) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def _head(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    last = statement.end_lineno or statement.lineno
    if isinstance(body, list) and body:
        last = max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, last


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.operator):
        return type(node).__name__
    text = ast.unparse(ast.fix_missing_locations(deepcopy(node)))
    return " ".join(text.split())
