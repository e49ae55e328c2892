"""The console on which tables and lines are printed, and the JSON object for programs."""

import json
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

SCHEMA = 1
_WIDTH_OFF_TERMINAL = 200


class _Console(Console):
    """A console that raises at a closed pipe (Rich would end the process with status 1), that
    indents the rest of a line too long for the terminal, and that prints no spaces at the ends of
    lines off a terminal.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as Rich does: on a terminal with long lines of text wrapped and indented, off a
        terminal without the spaces that pad the last column.
        """
        if self.is_terminal:
            wrapped = (hanging(x, self.width) if isinstance(x, str) else x for x in objects)
            super().print(*wrapped, **options)
            return
        with self.capture() as printed:
            super().print(*objects, **options)
        text = "\n".join(line.rstrip(" ") for line in printed.get().split("\n"))
        self.file.write(text)
        self.file.flush()

    def on_broken_pipe(self) -> None:
        """Raise the error again that Rich caught."""
        raise BrokenPipeError


def console(stream: TextIO) -> Console:
    """Return a console that wraps lines on terminals only."""
    width = None if stream.isatty() else _WIDTH_OFF_TERMINAL
    return _Console(file=stream, width=width, highlight=False, soft_wrap=not stream.isatty())


def hanging(text: str, width: int) -> str:
    """Return ``text`` with lines of at most ``width`` columns, where words allow; the rest of a
    line stands two columns further to the right than its begin.
    """
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(
            line,
            max(width, len(indent) + 1),
            subsequent_indent=indent,
            drop_whitespace=True,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [line]
    return "\n".join(lines)


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


def print_fitting(
    out: Console,
    headings: Sequence[str],
    sections: Sequence[Sequence[Sequence[str]]],
    *,
    right: Collection[str],
    first_out: Sequence[str],
) -> None:
    """Print the rows of all sections as one table, whose cells stay whole: without the columns
    ``first_out``, in that order, as far as the terminal is too narrow; a line names them.
    """
    left_out: list[str] = []
    table = _whole_cells(headings, sections, right, left_out)
    unlimited = out.options.update(max_width=10_000)
    for heading in (name for name in first_out if name in headings):
        if not out.is_terminal or table.__rich_measure__(out, unlimited).maximum <= out.width:
            break
        left_out.append(heading)
        table = _whole_cells(headings, sections, right, left_out)
    out.print(table)
    if left_out:
        out.print(f"(columns for a wider terminal: {', '.join(left_out)})", markup=False)


def _whole_cells(
    headings: Sequence[str],
    sections: Sequence[Sequence[Sequence[str]]],
    right: Collection[str],
    left_out: Collection[str],
) -> Table:
    places = [k for k, heading in enumerate(headings) if heading not in left_out]
    shown = [headings[k] for k in places]
    table = plain_table(*shown, right=right, no_wrap=shown)
    for rows in sections:
        for row in rows:
            table.add_row(*(row[k] for k in places))
        table.add_section()
    return table


def result_json(**content: Any) -> dict[str, Any]:
    """Return the object of one answer, with the version of its form."""
    return {"schema": SCHEMA, **content}


def print_json(stream: TextIO, **content: Any) -> None:
    """Print the object of one answer on a line."""
    print(json.dumps(result_json(**content)), file=stream)
