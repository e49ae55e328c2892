"""An interpreter for process ranks: it imports torch and apsched once, and runs each request in a
fork of itself.

usage: start_rank.py DESCRIPTOR: the open file descriptor of a connection (``processes.Interpreter``
has the other end)

A request is a dictionary: ``script``, ``ranks``, ``jobs``, ``environment`` and ``directory``. The
answer is a list of the forks, one for each of ``ranks``; when a fork has ended, the pair of its
process id and its exit status follows.
"""

import gc
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

MODULES = ("torch.distributed.fsdp", "torch._inductor.compile_fx")
LATE = (
    "sympy.physics.units",
    "sympy.tensor.tensor",
    "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension",
)
"""Modules that torch imports when it first compiles a graph, in each process rank anew."""


def import_most() -> None:
    """Import what most scripts import: all that public names of apsched need, and most of torch.

    Asks for the vector instructions, too: Inductor compiles three programs to see which there are,
    in each process rank with a cache of its own.
    """
    gc.disable()  # what modules hold is no garbage; collections would take a quarter of the time
    for name in (*MODULES, *LATE):
        importlib.import_module(name)
    apsched = importlib.import_module("apsched")
    for name in apsched.__all__:
        getattr(apsched, name)
    importlib.import_module("apsched.torch_compat.gloo").avoid_coalesced_gathers()
    importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()
    gc.freeze()  # collections would take a tenth of the time of the process ranks
    gc.set_threshold(100_000, 20, 10)
    gc.enable()


def imported_main(script: Path) -> Callable[..., None]:
    """Return the function ``main`` of a script, after its function ``prepare`` (if any) did its
    work once for all jobs.
    """
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    getattr(module, "prepare", lambda: None)()
    return module.main


def ended_with(log: Path, work: Callable[[], int]) -> None:
    """End this process with the exit status that ``work`` returns (1 after an exception); its
    output goes to the end of ``log``.
    """
    status = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def forked(main: Callable[..., None], rank: int, job: dict) -> int:
    """Return the process that runs ``main(RANK, WORLD_SIZE, FOLDER, *MORE)`` of a job and logs to
    ``FOLDER/RANK.log``.
    """
    folder = Path(job["folder"])

    def work() -> int:
        main(rank, job["world_size"], folder, *job["more"])
        return 0

    child = os.fork()
    if child == 0:
        ended_with(folder / f"{rank}.log", work)
    return child


def wave(main: Callable[..., None], rank: int, jobs: list[dict]) -> int:
    """Return 0 when ``main`` of every job has returned, and 1 as soon as one fails; jobs that lose
    this process rank do not count.
    """
    children = [(forked(main, rank, job), rank in job["lost"]) for job in jobs]
    pending = {child for child, lost in children if not lost}
    while pending:
        child, status = os.wait()
        if status and child in pending:
            print(
                f"process rank {rank} ended with exit status {os.waitstatus_to_exitcode(status)}",
                file=sys.stderr,
            )
            return 1
        pending.discard(child)
    return 0


def start(script: Path, rank: int, jobs: list[dict]) -> int:
    """Run one wave of jobs after the other, as long as none fails."""
    main = imported_main(script)
    mine = [job for job in jobs if rank < job["world_size"]]
    waves = [
        [job for job in mine if job["wave"] == number]
        for number in sorted({job["wave"] for job in mine})
    ]
    return next((1 for jobs_now in waves if wave(main, rank, jobs_now)), 0)


def begin(rank: int, request: dict, channel: Connection) -> int:
    """Return the process, in a session of its own, that runs a process rank of each job."""

    def work() -> int:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        return start(Path(request["script"]), rank, request["jobs"])

    child = os.fork()
    if child == 0:
        os.setsid()
        channel.close()
        folder = next(Path(job["folder"]) for job in request["jobs"] if rank < job["world_size"])
        ended_with(folder / f"{rank}.log", work)
    return child


def ends() -> Iterator[tuple[int, int]]:
    """Yield process and exit status of each fork that has ended since the last call."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def serve(channel: Connection) -> None:
    """Serve requests until the other end of ``channel`` is closed, at the latest when its process
    dies; then kill what still runs.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    begun: list[int] = []
    with suppress(EOFError, ConnectionError):
        while True:
            ready = wait([channel, woken])
            if woken in ready:
                os.read(woken, 4096)
                for ended in ends():
                    channel.send(ended)
            if channel in ready:
                request = channel.recv()
                begun = [begin(rank, request, channel) for rank in request["ranks"]]
                channel.send(begun)
    for process in begun:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


if __name__ == "__main__":
    import_most()
    serve(Connection(int(sys.argv[1])))
