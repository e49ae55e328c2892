"""Run a job on a slow network, and return the report of its process rank 0."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from apsched.errors import InputError
from benchmarks.execution.machine.slow_network import SlowNetwork
from benchmarks.execution.machine.steady import ENVIRONMENT, processors_awake

_HERE = Path(__file__).parent
_WORKER, _STEPS_WORKER = _HERE / "worker.py", _HERE / "steps" / "worker.py"
_POLL_S = 0.2


def run_job(
    num_ranks: int, megabits_per_s: float, request: Mapping[str, Any], *, timeout_s: float
) -> dict[str, Any]:
    """Return the report of process rank 0 of a job on a slow network; InputError, with the logs,
    where a process fails or the job takes too long. A request with a ``part`` is about whole steps.
    """
    worker = _STEPS_WORKER if "part" in request else _WORKER
    paths = [
        str(Path(__file__).resolve().parents[2]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = (
        os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    )
    with (
        TemporaryDirectory() as name,
        SlowNetwork(num_ranks, megabits_per_s) as network,
        processors_awake() as awake,
    ):
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(dict(request)))
        logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, str(worker), str(rank), str(num_ranks), str(folder)]
                with log.open("w") as written:
                    processes.append(
                        network.popen(rank, command, log=written, environment=environment)
                    )
            failed = not _all_end_well(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
        if failed:
            said = "\n".join(log.read_text()[-1500:] for log in logs)
            raise InputError(
                f"a job of {num_ranks} process ranks at {megabits_per_s:g} Mb/s failed, or took"
                f" longer than {timeout_s:g} s: {said}"
            )
        report: dict[str, Any] = json.loads((folder / "0.json").read_text())
    return report | {"awake": awake}


def _all_end_well(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait until all processes end, one fails, or the time is up; return whether all succeeded."""
    until = time.monotonic() + timeout_s
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return not any(codes)
