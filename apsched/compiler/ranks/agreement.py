"""One graph, and the messages of its process ranks about it: which one solves, the
answer, and the launches of each.

All messages go to groups of process ranks that communicate in the graph: only they must agree,
so that stages of a pipeline may compile other graphs, and more or fewer of them. In each group the
lowest process rank is its *leader*.

1. A process rank whose graph is that of the leader of one of its groups takes the answer of the
   lowest such leader; one that finds none lower with its graph solves. The leader of a
   group hands on the answer that it got.
2. Each sends its launches to each of its groups, and the leader compares them. The findings of
   leaders go up, to the lowest process rank that can be reached, and come down to all as one
   verdict. A good verdict counts once all have received it, by one key of the store whose first
   value holds for all: either all process ranks begin or none does, also where one is late or
   ends in between.

Where a compiler may find code for the graph in a cache, and would then ask for nothing, each says
first in the same way whether it has found any; it counts where all have, and it launches the same.
The memory in use goes up and comes down in the same way, and all take the largest. So do the
settings that change a joint graph, before anything is changed; where they differ, nothing is.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from apsched.compiler.ranks.channel import (
    FINDINGS_BY,
    ORDERS_BY,
    VERDICT_BY,
    Channel,
    Group,
    groups_with_keys,
)
from apsched.compiler.ranks.failures import (
    differences,
    in_words,
    other_settings,
    raise_failure,
)
from apsched.compiler.ranks.job import DEFAULT_DEADLINE_S, Job, running_job
from apsched.compiler.ranks.launches import (
    Launch,
    dump_launches,
    first_difference,
    groups_of,
    order_digest,
    parse_launches,
)
from apsched.errors import AgreementError, ApschedError
from apsched.names import ranks_text
from apsched.torch_compat.graphs import process_group_names

_LINGER = 0.1
"""Share of the deadline for which process rank 0 stays where something is wrong; a tenth of that at
least.
"""
_OF_SHARDS = ("memory_cap_bytes",)
"""Settings that may depend on the sizes of shards: ``floor`` is the least of each graph."""
_SETTINGS, _CODE, _MEMORY, _ORDER = "settings", "code", "memory", "order"
_ABOUT = {
    _SETTINGS: "its settings",
    _CODE: "its cached code for the graph",
    _MEMORY: "the memory of its device (it does not where its memory_cap or keep is another)",
    _ORDER: "its launches",
}
_AGAIN = "compile again"
"""A finding that is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of all process ranks to a question about a graph."""

    wrong: str = ""
    """The first mismatch, empty for none."""
    is_silent: bool = False
    """Whether some process rank does not answer."""
    values: tuple[int, ...] = ()

    def checked(self) -> Self:
        """Return the verdict; raise ``AgreementError`` where something is wrong."""
        if self.wrong:
            raise AgreementError(self.wrong, is_silent=self.is_silent)
        return self


class GraphAgreement:
    """Agreement on one graph; a context: an error that leaves it is sent to the others, so
    that none waits in vain.
    """

    def __init__(self, job: Job, groups: Mapping[str, Sequence[int]]) -> None:
        """``groups`` are those that the graph communicates in, with their process ranks, by first
        appearance.
        """
        self.job = job
        self.groups = groups_with_keys(job, groups)
        self.channel = Channel(job, self.groups)
        self.launched: dict[str, str] = {}
        """Group name -> digest of the launches of this process rank there, after their
        comparison.
        """
        self._num_answers = 0
        self._largest: tuple[int, ...] | None = None
        self._left = False

    def __enter__(self) -> "GraphAgreement":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self._left:
            return
        self._left = True
        try:
            self._send_failure(error)
            self._wait_until_received()
        except AgreementError:
            return  # the store is gone, and the others see that for themselves

    # the answer

    def shared(
        self,
        identity: str,
        settings: Mapping[str, str],
        solve: Callable[[], bytes],
        exact: str = "",
    ) -> tuple[bytes, int]:
        """Return the answer for all process ranks with this ``identity``, and who gave it;
        ``solve`` is called on one of them.

        ``settings`` are those that an answer depends on; it is an ``AgreementError`` where they
        differ. Where ``exact`` does, shards have other sizes, and so may caps on memory. An
        error of ``solve`` is raised on all of them, in the same words.
        """
        step, self._num_answers = f"answer {self._num_answers}", self._num_answers + 1
        try:
            own = {"identity": identity, "settings": dict(settings), "exact": exact}
            return self._shared(step, own, solve)
        except ApschedError as error:
            self._send_failure(error, orders=False)
            raise

    def _shared(
        self, step: str, own: Mapping[str, Any], solve: Callable[[], bytes]
    ) -> tuple[bytes, int]:
        for group in self.channel.led():
            self.channel.send(group, f"{step} identity", own)
        leader = min(self._same_graph(step, own), key=lambda p: (p.leader, p.key), default=None)
        if leader is not None:
            message = self.channel.receive(leader, step, leader.leader, "the answer")
            raise_failure(message)
            data, solver = self.channel.read(leader, f"{step} data") or b"", int(message["solver"])
        else:
            solver = self.job.rank
            try:
                with self.job.working():
                    data = solve()
            except Exception as error:
                raise in_words(error, self.job.rank) from error
        for group in self.channel.led():
            self.channel.write(group, f"{step} data", data)
            self.channel.send(group, step, {"solver": solver})
        return data, solver

    def _same_graph(self, step: str, own: Mapping[str, Any]) -> list[Group]:
        """Return the groups whose leader is lower and has this graph."""
        same = []
        for group in self.groups:
            if group.leader == self.job.rank:
                continue
            theirs = self.channel.receive(group, f"{step} identity", group.leader, "its graph")
            raise_failure(theirs)
            if theirs["identity"] != own["identity"]:
                continue
            of_shards = _OF_SHARDS if theirs["exact"] != own["exact"] else ()
            if differing := differences(own["settings"], theirs["settings"], of_shards):
                raise AgreementError(
                    f"process rank {self.job.rank} and process rank {group.leader} have the same"
                    f" graph, but ask for different schedules: {differing}; give all process ranks"
                    " the same settings"
                )
            same.append(group)
        return same

    def give_up(self, error: Exception) -> None:
        """Tell all who may wait for an answer of this process rank that there will be none."""
        with suppress(AgreementError):  # the store is gone, and the others see that for themselves
            self._send_failure(error, orders=False)

    # the check

    def same_code(self, launched: Mapping[str, str] | None) -> bool:
        """Return whether all process ranks found code for this graph in a cache, and their code has
        the same launches in every group.

        ``launched`` is group name -> digest of the launches of the code found here, ``None`` where
        none was found. Where the answer is no, no process rank may use its code.
        """
        digests = {
            group: {"digest": launched and launched.get(group.name, "")} for group in self.groups
        }
        verdict = self._agreed(_CODE, digests)
        return verdict.wrong != _AGAIN and not verdict.checked().wrong

    def same_settings(self, graph: str, settings: Mapping[str, str]) -> None:
        """Return if all process ranks that have this ``graph`` have these ``settings``, and the
        same compiler; else raise ``AgreementError`` on all of them.
        """
        own = {"graph": graph, "settings": dict(settings)}
        self._agreed(_SETTINGS, dict.fromkeys(self.groups, own)).checked()

    def largest(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the largest of each of ``values`` of all process ranks; later calls: the same."""
        if self._largest is None:
            verdict = self._agreed(_MEMORY, {group: {} for group in self.groups}, values)
            self._largest = verdict.checked().values
        return self._largest

    def check(self, launches: Mapping[str, Sequence[Launch]], kept: str = "") -> None:
        """Return if all process ranks will launch the same in every group; else raise
        ``AgreementError`` on all of them.

        ``kept`` is why this process rank has to run the graph as it was; then all have to.
        """
        digests = {}
        for group in self.groups:
            order = launches.get(group.name, ())
            self.channel.write(group, f"launches {self.job.rank}", dump_launches(order))
            digests[group] = order_digest(order)
        messages = {group: {"digest": digest, "kept": kept} for group, digest in digests.items()}
        self._agreed(_ORDER, messages).checked()
        self.launched = {group.name: digest for group, digest in digests.items()}

    def _agreed(
        self, topic: str, messages: Mapping[Group, Mapping[str, Any]], values: Sequence[int] = ()
    ) -> "Verdict":
        """Send the text to compare in each group; return the first mismatch of all texts, and the
        largest of the ``values`` of all.
        """
        if not self.groups:
            return Verdict(values=tuple(values))
        parent = min(
            (p for p in self.groups if p.leader < self.job.rank),
            key=lambda p: (p.leader, p.key),
            default=None,
        )
        for group, words in messages.items():
            own = {**words, "up": group is parent, "values": [*values]}
            self.channel.send(group, f"{topic} {self.job.rank}", own)
        found = self._findings(topic)
        if parent is None:
            verdict = {**found, "at": f"{self.groups[0].key}/{topic} all"}
        else:
            self.channel.send(parent, f"{topic} up {self.job.rank}", found)
            verdict = self.channel.receive(
                parent,
                f"{topic} verdict",
                parent.leader,
                "its verdict",
                VERDICT_BY,
                or_else=found["wrong"],
            )
        for group in self.channel.led():
            self.channel.send(group, f"{topic} verdict", verdict)
        if not verdict["wrong"] and not self.job.decided(verdict["at"], verdict["ranks"]):
            return Verdict(
                wrong=f"not all of {verdict['ranks']} process ranks have received the verdict"
                f" within {self.job.deadline_s:.1f} s: one of them ended, or hangs."
                " Nothing was launched. See the logs of the others, or raise deadline_s",
                is_silent=True,
            )
        return Verdict(
            wrong=str(verdict["wrong"]),
            is_silent=bool(verdict.get("silent")),
            values=tuple(verdict.get("values", ())),
        )

    def _findings(self, topic: str) -> dict[str, Any]:
        """Return the first error in the groups that this process rank speaks for, and in those
        below, empty for none, and whether some are silent; the number of process ranks concerned,
        and the largest of their values.
        """
        began_s = time.monotonic()
        led = self.channel.led()
        messages, silent_here = self.channel.collect(
            topic, [(group, rank) for group in led for rank in group.ranks], ORDERS_BY, began_s
        )
        wrong = next(
            filter(None, (self._compared(topic, group, messages, silent_here) for group in led)), ""
        )
        below = [key for key, words in messages.items() if words.get("up")]
        ups, silent = self.channel.collect(f"{topic} up", below, FINDINGS_BY, began_s)
        from_below = next((up["wrong"] for up in ups.values() if up["wrong"]), "")
        late = next(
            (
                self.channel.silence(silent, group, "their findings", FINDINGS_BY)
                for group, rank in below
                if rank in silent
            ),
            "",
        )
        known = [found.get("values") for found in (*messages.values(), *ups.values())]
        largest = [max(column) for column in zip(*filter(None, known), strict=True)]
        return {
            "wrong": wrong or from_below or late,
            "silent": bool(silent_here or silent) or any(up["silent"] for up in ups.values()),
            "ranks": 1 + sum(up["ranks"] for up in ups.values()),
            "values": largest,
        }

    def _compared(
        self,
        topic: str,
        group: Group,
        messages: Mapping[tuple[Group, int], Mapping[str, Any]],
        silent: tuple[int, ...],
    ) -> str:
        """Return the first mismatch of the texts of one group; empty where they agree."""
        received = {rank: words for (where, rank), words in messages.items() if where == group}
        for words in received.values():
            if "failed" in words or words.get("kept"):
                return str(words.get("message") or words["kept"])
        missing = [rank for rank in group.ranks if rank in silent and rank not in received]
        if missing:
            return self.channel.silence(missing, group, _ABOUT[topic], ORDERS_BY)
        if topic == _MEMORY or len(received) < len(group.ranks):
            return ""  # nothing to compare, or another group has failed already
        if topic == _SETTINGS:
            return other_settings(received)
        digests = {rank: words["digest"] for rank, words in received.items()}
        if topic == _CODE:
            return _AGAIN if None in digests.values() or len(set(digests.values())) > 1 else ""
        return self._differing(group, digests)

    def _differing(self, group: Group, digests: Mapping[int, str]) -> str:
        """Return the process ranks that would launch something else than most in one group; empty
        for none.
        """
        counts = list(digests.values())
        usual = max(dict.fromkeys(counts), key=counts.count)
        others = [rank for rank, digest in digests.items() if digest != usual]
        if not others:
            return ""
        usually = [rank for rank in digests if rank not in others]
        deviating, usual_launches = (
            parse_launches(self.channel.read(group, f"launches {rank}") or b"[]")
            for rank in (others[0], usually[0])
        )
        more = f" (and {ranks_text(others[1:])} differ, too)" if others[1:] else ""
        return (
            f"process rank {others[0]} would launch other collectives than {ranks_text(usually)} in"
            f" group {group.name!r} of {ranks_text(group.ranks)}:"
            f" {first_difference(deviating, usual_launches)}{more}. Nothing was launched. Run the"
            " same model, options, schedule files and versions on all"
        )

    def _send_failure(self, error: BaseException, *, orders: bool = True) -> None:
        """Tell all who may wait for this process rank why it gave up."""
        error = in_words(error, self.job.rank)
        failure = {"failed": type(error).__name__, "message": str(error)}
        answers = [
            what
            for number in range(self._num_answers + 1)  # the next one, too
            for what in (f"answer {number} identity", f"answer {number}")
        ]
        topics = tuple(_ABOUT) if orders else (_SETTINGS, _MEMORY)
        for group in self.channel.led():
            verdicts = [f"{topic} verdict" for topic in topics]
            self.channel.send_once(group, [*answers, *verdicts], failure)
        for group in self.groups:
            self.channel.send_once(group, [f"{topic} {self.job.rank}" for topic in topics], failure)

    def _wait_until_received(self) -> None:
        """On process rank 0, which may hold the store: stay for a moment, so that the others
        receive the error before it ends.
        """
        received = {f"{group.key}/received": len(group.ranks) for group in self.groups}
        for key in received:
            self.job.store.add(key)
        most_s = _LINGER * min(self.job.deadline_s, DEFAULT_DEADLINE_S)
        began_s = time.monotonic()
        while self.job.rank == 0 and (waited_s := time.monotonic() - began_s) < most_s:
            if waited_s > most_s / 10 and all(
                self.job.store.add(key, 0) >= count for key, count in received.items()
            ):
                return
            time.sleep(most_s / 50)


logger = logging.getLogger(__name__)


def agreement_of(module: torch.fx.GraphModule, deadline_s: float | None) -> GraphAgreement | None:
    """Return the agreement about ``module``; ``None`` without other process ranks.

    All process ranks that communicate in ``module`` must call this for it, and for other graphs
    with the same groups in the same order.
    """
    job = running_job(deadline_s)
    if job is None:
        return None
    known = process_group_names()
    groups = groups_of(module)
    for name in groups:
        if name not in known:
            logger.warning(
                "process group %r is not one of this job; the order of its launches is not compared"
                " between process ranks",
                name,
            )
    opened = GraphAgreement(job, {name: known[name] for name in groups if name in known})
    return opened if opened.groups else None
