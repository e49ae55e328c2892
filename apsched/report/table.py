"""The two forms of output: a table for people, and one JSON object for programs."""

import json
from collections.abc import Collection
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

SCHEMA = 1
_WIDTH_OFF_TERMINAL = 140


class _Console(Console):
    """A console that leaves a closed pipe to its caller (Rich would end the process, status 1)."""

    def on_broken_pipe(self) -> None:
        """Raise again what Rich caught."""
        raise BrokenPipeError


def console(stream: TextIO) -> Console:
    """Return a console that wraps lines on terminals only."""
    width = None if stream.isatty() else _WIDTH_OFF_TERMINAL
    return _Console(file=stream, width=width, highlight=False, soft_wrap=not stream.isatty())


def plain_table(
    *headings: str, right: Collection[str] = (), no_wrap: Collection[str] = ()
) -> Table:
    """Return a table without lines; the columns ``right`` are justified so."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading in no_wrap,
        )
    return table


def result_json(**content: Any) -> dict[str, Any]:
    """Return the object of one answer, with the version of its form."""
    return {"schema": SCHEMA, **content}


def print_json(stream: TextIO, **content: Any) -> None:
    """Print the object of one answer on a line."""
    print(json.dumps(result_json(**content)), file=stream)
