"""Start a script once for each process rank, and read the JSON that each writes to ``FOLDER/RANK.json``."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


def run_processes(script: Path, folder: Path, world_size: int, *, timeout_s: float) -> list[dict]:
    """Run ``script RANK WORLD_SIZE FOLDER`` in ``world_size`` processes of one thread; return what each reports."""
    logs = [folder / f"{rank}.log" for rank in range(world_size)]
    tests = Path(__file__).parent
    paths = [str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world_size), str(folder)],
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
    """Hold the store of a job, as the agent of ``torchrun`` does, on a port that is never free meanwhile; yields its environment."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
