"""``python -m benchmarks.solver``: how good the solver is, how fast, and whether it reaches what it
must.

Writes a dated table, and the raw numbers beside it. Every case runs in a process of its own; what
is finished is kept, and a run that was interrupted, or had a case that failed, is taken up again by
``--resume``. Exit status: 0 done (what misses stands in the table), 1 something that must hold in
every run does not, 2 wrong use, 130 interrupted.
"""

import signal
import sys
from collections.abc import Sequence

from benchmarks.common import command
from benchmarks.common.grid import CAPS, GRID, SMOKE
from benchmarks.common.table import SOLVER_REPORT

_BENCHMARK = command.Benchmark(
    name="solver",
    about=__doc__ or "",
    grid=GRID,
    smoke=SMOKE,
    caps=tuple(CAPS),
    report=SOLVER_REPORT,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    return command.main(_BENCHMARK, arguments)


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # an interrupt, which ends the process of the case, too
    sys.exit(main())
