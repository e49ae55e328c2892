"""Engines that answer questions: any executor of ``concurrent.futures``, by default processes of
this machine.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from typing import Any, Protocol

_SECONDS_TO_END = 5.0


class Engine(Protocol):
    """An executor for functions of ``apsched.study.worker``, with its slots, its recovery and its
    end.
    """

    @property
    def slots(self) -> int:
        """Number of questions that it gets at a time."""

    def executor(self) -> Executor:
        """Return the executor; a new one after :meth:`lost`."""

    def is_lost(self, error: BaseException) -> bool:
        """Whether ``error`` means that a worker was lost, so that the question may be repeated."""

    def lost(self) -> None:
        """Get over a worker that was lost."""

    def stop(self) -> None:
        """Stop at once; running questions are lost."""


class GivenEngine:
    """An executor that the caller made, and ends."""

    def __init__(self, executor: Executor, slots: int = 64) -> None:
        self._executor, self.slots = executor, slots

    def executor(self) -> Executor:
        """Return it."""
        return self._executor

    def is_lost(self, error: BaseException) -> bool:
        """Workers are its own business."""
        return isinstance(error, CancelledError)

    def lost(self) -> None:
        """Nothing to do."""

    def stop(self) -> None:
        """Hand in no more; running questions are left to the owner of the executor."""


class InProcess(Executor):
    """Runs everything in this process, when it is handed in."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn``; an interrupt goes through to the caller."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class LocalEngine:
    """Processes on this machine; one alone is this process itself."""

    def __init__(self, jobs: int) -> None:
        self.slots = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._others = {process.pid for process in multiprocessing.active_children()}

    def executor(self) -> Executor:
        """Return the pool; workers are spawned, so that they share nothing with a process that has
        torch loaded.
        """
        if self.slots == 1:
            return InProcess()
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self.slots, mp_context=context, initializer=_begin_worker
            )
        return self._pool

    def is_lost(self, error: BaseException) -> bool:
        """Whether the pool lost a worker, and with it everything in flight."""
        return isinstance(error, (BrokenExecutor, CancelledError))

    def lost(self) -> None:
        """Forget a pool that lost a worker."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def stop(self) -> None:
        """End the workers, whatever they do."""
        if self._pool is None:
            return
        self._pool.shutdown(wait=False, cancel_futures=True)
        workers = [
            process
            for process in multiprocessing.active_children()
            if process.pid not in self._others
        ]
        for process in workers:
            process.terminate()
        for process in workers:
            process.join(_SECONDS_TO_END)
            process.kill()
        self._pool = None


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, which ends its workers; end where the parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker holds both ends of the queue of its pool, and waits there for ever without this."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
