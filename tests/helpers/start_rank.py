"""Run one process rank of each of several jobs of a script: the script is imported once, and each
is a fork of that.

usage: start_rank.py SCRIPT PROCESS_RANK JOBS, JOBS as JSON: a list of {"folder", "world_size",
"more", "lost", "wave"}
"""

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def imported_main(script: Path) -> Callable[..., None]:
    """Return the function ``main`` of a script, which has done what its function ``prepare`` does
    once for all jobs, if it has one.
    """
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    getattr(module, "prepare", lambda: None)()
    return module.main


def forked(main: Callable[..., None], rank: int, job: dict) -> int:
    """Return the process that runs ``main(RANK, WORLD_SIZE, FOLDER, *MORE)`` of a job, and logs to
    ``FOLDER/RANK.log``.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        folder = Path(job["folder"])
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        main(rank, job["world_size"], folder, *job["more"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wave(main: Callable[..., None], rank: int, jobs: list[dict]) -> int:
    """Return 0 where ``main`` of every job returned, but for those that are to come to harm in this
    process rank.
    """
    children = [forked(main, rank, job) for job in jobs]
    waited_for = [
        child for child, job in zip(children, jobs, strict=True) if rank not in job["lost"]
    ]
    statuses = [os.waitpid(child, 0)[1] for child in waited_for]
    return int(any(statuses))


def start(script: Path, rank: int, jobs: list[dict]) -> int:
    """Run one wave of jobs after the other, as long as none fails."""
    main = imported_main(script)
    mine = [job for job in jobs if rank < job["world_size"]]
    waves = [
        [job for job in mine if job["wave"] == number]
        for number in sorted({job["wave"] for job in mine})
    ]
    return next((1 for jobs_now in waves if wave(main, rank, jobs_now)), 0)


if __name__ == "__main__":
    sys.exit(start(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
