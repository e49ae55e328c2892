"""Every case in forks of one process that has imported the modules that all cases need."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from tempfile import TemporaryDirectory

from benchmarks.intake.case import Case, CaseOutcome, joined

Examine = Callable[[Case], CaseOutcome]


def outcomes(cases: Sequence[Case], examine: Examine, *, timeout_s: float) -> Iterator[CaseOutcome]:
    """Yield the outcome of ``examine`` for each case, in processes of its own that end after
    ``timeout_s``: one, or those of the case's gloo group.
    """
    for case in cases:
        with TemporaryDirectory() as folder:
            yield joined(_found(case, examine, timeout_s, folder))


def _found(case: Case, examine: Examine, timeout_s: float, folder: str) -> list[CaseOutcome]:
    began = time.monotonic()
    running = [_start(case, examine, rank, folder) for rank in range(case.processes)]
    try:
        ends = began + timeout_s
        return [_answer(case, process, pipe, ends, timeout_s) for process, pipe in running]
    finally:
        for process, pipe in running:
            process.kill()
            process.join()
            pipe.close()


def _start(case: Case, examine: Examine, rank: int, folder: str) -> tuple[ForkProcess, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(case, examine, theirs, rank, folder), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer(
    case: Case, process: ForkProcess, pipe: Connection, ends: float, timeout_s: float
) -> CaseOutcome:
    why = f"took more than {timeout_s:.0f} s"
    try:
        if pipe.poll(max(ends - time.monotonic(), 0)):
            found: CaseOutcome = pipe.recv()
            return found
    except EOFError:
        process.join()
        why = f"the process ended with status {process.exitcode}"
    return CaseOutcome(name=case.name, group=case.group, not_traced=why)


def _work(case: Case, examine: Examine, pipe: Connection, rank: int, folder: str) -> None:
    if case.processes > 1:
        from benchmarks.intake.cases.worlds import gloo_world

        gloo_world(rank, case.processes, folder)
    pipe.send(examine(case))
    pipe.close()
