"""``python -m benchmarks.accumulate``: several micro-batches in a row; the choices that people make
beside the one found.

    python -m benchmarks.accumulate [--smoke] [--case N] [-o FILE.md]

Writes a table, after each case again, and the same figures as JSON beside it. ``--smoke`` measures
a small model in under a minute.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from apsched.atomic_files import write_atomic
from apsched.report.answer.kept_words import kept_count
from benchmarks.accumulate.cases import GRID, SMOKE, Row, measured
from benchmarks.common.choices import beaten

_HEAD = (
    "# Micro-batches in a row\n\n`python -m benchmarks.accumulate`: step times and peaks of the"
    " choices that people make and of the one found (`apsched`).\n\n"
    "| step | memory cap | choice | kept | stay gathered | reduced once | step ms | peak GiB"
    " | gap % | CPU s |\n|---|---|---|---|---|---|---|---|---|---|\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 1 where a choice that people make is faster."""
    parser = argparse.ArgumentParser(prog="benchmarks.accumulate", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small model alone")
    parser.add_argument("-o", "--out", type=Path, help="table to write (default: none)")
    parser.add_argument("--case", type=int, help="one case of the grid, by number from 0")
    args = parser.parse_args(arguments)
    cases = SMOKE if args.smoke else GRID
    rows: list[Row] = []
    for case in cases if args.case is None else cases[args.case : args.case + 1]:
        for row in measured(case):
            rows.append(row)
            print(_line(row), file=sys.stderr, flush=True)
        if args.out is not None:
            write(args.out, rows)
    return 1 if beaten(rows) else 0


def write(out: Path, rows: Sequence[Row]) -> None:
    """Write the table to ``out``, and its figures to the ``.json`` beside it."""
    write_atomic(out, (_HEAD + "".join(f"{_line(row)}\n" for row in rows)).encode())
    figures = json.dumps([asdict(row) for row in rows], indent=1)
    write_atomic(out.with_suffix(".json"), f"{figures}\n".encode())


def _line(row: Row) -> str:
    def figure(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    cells = (
        row.case,
        row.cap,
        row.choice,
        kept_count(row.num_kept, row.num_in_node),
        str(row.num_held),
        str(row.num_summed),
        figure(row.step_ms, ",.3f") or "does not fit",
        figure(row.peak_gib, ".2f"),
        figure(None if row.gap is None else 100 * row.gap, ".2f"),
        figure(row.cpu_s, ".0f"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
