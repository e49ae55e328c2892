"""A Dask cluster as an engine (extra ``apsched[dask]``). Its workers need apsched, but no torch."""

from concurrent.futures import CancelledError, Executor
from typing import Any

from apsched.errors import InputError

_SECONDS_TO_CONNECT = 30


class DaskEngine:
    """The workers of a scheduler at ``tcp://host:port``. A worker that dies is the scheduler's
    business: it asks another one.
    """

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError:
            raise InputError(
                "--engine dask://...: expected the package distributed; install apsched[dask]"
            ) from None
        self._errors = (CancelledError, distributed.KilledWorker, distributed.comm.CommClosedError)
        try:
            self._client: Any = distributed.Client(
                address, timeout=_SECONDS_TO_CONNECT, set_as_default=False
            )
            self._client.wait_for_workers(1, timeout=_SECONDS_TO_CONNECT)
        except (OSError, ValueError, TimeoutError) as error:
            raise InputError(
                f"--engine: expected a Dask scheduler with workers at {address}; found: {error}"
            ) from None
        self._executor: Executor = self._client.get_executor(pure=False)

    @property
    def slots(self) -> int:
        """One question for each thread that there is now, and one more each to keep them busy."""
        threads: int = sum(self._client.nthreads().values())
        return 2 * max(threads, 1)

    def executor(self) -> Executor:
        """Return the executor of the client."""
        return self._executor

    def is_lost(self, error: BaseException) -> bool:
        """Whether the scheduler gave up on a question because its workers died."""
        return isinstance(error, self._errors)

    def lost(self) -> None:
        """Nothing to do: the scheduler has other workers, or gets new ones."""

    def stop(self) -> None:
        """Take back what is not done, and leave the cluster."""
        self._executor.shutdown(wait=False)  # which cancels them
        self._client.close()
