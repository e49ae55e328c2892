"""``python -m benchmarks.accumulate``: several micro-batches in a row; the choices that people make
beside the one found.

    python -m benchmarks.accumulate [--smoke] [--case N] [-o FILE.md [--resume]]

Writes a table, after each case again, and the same figures as JSON beside it. ``--smoke`` measures
a small model in under a minute; ``--resume`` goes on where the table ends.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from apsched.report.answer.kept_words import kept_count, summed_count
from benchmarks.accumulate.cases import GRID, SMOKE, Row, measured
from benchmarks.common.choices import figure, run, write_table

_HEAD = (
    "# Micro-batches in a row\n\n`python -m benchmarks.accumulate`: step times and peaks of the"
    " choices that people make and of the one found (`apsched`).\n\n"
    "| step | memory cap | choice | kept | stay gathered | reduced once | step ms | peak GiB"
    " | gap % | CPU s |\n|---|---|---|---|---|---|---|---|---|---|\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 1 where a choice that people make is faster."""
    cases = {"grid": GRID, "smoke": SMOKE}
    return run(
        arguments, "benchmarks.accumulate", __doc__ or "", cases, measured, write, _line, Row
    )


def write(out: Path, rows: Sequence[Row]) -> None:
    """Write the table to ``out``, and its figures to the ``.json`` beside it."""
    write_table(out, _HEAD, rows, _line)


def _line(row: Row) -> str:
    cells = (
        row.case,
        row.cap,
        row.choice,
        kept_count(row.num_kept, row.num_in_node),
        str(row.num_held),
        summed_count(row.num_summed, row.num_shards_summed),
        figure(row.step_ms, ",.3f") or "does not fit",
        figure(row.peak_gib, ".2f"),
        figure(None if row.gap is None else 100 * row.gap, ".2f"),
        figure(row.cpu_s, ".0f"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
