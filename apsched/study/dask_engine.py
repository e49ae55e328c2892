"""A Dask cluster as an engine (extra ``apsched[dask]``). Its workers need apsched, but no torch."""

from concurrent.futures import CancelledError, Executor
from typing import Any

from apsched.errors import InputError

_SECONDS_TO_CONNECT = 30


class DaskEngine:
    """The workers of a scheduler at ``tcp://host:port``. The scheduler replaces a worker that dies:
    it gives its question to another one.
    """

    def __init__(self, client: Any, *, closes: bool = False) -> None:
        """Take a ``distributed.Client``; :meth:`stop` closes it where ``closes`` is set."""
        import distributed

        self._errors = (CancelledError, distributed.KilledWorker, distributed.comm.CommClosedError)
        self._client, self._closes = client, closes
        self._executor: Executor = client.get_executor(pure=False)

    @classmethod
    def at(cls, address: str) -> "DaskEngine":
        """Connect to the scheduler at ``address``."""
        try:
            import distributed
        except ImportError:
            raise InputError(
                "--engine dask://...: expected the package distributed; install apsched[dask]"
            ) from None
        try:
            client: Any = distributed.Client(
                address, timeout=_SECONDS_TO_CONNECT, set_as_default=False
            )
            client.wait_for_workers(1, timeout=_SECONDS_TO_CONNECT)
        except (OSError, ValueError, TimeoutError) as error:
            raise InputError(
                f"--engine: expected a Dask scheduler with workers at {address}; found: {error}"
            ) from None
        return cls(client, closes=True)

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
        """Cancel unfinished questions, and leave the cluster if it was joined here."""
        self._executor.shutdown(wait=False)  # which cancels them
        if self._closes:
            self._client.close()
