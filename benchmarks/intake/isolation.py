"""Every case in a fork of one process that has imported what all of them need."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

from benchmarks.intake.case import Case, CaseOutcome


def outcomes(
    cases: Sequence[Case], examine: Callable[[Case], CaseOutcome], *, timeout_s: float
) -> Iterator[CaseOutcome]:
    """Yield what ``examine`` finds of each case, in a process of its own that ends after
    ``timeout_s``.
    """
    for case in cases:
        yield _outcome(case, examine, timeout_s)


def _outcome(case: Case, examine: Callable[[Case], CaseOutcome], timeout_s: float) -> CaseOutcome:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(case, examine, theirs), daemon=True)
    process.start()
    theirs.close()
    why = f"took more than {timeout_s:.0f} s"
    try:
        if ours.poll(timeout_s):
            found: CaseOutcome = ours.recv()
            return found
    except EOFError:
        process.join()
        why = f"the process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
        ours.close()
    return CaseOutcome(name=case.name, group=case.group, not_traced=why)


def _work(case: Case, examine: Callable[[Case], CaseOutcome], pipe: Connection) -> None:
    pipe.send(examine(case))
    pipe.close()
