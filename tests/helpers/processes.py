"""Start a script once for each process rank, and read the JSON that each writes to
``FOLDER/RANK.json``.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

CHECKOUT = Path(__file__).resolve().parents[2]
WORKERS = CHECKOUT / "tests" / "workers"
START_RANK = Path(__file__).with_name("start_rank.py")


def run_processes(
    script: Path, folder: Path, world_size: int, *more: str, timeout_s: float
) -> list[dict]:
    """Run ``script RANK WORLD_SIZE FOLDER MORE`` in ``world_size`` processes of one thread; return
    what each reports.
    """
    logs = [folder / f"{rank}.log" for rank in range(world_size)]
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world_size), str(folder), *more],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size, "\n".join(log.read_text()[-2000:] for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@contextmanager
def as_torchrun(world_size: int) -> Iterator[dict[str, str]]:
    """Hold the store of a job, as the agent of ``torchrun`` does, on a port that is never free
    meanwhile; yields its environment.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Process ranks of a script that run together, with files in a folder of their own."""

    folder: Path
    world_size: int
    more: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    """Process ranks that come to harm: nobody waits for them, and they report nothing."""
    wave: int = 0
    """Jobs of one wave run at the same time, and those of the next one begin when they have
    ended.
    """


def run_jobs(script: Path, jobs: Sequence[Job], *, timeout_s: float) -> list[list[dict]]:
    """Run ``main(RANK, WORLD_SIZE, FOLDER, *MORE)`` of ``script`` for every process rank of every
    job.

    There is one interpreter for each number of a process rank, as in a job on several machines; it
    imports the script once, and runs each job in a fork (``start_rank``). Returns for each job what
    its process ranks report.
    """
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
    told = json.dumps([asdict(job) | {"folder": str(job.folder)} for job in jobs])
    starters = [
        subprocess.Popen(
            [sys.executable, str(START_RANK), str(script), str(rank), told],
            env=environment,
            start_new_session=True,
        )
        for rank in range(max(job.world_size for job in jobs))
    ]
    try:
        codes = [starter.wait(timeout=timeout_s) for starter in starters]
    finally:
        for starter in starters:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    starter.pid, signal.SIGKILL
                )  # its forks, too, also those that are stopped
    logs = [log.read_text()[-2000:] for job in jobs for log in sorted(job.folder.glob("*.log"))]
    assert codes == [0] * len(codes), "\n".join(logs)
    ranks = [[rank for rank in range(job.world_size) if rank not in job.lost] for job in jobs]
    return [
        [json.loads((job.folder / f"{r}.json").read_text()) for r in here]
        for job, here in zip(jobs, ranks, strict=True)
    ]


def run_sizes(
    script: Path, folder: Path, *, timeout_s: float, sizes: Sequence[int] = (2, 4)
) -> dict[int, list[dict]]:
    """Run ``script`` on jobs of 2 and of 4 processes; return what the process ranks of each size
    report.
    """
    jobs = [Job(folder=folder / f"of_{size}", world_size=size) for size in sizes]
    return dict(zip(sizes, run_jobs(script, jobs, timeout_s=timeout_s), strict=True))
