"""The messages of one graph between the process ranks of its groups, through the job's store."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apsched.compiler.ranks.job import Job
from apsched.errors import AgreementError
from apsched.names import ranks_text

ORDERS_BY, FINDINGS_BY, VERDICT_BY = 0.8, 0.9, 1.0
"""Shares of the deadline: who is nearer to the cause gives up first, and names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group of this graph, as messages name it."""

    name: str
    """As this process rank calls it."""
    ranks: tuple[int, ...]
    key: str
    """Its key in the store: the same on all its process ranks."""

    @property
    def leader(self) -> int:
        """Its lowest process rank."""
        return min(self.ranks)


class Channel:
    """Sends messages to ``groups`` of a job, and receives those of their process ranks."""

    def __init__(self, job: Job, groups: Sequence[Group]) -> None:
        self.job = job
        self.groups = tuple(groups)

    def collect(
        self, what: str, sources: Sequence[tuple[Group, int]], share: float, began_s: float
    ) -> tuple[dict[tuple[Group, int], dict[str, Any]], tuple[int, ...]]:
        """Return the messages of each process rank in each group, until one reports a failure; and
        the process ranks without a message.
        """
        messages: dict[tuple[Group, int], dict[str, Any]] = {}

        def missing() -> tuple[int, ...]:
            for group, rank in sources:
                if (group, rank) not in messages and (
                    text := self.read(group, f"{what} {rank}")
                ) is not None:
                    messages[group, rank] = json.loads(text)
            if any("failed" in s or s.get("kept") for s in messages.values()):
                return ()
            return tuple(
                dict.fromkeys(rank for group, rank in sources if (group, rank) not in messages)
            )

        silent = self.job.wait(missing, share, began_s)
        return {source: messages[source] for source in sources if source in messages}, silent

    def receive(
        self,
        group: Group,
        what: str,
        leader: int,
        about: str,
        share: float = ORDERS_BY,
        or_else: str | None = None,
    ) -> dict[str, Any]:
        """Return the message of ``leader``; if there is none, raise that, or return a verdict with
        ``or_else``, or the silence.
        """
        text: bytes | None = None

        def missing() -> tuple[int, ...]:
            nonlocal text
            text = self.read(group, what)
            return () if text is not None else (leader,)

        silent = self.job.wait(missing, share)
        if text is not None:
            message: dict[str, Any] = json.loads(text)
            return (
                message
                if or_else is None or "failed" not in message
                else {"wrong": message["message"]}
            )
        silence = self.silence(silent, group, about, share)
        if or_else is None:
            raise AgreementError(silence, is_silent=True)
        return {"wrong": or_else or silence, "silent": True}

    def silence(self, silent: Sequence[int], group: Group, about: str, share: float) -> str:
        """Return the error for process ranks that reported nothing in that share of the
        deadline.
        """
        plural = len(silent) > 1
        return (
            f"{ranks_text(silent)} {'have' if plural else 'has'} not reported {about} in group"
            f" {group.name!r} of {ranks_text(group.ranks)}, and {'have' if plural else 'has'} done"
            f" nothing for {share * self.job.deadline_s:.1f} s: ended, hanging, or at another"
            " graph. Nothing was launched. See the log of"
            f" {'those process ranks' if plural else 'that process rank'}, or raise deadline_s"
        )

    def led(self) -> tuple[Group, ...]:
        """Return the groups whose leader is this process rank."""
        return tuple(group for group in self.groups if group.leader == self.job.rank)

    def send(self, group: Group, what: str, message: Mapping[str, Any]) -> None:
        """Send ``message`` to all process ranks of ``group``."""
        self.write(group, what, json.dumps(message).encode())

    def send_once(self, group: Group, subjects: Sequence[str], message: Mapping[str, Any]) -> None:
        """Send ``message`` under each of ``subjects`` that has none yet."""
        for what in subjects:
            if self.read(group, what) is None:
                self.send(group, what, message)

    def write(self, group: Group, what: str, value: bytes) -> None:
        """Set the bytes under ``what`` for all process ranks of ``group``."""
        self.job.store.set(f"{group.key}/{what}", value)

    def read(self, group: Group, what: str) -> bytes | None:
        """Return the bytes under ``what`` in ``group``; ``None`` where there are none yet."""
        return self.job.store.get_long(f"{group.key}/{what}")


def groups_with_keys(job: Job, groups: Mapping[str, Sequence[int]]) -> tuple[Group, ...]:
    """Return the groups of more than one process rank, each with a key: its process ranks, which of
    the groups of these, which graph in it.
    """
    keyed: list[Group] = []
    seen: dict[tuple[int, ...], int] = {}
    for name, ranks in groups.items():
        if len(ranks) < 2:
            continue
        number = seen[tuple(ranks)] = seen.get(tuple(ranks), -1) + 1
        members = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
        group = f"group/{members}/{number}"
        keyed.append(Group(name=name, ranks=tuple(ranks), key=f"{group}/{job.next_round(group)}"))
    return tuple(keyed)
