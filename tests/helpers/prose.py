"""Texts of the repository that people read, and banned words in them.

A text is a place (``file:line``) and a string: a sentence or a line of a page, a string or a
comment of a source file.
"""

import ast
import io
import json
import re
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFLICT = re.compile(r"^(?:<{7}|\|{7}|>{7})(?: |$)", re.MULTILINE)
"""A marker that git leaves where a merge failed."""

_CODE = re.compile(r"``.+?``|`[^`]+`|https?://\S+", re.DOTALL)
_FENCE = re.compile(r"^\s*```")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A banned phrase."""

    match: re.Pattern[str]
    instead: str
    pages_only: bool
    strings_only: bool
    pending: tuple[str, ...]
    """Files that are not revised yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A piece of text and its place."""

    file: str
    line: int
    text: str
    string: bool = False
    """Whether it is a string of a source file: a docstring, a message, a help text."""


@cache
def rules() -> tuple[Rule, ...]:
    """Return the rules of ``tests/rules/banned_words.toml``."""
    return tuple(
        Rule(
            match=re.compile(rule["match"], re.IGNORECASE),
            instead=rule["instead"],
            pages_only={"pages": True, "all": False, "strings": False}[rule["in"]],
            strings_only=rule["in"] == "strings",
            pending=tuple(rule.get("pending", ())),
        )
        for rule in _stated()["rule"]
    )


@cache
def _stated() -> dict[str, Any]:
    return tomllib.loads((ROOT / "tests" / "rules" / "banned_words.toml").read_text())


def pages() -> tuple[Path, ...]:
    """Return the pages: README, CONTRIBUTING, CHANGELOG, ``docs/`` and notebooks."""
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    tops = (path for name in names if (path := ROOT / name).is_file())
    docs, notebooks = (ROOT / "docs").glob("*.md"), (ROOT / "notebooks").glob("*.ipynb")
    pending = _stated()["pending"]
    return tuple(
        page for page in (*tops, *sorted(docs), *sorted(notebooks)) if page.name not in pending
    )


def sources() -> tuple[Path, ...]:
    """Return the source files with docstrings, comments, messages and help texts."""
    tops = (ROOT / top for top in ("apsched", "solver", "models", "benchmarks"))
    found = {file.resolve() for top in tops for file in top.rglob("*.py")}
    return tuple(sorted(found))


def texts_of(file: Path) -> Iterator[Text]:
    """Yield the texts of a page (``.md``, ``.ipynb``) or of a source file (``.py``)."""
    name, content = file.name, file.read_text()
    if file.is_relative_to(ROOT):
        name = str(file.relative_to(ROOT))
    if file.suffix == ".ipynb":
        for cell in json.loads(content)["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                yield from _of_page(name, text)
    elif file.suffix == ".py":
        yield from _of_source(name, content)
    else:
        yield from _of_page(name, content)


def banned(texts: Iterator[Text], *, page: bool) -> list[str]:
    """Return a line for each banned phrase in ``texts``."""
    found = []
    for text in texts:
        plain = _CODE.sub("`code`", text.text)
        for rule in rules():
            left_out = (rule.pages_only and not page) or text.file in rule.pending
            if left_out or (rule.strings_only and not text.string):
                continue
            if hit := rule.match.search(plain):
                found.append(f"{text.file}:{text.line}: {hit[0].strip()!r}; write {rule.instead}")
    return found


def _of_page(name: str, content: str) -> Iterator[Text]:
    """Yield headings, rows of tables, and the sentences of each paragraph; listings are output or
    code, and left out.
    """
    listing, begin, paragraph = False, 1, list[str]()
    for number, line in enumerate([*content.splitlines(), ""], 1):
        fence = _FENCE.match(line) is not None
        alone = listing or fence or line.startswith(("    ", "#", "|")) or not line.strip()
        if alone and paragraph:
            for sentence in re.split(r"(?<=[.?!]) +(?=[A-Z`*\[])", " ".join(paragraph)):
                yield Text(file=name, line=begin, text=sentence)
            paragraph = []
        listing ^= fence
        if not listing and line.startswith(("#", "|")):
            yield Text(file=name, line=number, text=line)
        elif not alone:
            begin = begin if paragraph else number
            paragraph.append(line.strip())


def _of_source(name: str, content: str) -> Iterator[Text]:
    """Yield strings, those of docstrings and messages included, and comments."""
    tree = ast.parse(content)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = " ".join(node.value.split())
            yield Text(file=name, line=node.lineno, text=text, string=True)
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield Text(file=name, line=token.start[0], text=token.string)
