"""The job as seen from one process rank: its store, who it is, and how it waits for others without
ever hanging.

A process rank that works (it exports, solves, writes back) beats: a counter of its own in the store
rises. One that waits publishes for whom, and watches the counters of those, and of all for whom
they wait in turn; so work anywhere is seen along a whole chain of waits. Where no process rank
works, all of them stop after the deadline, also where they wait for each other.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from weakref import WeakKeyDictionary

import torch

from apsched.compiler.ranks.job_store import JobStore, Store
from apsched.errors import AgreementError
from apsched.torch_compat import graphs as torch_private

DEFAULT_DEADLINE_S = 30.0
_WITHOUT_DEADLINE_S = 1e9
"""Thirty years: the wait where no deadline is set."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_BEATS_IN_DEADLINE = 8


class Job:
    """One process rank of a job."""

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        prefix: str = "apsched/",
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        self.rank, self.deadline_s = rank, deadline_s
        self.store = JobStore(store, prefix, timeout_s=deadline_s)
        self._rounds: dict[str, int] = {}
        self._waits_for: tuple[int, ...] = ()

    def next_round(self, group: str) -> int:
        """Return the number of earlier graphs with collectives in ``group``: the same on all its
        process ranks.
        """
        number = self._rounds.get(group, 0)
        self._rounds[group] = number + 1
        return number

    def decided(self, key: str, count: int) -> bool:
        """Return whether all ``count`` process ranks came to the decision at ``key`` within the
        deadline: the same answer on all of them.

        The first value of the key is the decision, so that one that gives up and one that continues
        cannot both be right.
        """
        if self.store.add(f"{key}/ready") == count:
            return self.store.decide(key, b"yes") == b"yes"
        began_s, pause_s = time.monotonic(), _SHORTEST_PAUSE_S
        while (decision := self.store.get(key)) is None:
            if time.monotonic() - began_s > self.deadline_s:
                return self.store.decide(key, b"no") == b"yes"
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S, self.deadline_s / 20)
        return decision == b"yes"

    def beat(self) -> None:
        """Report progress of this process rank."""
        self.store.add(_beats(self.rank))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Beat while the body runs."""
        done = threading.Event()

        def beat() -> None:
            try:
                while not done.wait(self.deadline_s / _BEATS_IN_DEADLINE):
                    self.beat()
            except AgreementError:
                return  # the body meets the same when it next talks to the store

        self.beat()
        thread = threading.Thread(target=beat, name="apsched-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def wait(
        self,
        poll: Callable[[], Iterable[int]],
        share_of_deadline: float,
        began_s: float | None = None,
    ) -> tuple[int, ...]:
        """Call ``poll`` until it returns an empty tuple; it returns the process ranks that are
        still missing.

        Returns those that were silent for that share of the deadline, from ``began_s`` on (now);
        none where all have come.
        """
        try:
            return self._silent(poll, share_of_deadline, began_s)
        finally:
            with suppress(AgreementError):  # the store is gone; the error of the body says so
                self._publish(())

    def _silent(
        self, poll: Callable[[], Iterable[int]], share_of_deadline: float, began_s: float | None
    ) -> tuple[int, ...]:
        began_s = time.monotonic() if began_s is None else began_s
        patience_s, pause_s = self.deadline_s * share_of_deadline, _SHORTEST_PAUSE_S
        counts: dict[int, int] = {}
        heard_s: dict[int, float] = {}
        checked_s = 0.0
        while missing := tuple(poll()):
            now = time.monotonic()
            if now - checked_s >= min(1.0, self.deadline_s / _BEATS_IN_DEADLINE):
                checked_s = now
                self._publish(missing)
                behind = self._waited_for(missing)
                watched, before = {*chain(*behind.values())}, counts
                counts = before | {rank: self.store.add(_beats(rank), 0) for rank in watched}
                risen = {rank for rank in before if counts[rank] > before[rank]}
                heard_s |= {rank: now for rank in missing if risen & behind[rank]}
                last_s = {rank: heard_s.get(rank, began_s) for rank in missing}
                silent = tuple(rank for rank in missing if now - last_s[rank] > patience_s)
                if silent:
                    return silent
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S, self.deadline_s / 20)
        return ()

    def _publish(self, waits_for: tuple[int, ...]) -> None:
        """Tell the others for whom this process rank waits."""
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            self.store.set(_waits(self.rank), json.dumps(waits_for).encode())

    def _waited_for(self, missing: Iterable[int]) -> dict[int, set[int]]:
        """Return, for each of ``missing``, that process rank and all for whom it waits, directly or
        through others.
        """
        waits: dict[int, list[int]] = {self.rank: []}  # this one does not work
        found = {}
        for first in missing:
            reached, ahead = {first}, [first]
            while ahead:
                rank = ahead.pop()
                if rank not in waits:
                    waits[rank] = json.loads(self.store.get_long(_waits(rank)) or b"[]")
                new = [other for other in waits[rank] if other not in reached]
                reached.update(new)
                ahead += new
            found[first] = reached
        return found


def running_job(deadline_s: float | None = DEFAULT_DEADLINE_S) -> Job | None:
    """Return the job that this process is part of; ``None`` where it is alone, or its process
    groups are fake. Without a deadline process ranks wait for each other without limit.
    """
    deadline_s = _WITHOUT_DEADLINE_S if deadline_s is None else deadline_s
    dist = torch.distributed
    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return None
    group = torch_private.default_group()
    job = _JOBS.get(group)
    if job is None:
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        # a job that starts its process groups again may get the same store again
        prefix = f"apsched/{run}/{len(_STARTED)}/"
        _STARTED.append(prefix)
        job = _JOBS[group] = Job(
            torch_private.job_store(), dist.get_rank(), prefix=prefix, deadline_s=deadline_s
        )
    job.deadline_s = job.store.timeout_s = deadline_s
    return job


_JOBS: "WeakKeyDictionary[object, Job]" = WeakKeyDictionary()
_STARTED: list[str] = []


def _beats(rank: int) -> str:
    return f"beats/{rank}"


def _waits(rank: int) -> str:
    return f"waits/{rank}"
