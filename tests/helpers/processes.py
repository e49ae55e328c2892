"""Run process ranks of a script, as forks of a few interpreters, and read the JSON that each writes
to ``FOLDER/RANK.json``.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

CHECKOUT = Path(__file__).resolve().parents[2]
WORKERS = CHECKOUT / "tests" / "workers"
START_RANK = Path(__file__).with_name("start_rank.py")

NUM_INTERPRETERS = 2
"""Interpreters, with hash seeds of their own, that process ranks share in turn: the even ones and
the odd ones. Each takes ten seconds of processor time to import torch.
"""
GRACE_S = 10.0
"""How long the other process ranks may go on when one has failed: most fail with an error that says
more.
"""


class Interpreter:
    """An interpreter that has imported torch and apsched, and runs each request in a fork
    (``start_rank``).
    """

    def __init__(self) -> None:
        paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # each compiler process would import torch anew
        }
        self.channel, other = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(START_RANK), str(other.fileno())],
            env=os.environ | self.environment,
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        other.close()

    def begin(self, script: Path, ranks: Sequence[int], jobs: list[dict]) -> list[int]:
        """Return the forks that run these process ranks of each job; ``channel`` gets process and
        exit status of each that ends.
        """
        environment = os.environ | self.environment
        request = {
            "script": str(script),
            "ranks": ranks,
            "jobs": jobs,
            "environment": environment,
            "directory": os.getcwd(),
        }
        self.channel.send(request)
        while not isinstance(answer := self.channel.recv(), list):
            pass  # the end of a fork that an earlier run killed
        return answer

    def stop(self) -> None:
        """Kill the forks that still run, and end the interpreter."""
        self.channel.close()
        self._process.wait()


@cache
def interpreter(number: int) -> Interpreter:
    """Return one of the interpreters that serve until this process ends."""
    made = Interpreter()
    atexit.register(made.stop)
    return made


def run_processes(
    script: Path,
    folder: Path,
    world_size: int,
    *more: str,
    timeout_s: float,
    new_interpreters: bool = False,
) -> list[dict]:
    """Run ``main(RANK, WORLD_SIZE, FOLDER, *MORE)`` of ``script`` in ``world_size`` processes of
    one thread; return what each reports.
    """
    jobs = [Job(folder=folder, world_size=world_size, more=more)]
    (found,) = run_jobs(script, jobs, timeout_s=timeout_s, new_interpreters=new_interpreters)
    return found


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


def run_jobs(
    script: Path, jobs: Sequence[Job], *, timeout_s: float, new_interpreters: bool = False
) -> list[list[dict]]:
    """Run ``main(RANK, WORLD_SIZE, FOLDER, *MORE)`` of ``script`` for every process rank of every
    job.

    Even and odd process ranks have an interpreter each, as in a job on several machines; the script
    is imported once in a fork of it, and each job runs in a fork of that. With
    ``new_interpreters``, these start now and end here: for what must not depend on the hash seeds
    of an earlier run. Returns for each job what its process ranks report.
    """
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
    told = [asdict(job) | {"folder": str(job.folder)} for job in jobs]
    num_ranks = max(job.world_size for job in jobs)
    numbers = range(min(num_ranks, NUM_INTERPRETERS))
    interpreters = [
        Interpreter() if new_interpreters else interpreter(number) for number in numbers
    ]
    try:
        codes = _ended(interpreters, script, num_ranks, told, timeout_s)
    finally:
        for made in interpreters if new_interpreters else ():
            made.stop()
    if list(codes.values()) != [0] * num_ranks:
        raise AssertionError(_failure(codes, num_ranks, jobs))
    ranks = [[rank for rank in range(job.world_size) if rank not in job.lost] for job in jobs]
    return [
        [json.loads((job.folder / f"{r}.json").read_text()) for r in here]
        for job, here in zip(jobs, ranks, strict=True)
    ]


def _ended(
    interpreters: Sequence[Interpreter],
    script: Path,
    num_ranks: int,
    jobs: list[dict],
    timeout_s: float,
) -> dict[int, int]:
    """Run all process ranks; return the exit statuses of those that ended by themselves, in the
    order of their ends.
    """
    end = time.monotonic() + timeout_s
    rank_of: dict[int, int] = {}
    codes: dict[int, int] = {}
    try:
        for number, made in enumerate(interpreters):
            ranks = range(number, num_ranks, len(interpreters))
            rank_of |= zip(made.begin(script, ranks, jobs), ranks, strict=True)
        while len(codes) < num_ranks:
            ready = wait(
                [made.channel for made in interpreters], timeout=max(0.0, end - time.monotonic())
            )
            for process, code in (channel.recv() for channel in ready):
                if process in rank_of:
                    codes[rank_of[process]] = code
                    end = min(end, time.monotonic() + GRACE_S) if code else end
            if not ready:
                break
    finally:
        for process in rank_of:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # its forks, too, also those that are stopped
    return codes


def _failure(codes: dict[int, int], num_ranks: int, jobs: Sequence[Job]) -> str:
    """Return what is known of the process ranks that failed: the first one to fail first, then the
    ends of all logs.
    """
    failed = [
        f"process rank {rank} ended with exit status {code}" for rank, code in codes.items() if code
    ]
    killed = [
        f"process rank {rank} still ran, and was killed"
        for rank in range(num_ranks)
        if rank not in codes
    ]
    first = [rank for rank, code in codes.items() if code]
    order = [*first, *(rank for rank in range(num_ranks) if rank not in first)]
    logs = [log for rank in order for job in jobs if (log := job.folder / f"{rank}.log").exists()]
    return "\n".join(
        [
            *failed,
            *killed,
            *(f"== {log}\n{log.read_text(errors='replace')[-2000:]}" for log in logs),
        ]
    )


def runs(process: int) -> bool:
    """Whether a process is there, and no zombie; only Linux says which are zombies."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def run_sizes(
    script: Path, folder: Path, *, timeout_s: float, sizes: Sequence[int] = (2, 4)
) -> dict[int, list[dict]]:
    """Run ``script`` on jobs of 2 and of 4 processes; return what the process ranks of each size
    report.
    """
    jobs = [Job(folder=folder / f"of_{size}", world_size=size) for size in sizes]
    return dict(zip(sizes, run_jobs(script, jobs, timeout_s=timeout_s), strict=True))
