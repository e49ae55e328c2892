"""Cuts a file that torch wrote for a traced job into the parts that describe the graph; runs none
of it.

The format is that of ``torch/_dynamo/repro/after_aot.py`` (``fx_graph_runnable``, minifier repros):

    s77 = 16                              sizes known by a symbol, with their values at tracing time
    import ...; torch._inductor.config... imports, settings, triton kernels: not read
    class Repro(torch.nn.Module): ...     constants and submodules in __init__, the graph in forward
    def load_args(reader): ...            shapes, strides and types of the inputs
    setup_fake_process_groups({...})      names and sizes of process groups (torch 2.11 and later)
"""

import ast
import itertools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from apsched.errors import InputError
from apsched.unpack import read_within

_WHAT_TO_HAND_IN = (
    "hand in the fx_graph_runnable or minifier repro that torch writes (TORCH_COMPILE_DEBUG=1,"
    " tlparse or TORCHDYNAMO_REPRO_AFTER=aot)"
)
_CLASS = re.compile(r"class Repro\b")
_LOAD_ARGS = re.compile(r"def load_args\s*\(")
_NEXT_STATEMENT = re.compile(
    r"[A-Za-z_@]"
)  # a line that starts so ends a definition; a closing bracket does not
_SYMBOL = re.compile(r"([A-Za-z_]\w*)\s*=\s*(-?\d+)\s*$")
_GROUPS = re.compile(r"setup_fake_process_groups\((\{.*?\}\})\)", re.DOTALL)
_SUBMODULE = re.compile(r"\s+self\.(\w+)\s*=")
_SELF = re.compile(r"\s+self\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproSource:
    """The parts of a repro file; line numbers of the trees are those of the file."""

    path: str
    init: ast.FunctionDef | None
    forward: ast.FunctionDef
    load_args: ast.FunctionDef
    symbols: Mapping[str, int]
    """Name of a symbolic size -> its value when the job was traced."""
    group_sizes: Mapping[str, int]
    """Process groups that the file sets up, where it does."""
    subgraphs: Mapping[str, "ReproSource"] = field(default_factory=dict)
    """Those of higher-order operators by their attributes, where the file has them."""

    def fault(self, line: int, message: str) -> InputError:
        """Return the error that names ``line`` of this file."""
        return fault(self.path, line, message)


def fault(path: str, line: int, message: str) -> InputError:
    """Return the error at ``line`` of the file ``path``."""
    return InputError(f"{path}:{line}: {message}")


def read_source(path: Path) -> ReproSource:
    """Return the parts of the repro file ``path``.

    Raises
    ------
    InputError
        If it cannot be read or is no repro file; the message names the line.
    """
    return parse_source(str(path), _read_text(path))


def parse_source(name: str, text: str, *, lines_before: int = 0) -> ReproSource:
    """Return the parts of the repro file with this ``text``, which begins behind ``lines_before``
    lines of the file ``name``.

    Raises
    ------
    InputError
        As :func:`read_source`.
    """
    text = "\n" * lines_before + text
    lines = text.splitlines()
    class_row = _find(_CLASS, lines)
    if class_row is None:
        raise _no_class(name, lines)
    args_row = _find(_LOAD_ARGS, lines)
    if args_row is None:
        raise fault(
            name,
            len(lines),
            "expected a function load_args(reader) with the shapes of the inputs, found none: the"
            " file is cut short or was written before torch 2.1; write it again",
        )
    repro = _parse_section(name, lines, class_row, class_name="Repro")
    load_args = _parse_section(name, lines, args_row, class_name=None)
    assert isinstance(repro, ast.ClassDef)
    assert isinstance(load_args, ast.FunctionDef)
    methods = {item.name: item for item in repro.body if isinstance(item, ast.FunctionDef)}
    if "forward" not in methods:
        raise fault(
            name,
            repro.lineno,
            f"expected class Repro to define forward(self, ...), found none; {_WHAT_TO_HAND_IN}",
        )
    return ReproSource(
        path=name,
        init=methods.get("__init__"),
        forward=methods["forward"],
        load_args=load_args,
        symbols={
            m[1]: int(m[2])
            for line in lines[: min(class_row, args_row)]
            if (m := _SYMBOL.match(line))
        },
        group_sizes=_group_sizes(name, text),
    )


def _read_text(path: Path) -> str:
    """Return the text of ``path``; every way in which it is no text file is an InputError."""
    if not path.exists():
        raise InputError(
            f"{path}: expected a file that torch wrote for a traced job, found nothing there; check"
            " the path"
        )
    if path.is_dir():
        raise InputError(f"{path}: expected a file, found a directory; {_WHAT_TO_HAND_IN}")
    try:
        data = read_within(path)
    except OSError as error:
        raise InputError(
            f"{path}: expected a readable file, found: {error.strerror}; check its permissions"
        ) from None
    if not data.strip():
        raise fault(str(path), 1, f"expected a repro file, found an empty one; {_WHAT_TO_HAND_IN}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise fault(
            str(path),
            line,
            f"expected Python text, found bytes that are no UTF-8; {_WHAT_TO_HAND_IN}",
        ) from None
    if "\0" in text:
        raise fault(
            str(path),
            text[: text.index("\0")].count("\n") + 1,
            f"expected Python text, found binary data; {_WHAT_TO_HAND_IN}",
        )
    return text


def _find(pattern: re.Pattern[str], lines: list[str]) -> int | None:
    return next((row for row, line in enumerate(lines) if pattern.match(line)), None)


def _no_class(name: str, lines: list[str]) -> InputError:
    """Return the error for a file without ``class Repro``, as precise as the file allows."""
    if any("due to existence of BackwardState" in line for line in lines):
        return fault(
            name,
            1,
            "torch wrote no repro, as the graph takes a BackwardState; trace the job without"
            " compiled autograd hooks",
        )
    printed = next((row for row, line in enumerate(lines) if "(torch.nn.Module):" in line), None)
    if printed is not None:
        return fault(
            name,
            printed + 1,
            f"expected class Repro, found a printed graph, which has no inputs; {_WHAT_TO_HAND_IN}",
        )
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        return fault(
            name,
            line,
            f"expected a Python file with class Repro, found no Python; {_WHAT_TO_HAND_IN}",
        )
    return fault(name, 1, f"expected class Repro(torch.nn.Module), found none; {_WHAT_TO_HAND_IN}")


def _parse_section(name: str, lines: list[str], start: int, *, class_name: str | None) -> ast.stmt:
    """Return the definition that begins at row ``start``; ``class_name`` allows its submodules to
    be unreadable.
    """
    end = next(
        (row for row in range(start + 1, len(lines)) if _NEXT_STATEMENT.match(lines[row])),
        len(lines),
    )
    section = lines[start:end]
    what = f"class {class_name}" if class_name is not None else "load_args"
    if class_name is not None:
        section = _without_unreadable_submodules(section)
    try:
        return _parse(section, start)
    except SyntaxError as error:
        line = error.lineno or start + 1
        raise fault(
            name,
            line,
            f"expected Python in {what}, found: {error.msg}; the file is cut short or was edited,"
            " write it again",
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise fault(
            name,
            start + 1,
            f"expected Python that torch wrote in {what}, found: {type(error).__name__}; write the"
            " file again",
        ) from None


def _parse(section: list[str], start: int) -> ast.stmt:
    """Return the one definition of ``section`` with the file's line numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd literals: what is no value here is refused by line
        return ast.parse("\n" * start + "\n".join(section) + "\n").body[0]


def _without_unreadable_submodules(section: list[str]) -> list[str]:
    """Return ``section`` with ``self.x = <...>`` in __init__ that is no Python replaced by ``self.x
    = ...``.

    torch prints the subgraphs of higher-order operators by their repr (``<lambda>()``), which
    cannot be parsed.
    """
    end = next(
        (row for row, line in enumerate(section) if re.match(r"\s+def forward\b", line)),
        len(section),
    )
    starts = [row for row in range(end) if _SELF.match(section[row])]
    result = list(section)
    for start, stop in itertools.pairwise([*starts, end]):
        text = "\n".join(section[start:stop]).strip()
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            match = _SUBMODULE.match(section[start])
            if match is not None:
                result[start:stop] = [f"{match[0]} ..."] + [""] * (stop - start - 1)
    return result


def _group_sizes(name: str, text: str) -> dict[str, int]:
    """Return the sizes that the call of ``setup_fake_process_groups`` states."""
    match = _GROUPS.search(text)
    if match is None:
        return {}
    line = text.count("\n", 0, match.start()) + 1
    try:
        table = ast.literal_eval(match[1])
        sizes = {group: info["size"] for group, info in table.items()}
    except (SyntaxError, ValueError, TypeError, KeyError, AttributeError):
        raise fault(
            name,
            line,
            "expected {name: {'size': ..., 'rank': ...}} of the process groups, found something"
            " else",
        ) from None
    for group, size in sizes.items():
        if (
            not isinstance(group, str)
            or not isinstance(size, int)
            or isinstance(size, bool)
            or size < 1
        ):
            raise fault(
                name,
                line,
                f"expected a process group with a size of at least 1, found {group!r} of size"
                f" {size!r}",
            )
    return sizes
