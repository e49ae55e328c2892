"""Commands and code blocks of the documentation."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^(?:    \$? ?)?(apsched (?! ).*|.*&& apsched .*)$", re.MULTILINE)
"""A row of a table has more spaces behind the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of code."""

    page: str
    language: str
    code: str
    run: bool
    """It has no mark ``<!-- not run: reason -->`` above it."""

    @property
    def file(self) -> str:
        """The name in its first line (``# train.py``); empty without one."""
        found = re.match(r"# (\S+\.py)\n", self.code)
        return found[1] if found else ""


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for mark, language, code in _BLOCK.findall(page.read_text()):
        yield Block(page=page.name, language=language, code=code, run=not mark)


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each ``apsched`` command that a page lists, of whole lines only."""
    text = page.read_text()
    shells = "\n".join(block.code for block in blocks_of(page) if block.language == "sh")
    outside = _BLOCK.sub("", text)
    listings = "\n".join(line for line in outside.splitlines() if line.startswith("    "))
    for line in _COMMAND.findall(f"{shells}\n{listings}"):
        words = shlex.split(line, comments=True)
        if "&&" in words:
            words = words[words.index("&&") + 1 :]
        yield words[1:]
