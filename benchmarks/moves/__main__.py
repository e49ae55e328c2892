"""``python -m benchmarks.moves``: the gain of moving compute over torch's scheduler at its own
peak, and over the order as captured.

Tensor and expert parallelism put collectives between compute nodes, where no bucket hides them.
Torch's ``schedule_overlap_bucketing`` schedules each graph. The solver takes the peak of that
schedule as the memory cap, and solves with compute as captured and with compute that may move; then
both schedules run under durations that are not those of the model. Options and files are as with
``benchmarks.solver``.
"""

import signal
import sys
from collections.abc import Sequence

from benchmarks.common import command
from benchmarks.common.grid import MOVES_GRID, MOVES_SMOKE
from benchmarks.moves.figures import MOVES_REPORT

_BENCHMARK = command.Benchmark(
    name="moves",
    about=__doc__ or "",
    grid=MOVES_GRID,
    smoke=MOVES_SMOKE,
    caps=(),
    report=MOVES_REPORT,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    return command.main(_BENCHMARK, arguments)


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # an interrupt, which ends the process of the case, too
    sys.exit(main())
