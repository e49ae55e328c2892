"""The store of a job, with a deadline on every call: reads of existing keys, and never a wait for a
missing one.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from apsched.errors import AgreementError

_Answer = tuple[Any, Exception | None]
_Call = tuple[Callable[[], Any], "queue.SimpleQueue[_Answer]"]

_PART_BYTES = 1 << 20
"""A store takes a few MiB in one value."""


class Store(Protocol):
    """The used part of ``torch.distributed.Store``."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read an existing key."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all of them are there."""

    def add(self, key: str, amount: int) -> int:
        """Count."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write if the value is the expected one; return the value afterwards."""


class JobStore:
    """Calls go to a thread of their own, one after the other, so that a store that hangs (its
    process was stopped) cannot block a process rank.
    """

    def __init__(self, store: Store, prefix: str, timeout_s: float) -> None:
        """``timeout_s`` is for one call, which takes no longer than the way to the store and
        back.
        """
        self._store, self._prefix, self.timeout_s = store, prefix, timeout_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(
            target=_serve, args=(self._calls,), name="apsched-store", daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None)

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``; ``None`` while it has no value."""
        name = self._prefix + key
        value: bytes | None = self._call(
            lambda: self._store.get(name) if self._store.check([name]) else None
        )
        return value

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``, whole: in parts where it is long, and the key itself last."""
        parts = (
            [value[at : at + _PART_BYTES] for at in range(0, len(value), _PART_BYTES)]
            if len(value) > _PART_BYTES
            else []
        )
        for number, part in enumerate(parts):
            self._put(f"{key}/{number}", part)
        self._put(key, b"%d" % len(parts) if parts else b"=" + value)

    def get_long(self, key: str) -> bytes | None:
        """Return the value that :meth:`set` wrote."""
        head = self.get(key)
        if head is None or head[:1] == b"=":
            return None if head is None else head[1:]
        parts = [self.get(f"{key}/{number}") for number in range(int(head))]
        return b"".join(part or b"" for part in parts)

    def add(self, key: str, amount: int = 1) -> int:
        """Add to the number at ``key`` and return it; 0 for one that is not there."""
        return int(self._call(lambda: self._store.add(self._prefix + key, amount)))

    def decide(self, key: str, value: bytes) -> bytes:
        """Write ``value`` unless the key has one; return the value that the key has then."""
        name = self._prefix + key
        return bytes(self._call(lambda: self._store.compare_set(name, "", value.decode())))

    def _put(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(self._prefix + key, value))

    def _call(self, call: Callable[[], Any]) -> Any:
        answer: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._calls.put((call, answer))
        try:
            value, error = answer.get(timeout=self.timeout_s)
        except queue.Empty:
            raise AgreementError(
                f"the store of the job has not answered for {self.timeout_s:g} s; the process that"
                " holds it (torchrun's, or process rank 0) hangs or cannot be reached"
            ) from None
        if error is not None:
            raise AgreementError(
                f"the store of the job is gone ({error}); the process that held it (torchrun's, or"
                " process rank 0) has ended"
            ) from error
        return value


def _serve(calls: "queue.SimpleQueue[_Call | None]") -> None:
    while (request := calls.get()) is not None:
        call, answer = request
        try:
            answer.put((call(), None))
        except Exception as error:  # raised again in the caller's thread
            answer.put((None, error))
