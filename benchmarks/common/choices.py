"""A benchmark of choices under memory caps: those that people make, and the one found."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from apsched.atomic_files import write_atomic


class ChoiceRow(Protocol):
    """One choice under one cap, a dataclass; the choice found is called ``apsched``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def case(self) -> str: ...

    @property
    def cap(self) -> str: ...

    @property
    def choice(self) -> str: ...

    @property
    def step_ms(self) -> float | None: ...


R = TypeVar("R", bound=ChoiceRow)


def beaten(rows: Sequence[R]) -> list[R]:
    """Return the choices that people make that fit and are faster than the one found."""
    found = {(row.case, row.cap): row.step_ms for row in rows if row.choice == "apsched"}
    return [
        row
        for row in rows
        if row.step_ms is not None
        and (best := found.get((row.case, row.cap))) is not None
        and row.step_ms < best
    ]


def run(
    arguments: Sequence[str] | None,
    prog: str,
    description: str,
    cases: tuple[Sequence[Any], Sequence[Any]],
    measured: Callable[[Any], Iterable[R]],
    write: Callable[[Path, Sequence[R]], None],
    line: Callable[[R], str],
) -> int:
    """Run the benchmark ``prog`` with ``arguments``: measure its ``cases``, the grid or with
    ``--smoke`` the small one, and write the table after each choice found; return the exit status:
    1 where a choice that people make is faster.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--smoke", action="store_true", help="a small model alone")
    parser.add_argument("-o", "--out", type=Path, help="table to write (default: none)")
    parser.add_argument("--case", type=int, help="one case of the grid, by number from 0")
    args = parser.parse_args(arguments)
    chosen = cases[1] if args.smoke else cases[0]
    rows: list[R] = []
    for case in chosen if args.case is None else chosen[args.case : args.case + 1]:
        for row in measured(case):
            rows.append(row)
            print(line(row), file=sys.stderr, flush=True)
            if args.out is not None and row.choice == "apsched":
                write(args.out, rows)
    return 1 if beaten(rows) else 0


def write_table(out: Path, head: str, rows: Sequence[R], line: Callable[[R], str]) -> None:
    """Write the table to ``out``, and its figures to the ``.json`` beside it."""
    write_atomic(out, (head + "".join(f"{line(row)}\n" for row in rows)).encode())
    figures = json.dumps([asdict(row) for row in rows], indent=1)
    write_atomic(out.with_suffix(".json"), f"{figures}\n".encode())


def figure(value: float | None, form: str) -> str:
    """Return a cell of the table; empty where the figure is not known."""
    return "" if value is None else format(value, form)
