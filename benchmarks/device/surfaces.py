"""``python -m benchmarks.device.surfaces``: the surfaces of a training job on real process ranks,
with NCCL on the GPUs that are here (or ``--device cpu``, with gloo).

Each surface trains a small LLaMA for some steps, with apsched and without; losses, gradients and
weights are compared bit for bit, and the peak of the allocator with the predicted one. More process
ranks than GPUs share them: each is a host of its own to NCCL, and they send through sockets.
Exit status: 0 done, or no GPU here; 1 a surface failed or changed a bit where it must not; 2 wrong
use.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from apsched.errors import InputError
from apsched.models.mesh import MeshSpec
from apsched.quantities import parse_count
from benchmarks.device.measure import NO_GPU

_SHARED = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}
"""Process ranks of one GPU find no path through its memory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the surfaces; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device.surfaces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mesh", default="fsdp=2", help="mesh of the job (default fsdp=2)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument(
        "--surfaces", metavar="REGEX", default="", help="surfaces whose names match (default: all)"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="600", help="for all surfaces (default 600)"
    )
    parser.add_argument("--json", action="store_true", help="the numbers instead of a table")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"skipped": NO_GPU}) if args.json else NO_GPU)
        return 0
    try:
        found = surfaces(
            MeshSpec.parse(args.mesh),
            args.device,
            args.surfaces,
            timeout_s=parse_count(args.timeout, "--timeout", least=1),
        )
    except InputError as error:
        print(f"benchmarks.device.surfaces: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else "\n".join(rows(found)))
    return 0 if found["surfaces"] and all(row["passed"] for row in found["surfaces"]) else 1


def surfaces(mesh: MeshSpec, device: str, pattern: str, *, timeout_s: float) -> dict[str, Any]:
    """Return the report of process rank 0, with the ends of the logs where a process dies or the
    time is up.
    """
    num_ranks = mesh.world_size
    with TemporaryDirectory() as name:
        folder, processes = Path(name), []
        logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        shared = device == "cuda" and num_ranks > torch.cuda.device_count()
        try:
            for rank, log in enumerate(logs):
                environment = {
                    **os.environ,
                    **({**_SHARED, "NCCL_HOSTID": f"rank{rank}"} if shared else {}),
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "OMP_NUM_THREADS": "1",
                }
                worker = "benchmarks.device.surfaces_worker"
                command = [sys.executable, "-m", worker, str(rank), str(mesh)]
                with log.open("w") as written:
                    processes.append(
                        subprocess.Popen(
                            [*command, name, device, pattern],
                            stdout=written,
                            stderr=subprocess.STDOUT,
                            env=environment,
                        )
                    )
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
        report = folder / "0.json"
        found: dict[str, Any] = (
            json.loads(report.read_text()) if report.exists() else {"surfaces": []}
        )
        if any(process.wait() for process in processes):
            found["logs"] = [log.read_text()[-4000:] for log in logs]
            found["surfaces"] += [
                {"name": "all surfaces ran", "passed": False, "note": "see the logs"}
            ]
    return found | {"mesh": str(mesh), "num_ranks": num_ranks, "device": device}


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.2)


def rows(found: Mapping[str, Any]) -> list[str]:
    """Return the table, and the ends of the logs of processes that failed."""
    lines = [
        f"{found['mesh']} on {found.get('device_name', found['device'])}",
        "",
        (
            "| surface | passed | unequal tensors | largest distance | peak predicted, MiB |"
            " measured, MiB | launches | s | |"
        ),
        "|---|---|---:|---:|---|---|---|---:|---|",
    ]
    for row in found["surfaces"]:
        cells = [
            row["name"],
            "yes" if row["passed"] else "NO",
            row.get("num_unequal", ""),
            row.get("largest_distance", ""),
            row.get("predicted_mib", ""),
            row.get("measured_mib", ""),
            row.get("launches", ""),
            row.get("seconds", ""),
            row.get("note", ""),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return [*lines, *(f"\n{log}" for log in found.get("logs", ()))]


if __name__ == "__main__":
    sys.exit(main())
