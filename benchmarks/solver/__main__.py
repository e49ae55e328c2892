"""``python -m benchmarks.solver``: the quality and the speed of the solver, against the
requirements.

The command writes a dated table, and the raw numbers beside it. Every case runs in a process of its
own. The command keeps every finished case; ``--resume`` continues a run that was interrupted, or
that had a failed case. Exit status: 0 done (the table shows the misses), 1 a requirement of every
run is not met, 2 wrong use, 130 interrupted.
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
