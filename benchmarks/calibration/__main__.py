"""``python -m benchmarks.calibration``: the error of a profile's prediction for unseen steps, and
for a schedule that has not run.

The benchmark starts gloo processes of one thread that run ``llama3-debug``, profiled by
``torch.profiler``. It reads costs off every other step (``apsched calibrate --trace``) and compares
the prediction with the remaining steps. Then it solves with these costs, writes the schedule back
and runs it. Exit status: 0 all within 10 %, 1 not (the machine must do nothing else meanwhile), 2
wrong use.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apsched.errors import ApschedError, InputError
from apsched.quantities import parse_count

_WORKER = Path(__file__).with_name("worker.py")
_WITHIN = 0.10
_TIMEOUT_S = 900
_HELD = ("step", "compute stream", "group's stream")
"""Required prediction accuracy: 10 %. A schedule that has not run is only shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--processes",
        metavar="NUMBERS",
        default="2,4",
        help="process ranks of each job, by commas (default 2,4)",
    )
    parser.add_argument(
        "--steps", metavar="NUMBER", default="64", help="profiled steps of each job (default 64)"
    )
    args = parser.parse_args(arguments)
    try:
        sizes = [parse_count(part, "--processes", least=2) for part in args.processes.split(",")]
        reports = {
            size: run_job(size, parse_count(args.steps, "--steps", least=4)) for size in sizes
        }
    except ApschedError as error:
        print(f"benchmarks.calibration: error: {error}", file=sys.stderr)
        return 2
    print(markdown(reports))
    far = [
        figure
        for report in reports.values()
        for figure in report["figures"]
        if figure["what"] in _HELD and abs(_off(figure)) > _WITHIN
    ]
    return 1 if far else 0


def run_job(world_size: int, num_steps: int) -> dict[str, Any]:
    """Return the report of process rank 0 of a job."""
    paths = [
        str(Path(__file__).resolve().parents[2]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(world_size)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(_WORKER), str(rank), str(world_size), folder, str(num_steps)],
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(timeout=_TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise InputError(
                f"a job of {world_size} processes failed: {logs[0].read_text()[-1000:]}"
            )
        report: dict[str, Any] = json.loads((Path(folder) / "0.json").read_text())
    return report


def markdown(reports: dict[int, dict[str, Any]]) -> str:
    """Return a table of the measured times beside the predicted ones."""
    lines = [
        (
            f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}; load average"
            f" at the end {os.getloadavg()[0]:.1f}"
        ),
        "",
        "| processes | | measured, ms | predicted, ms | difference |",
        "|---:|---|---:|---:|---:|",
    ]
    for size, report in reports.items():
        lines += [
            f"| {size} | {f['what']} | {f['measured_us'] / 1e3:.1f} | {f['predicted_us'] / 1e3:.1f}"
            f" | {100 * _off(f):+.1f} % |"
            for f in report["figures"]
        ]
    lines += [""]
    lines += [
        f"{size} processes without the profiler: {report['plain_us'] / 1e3:.1f} ms a step as"
        f" captured, {report['fast_plain_us'] / 1e3:.1f} ms with the schedule found"
        for size, report in reports.items()
    ]
    return "\n".join(lines)


def _off(figure: dict[str, Any]) -> float:
    return float(figure["predicted_us"]) / float(figure["measured_us"]) - 1


if __name__ == "__main__":
    sys.exit(main())
