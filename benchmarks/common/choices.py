"""A benchmark of choices under memory caps: those that people make, and the one found."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    cases: Mapping[str, Sequence[Any]],
    measured: Callable[[Any], Iterable[R]],
    write: Callable[[Path, Sequence[R]], None],
    line: Callable[[R], str],
    row_type: type[R],
) -> int:
    """Run the benchmark ``prog`` with ``arguments``: measure its ``cases``, those of the name given
    (the first name by default), and write the table after each case; return the exit status: 1
    where a choice that people make is faster.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    default, *others = cases
    for name in others:
        parser.add_argument(
            f"--{name}", dest="cases", action="store_const", const=name, help=f"the cases {name!r}"
        )
    parser.add_argument("-o", "--out", type=Path, help="table to write (default: none)")
    parser.add_argument("--case", type=int, help="one case, by number from 0")
    parser.add_argument(
        "--resume", action="store_true", help="leave out the cases that the table of --out has"
    )
    args = parser.parse_args(arguments)
    if args.resume and args.out is None:
        parser.error("--resume: expected --out, the table that is continued")
    chosen = cases[args.cases or default]
    rows = _read(args.out, row_type) if args.resume else []
    known = {row.case for row in rows}
    for case in chosen if args.case is None else chosen[args.case : args.case + 1]:
        if str(case) in known:
            continue
        for row in measured(case):
            rows.append(row)
            print(line(row), file=sys.stderr, flush=True)
        if args.out is not None:
            write(args.out, rows)
    return 1 if beaten(rows) else 0


def _read(out: Path, row_type: type[R]) -> list[R]:
    """Return the rows of the figures beside the table ``out``; none where there are none."""
    figures = out.with_suffix(".json")
    return [row_type(**row) for row in json.loads(figures.read_text())] if figures.exists() else []


def write_table(out: Path, head: str, rows: Sequence[R], line: Callable[[R], str]) -> None:
    """Write the table to ``out``, and its figures to the ``.json`` beside it."""
    write_atomic(out, (head + "".join(f"{line(row)}\n" for row in rows)).encode())
    figures = json.dumps([asdict(row) for row in rows], indent=1)
    write_atomic(out.with_suffix(".json"), f"{figures}\n".encode())


def figure(value: float | None, form: str) -> str:
    """Return a cell of the table; empty where the figure is not known."""
    return "" if value is None else format(value, form)
