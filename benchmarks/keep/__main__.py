"""``python -m benchmarks.keep``: keep gathered parameters from forward to backward, or gather them
again; the choices that people make beside the one found, under several memory caps.

    python -m benchmarks.keep [--wide | --floor | --no-cap | --smoke] [-o FILE.md [--resume]]

Writes a table, after each case again, and the same figures as JSON beside it. ``--wide`` measures
three models on three clusters and meshes, hours on one core; ``--floor`` measures them under the
least memory of all gathered again; ``--no-cap`` measures the largest without a memory cap, which
the device does not hold. ``--resume`` goes on where the table ends. ``--smoke`` measures a small
model in under a minute.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from apsched.report.answer.kept_words import kept_count
from benchmarks.common.choices import figure, run, write_table
from benchmarks.keep.cases import FLOOR, GRID, NO_CAP, SMOKE, WIDE, Row, measured

_HEAD = (
    "# Keep or gather again\n\n`python -m benchmarks.keep`: step times and peaks of the choices"
    " that people make and of the one found (`apsched`), under the memory of the device and lower"
    " caps.\n\n"
    "| step | memory cap | choice | kept | again | GiB kept | forward ms | backward ms | step ms"
    " | peak GiB | gap % | CPU s |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 1 where a choice that people make is faster."""
    cases = {"grid": GRID, "wide": WIDE, "floor": FLOOR, "no-cap": NO_CAP, "smoke": SMOKE}
    return run(arguments, "benchmarks.keep", __doc__ or "", cases, measured, write, _line, Row)


def write(out: Path, rows: Sequence[Row]) -> None:
    """Write the table to ``out``, and its figures to the ``.json`` beside it."""
    write_table(out, _HEAD, rows, _line)


def _line(row: Row) -> str:
    cells = (
        row.case,
        row.cap,
        row.choice,
        kept_count(row.num_kept, row.num_in_node),
        str(row.num_again),
        f"{row.kept_gib:.2f}",
        figure(row.forward_ms, ",.3f"),
        figure(row.backward_ms, ",.3f"),
        figure(row.step_ms, ",.3f") or "does not fit",
        figure(row.peak_gib, ".2f"),
        figure(None if row.gap is None else 100 * row.gap, ".2f"),
        figure(row.cpu_s, ".0f"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
