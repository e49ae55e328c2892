"""Answers open questions: passes them to an engine, saves each answer when it comes, and asks the
questions that follow from it.
"""

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO

from apsched.errors import ApschedError
from apsched.graph.graph_file import from_bytes
from apsched.problem.contention_spec import ContentionChoice
from apsched.quantities import show_bytes
from apsched.solver import Known
from apsched.study.axes import MemoryAxis
from apsched.study.chain import MOST_SOLVES, Chain, Job
from apsched.study.engine import Engine
from apsched.study.prepare import Prepared, cluster_of
from apsched.study.rows import IN_STEP, InStep, Point
from apsched.study.setting import point_id
from apsched.study.store import Store
from apsched.study.worker import ALONG, Outcome, Question, point_along_caps, solve_point

MOST_ATTEMPTS = 4
"""Most attempts at a question whose worker was lost."""


@dataclass(slots=True, kw_only=True)
class OpenChain:
    """One chain while it is answered."""

    prepared: Prepared
    chain: Chain
    store: Store
    known: dict[str, Outcome] = field(default_factory=dict)
    """Name of a cap -> the answer that is kept."""
    in_flight: set[Job] = field(default_factory=set)
    done: set[Job] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.look_up((self.first,))
        self.look_up(self.chain.names(self.known))

    @property
    def first(self) -> str:
        """Name of the loosest cap, which is solved first."""
        return self.chain.first_name

    def id_of(self, name: str) -> str:
        """Return the name of the point under the cap ``name``."""
        return point_id(self.prepared.graph.graph_id, self.prepared.setting.described(), name)

    def look_up(self, names: Sequence[str]) -> None:
        """Read the saved answers under these caps."""
        for name in names:
            kept = self.store.point(self.id_of(name))
            if kept is not None and not (self.chain.full and kept.outcome.how == ALONG):
                self.known[name] = kept.outcome

    def ready(self) -> tuple[Job, ...]:
        """Return the jobs that can be handed out now."""
        return tuple(
            job
            for job in self.chain.next_jobs(self.known)
            if job not in self.in_flight and job not in self.done
        )

    def points(self) -> tuple[Point, ...]:
        """Return the answers there are, by ascending caps."""
        names = self.chain.names(self.known) or (self.first,)
        return tuple(
            point
            for name in names
            if name in self.known and (point := self.store.point(self.id_of(name))) is not None
        )


def chains(
    prepared: Sequence[Prepared], memory: MemoryAxis, store: Store, *, full: bool
) -> tuple[OpenChain, ...]:
    """Return a chain for each setting and graph, with its saved answers."""
    return tuple(
        OpenChain(
            prepared=one,
            chain=Chain(
                stated=memory.caps if one.caps is None else one.caps,
                full=full or one.setting.alone,
                alone=one.setting.alone,
                slack=one.setting.search.options.time_slack,
            ),
            store=store,
        )
        for one in prepared
    )


def run(
    lives: Sequence[OpenChain],
    engine: Engine,
    run_id: str,
    after_answer: Callable[[], None] = lambda: None,
    before_question: Callable[[OpenChain, Job], None] = lambda live, job: None,
) -> None:
    """Answer all open questions; ``before_question`` is called before each question,
    ``after_answer`` after each answer. An interrupt stops the engine and is raised again.
    """
    ready = deque((live, job) for live in lives for job in _taken(live))
    futures: dict[Future[Outcome], tuple[OpenChain, Job]] = {}
    attempts: dict[tuple[str, Job], int] = {}
    try:
        while ready or futures:
            while ready and len(futures) < engine.slots:
                live, job = ready.popleft()
                before_question(live, job)
                futures[_submitted(live, job, engine)] = live, job
                if engine.slots == 1:
                    break
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                live, job = futures.pop(future)
                live.in_flight.discard(job)
                error = future.exception() if not future.cancelled() else None
                if future.cancelled() or (error is not None and engine.is_lost(error)):
                    name = live.id_of(job.name), job
                    attempts[name] = attempts.get(name, 0) + 1
                    if attempts[name] >= MOST_ATTEMPTS:
                        raise ApschedError(
                            f"a worker was lost {MOST_ATTEMPTS} times on one question; answers"
                            " so far are saved"
                        ) from error
                    engine.lost()
                    ready.appendleft((live, job))
                    live.in_flight.add(job)
                    continue
                if error is not None:
                    raise error
                _keep(live, job, future.result(), run_id)
                ready.extendleft((live, job) for job in reversed(_taken(live)))
                after_answer()
    except BaseException:
        with _uninterrupted():
            engine.stop()
        raise


def share_schedules(one: OpenChain, other: OpenChain, run_id: str) -> None:
    """Let two chains of one cap each try each other's schedule, where both are about the same graph
    at other prices or caps.
    """
    if (
        one.prepared.graph.graph_hash != other.prepared.graph.graph_hash
        or one.prepared.setting.alone
    ):
        return
    for live, giver in ((one, other), (other, one)):
        own, theirs = live.points()[0], giver.points()[0]
        cap = own.outcome.memory_cap_bytes
        if theirs.schedule is None or (
            cap is not None and (theirs.outcome.peak_memory_bytes or 0) > cap
        ):
            continue
        o = own.outcome
        known = Known(
            bound_ticks=o.bound_ticks,
            bound_source=o.bound_source,
            floor_memory_bytes=o.floor_memory_bytes,
            floor_bound_bytes=o.floor_bound_bytes,
        )
        starts = tuple(
            live.store.schedule_content(point)
            for point in (own, theirs)
            if point.schedule is not None
        )
        _keep(
            live,
            Job(name=live.first, memory_cap=None),
            point_along_caps(_question(live), cap, starts, known),
            run_id,
        )


def _taken(live: OpenChain) -> tuple[Job, ...]:
    jobs = live.ready()
    live.in_flight.update(jobs)
    return jobs


def _submitted(live: OpenChain, job: Job, engine: Engine) -> Future[Outcome]:
    question = _question(live)
    if not job.starts:
        return _handed(engine, solve_point, question, job.memory_cap)
    starts = tuple(
        live.store.schedule_content(point)
        for name in job.starts
        if (point := live.store.point(live.id_of(name))) is not None
    )
    assert job.memory_cap is not None
    return _handed(engine, point_along_caps, question, job.memory_cap.size_bytes, starts, job.known)


def _handed(engine: Engine, function: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
    try:
        return engine.executor().submit(function, *args)
    except Exception as error:
        if not engine.is_lost(error):
            raise
        engine.lost()
        return engine.executor().submit(function, *args)


def _question(live: OpenChain) -> Question:
    setting, graph = live.prepared.setting, live.prepared.graph
    content = live.store.graph_content(graph)
    is_contended = setting.costs.contention != ContentionChoice()
    return Question(
        graph=content,
        request=setting.search,
        device_memory_bytes=graph.device_memory_bytes,
        beside=live.prepared.beside,
        beside_bytes=graph.in_step.beside_bytes,
        contention=setting.costs.contention,
        cluster=cluster_of([from_bytes(content)], setting) if is_contended else None,
        apart=tuple((live.store.graph_content(half), half.places) for half in graph.apart),
    )


def _keep(live: OpenChain, job: Job, outcome: Outcome, run_id: str) -> None:
    described: Mapping[str, Any] = live.prepared.setting.described()
    graph = live.prepared.graph
    if graph.in_step != InStep():
        report = {**outcome.report, IN_STEP: asdict(graph.in_step)}
        outcome = replace(outcome, report=report)
    live.done.add(job)
    live.store.add_result(
        live.id_of(job.name), graph.graph_id, job.name, described, run_id, outcome
    )
    live.look_up((job.name,))
    live.look_up([name for name in live.chain.names(live.known) if name not in live.known])


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in the body: cleaning up takes a moment, and people press it twice."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets it
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_SECONDS_BETWEEN_LINES = 5.0
_ALONG_TO_SOLVE = 0.15
"""Assumed time of an answer from other caps relative to a solve, until one is known."""


class Board:
    """Tells about the chains of one run."""

    def __init__(
        self,
        lives: Sequence[OpenChain],
        slots: int,
        stream: TextIO | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        """``labels`` name the options of each of ``lives``, where they differ."""
        self._lives, self._slots = lives, slots
        self._labels = dict(zip(map(id, lives), labels, strict=False))
        self._question = ""
        self._stream = stream or sys.stderr
        self._kept = {id(live): frozenset(live.known) for live in lives}
        self._last = 0.0
        self._began = time.monotonic()

    def before_question(self, live: OpenChain, job: Job) -> None:
        """Report progress with the current question, unless the last report is recent."""
        label = self._labels.get(id(live), "")
        cap = f"memory cap {_cap_text(job)}"
        self._question = ", ".join(filter(None, (label, live.prepared.graph.name, cap)))
        self.after_answer()

    def after_answer(self) -> None:
        """Report progress, unless the last report is recent."""
        now = time.monotonic()
        done, total = self.counts()
        if not self._stream.isatty() and now - self._last < _SECONDS_BETWEEN_LINES and done < total:
            return
        self._last = now
        text = f"study: {done} of {total} points, {now - self._began:.0f} s"
        if done < total:
            left = self.seconds_left()
            text += (f", about {_show(left)} left" if left > 0 else "") + f"; {self._question}"
        end = "\r" if self._stream.isatty() and done < total else "\n"
        print(f"{text:<100}" if end == "\r" else text, file=self._stream, end=end, flush=True)

    def counts(self) -> tuple[int, int]:
        """Return the number of points, and the largest number that there will be."""
        done = sum(len(live.known) - live.chain.open_solves(live.known) for live in self._lives)
        return done, sum(
            len(live.chain.names(live.known)) or live.chain.expected() for live in self._lives
        )

    def seconds_left(self) -> float:
        """Return an estimate: the mean time of a solve and of an answer from other caps, times how
        many of each are left.
        """
        new = [
            live.known[name]
            for live in self._lives
            for name in live.known
            if name not in self._kept[id(live)]
        ]
        of_all = new or [outcome for live in self._lives for outcome in live.known.values()]
        solves = [outcome.seconds for outcome in of_all if outcome.how != ALONG]
        others = [outcome.seconds for outcome in of_all if outcome.how == ALONG]
        solve = sum(solves) / len(solves) if solves else 0.0
        other = sum(others) / len(others) if others else _ALONG_TO_SOLVE * solve
        longest = total = 0.0
        for live in self._lives:
            missing = (len(live.chain.names(live.known)) or live.chain.expected()) - len(live.known)
            most = live.chain.expected() if live.chain.full else MOST_SOLVES
            left_to_solve = min(
                missing, max(most - sum(outcome.how != ALONG for outcome in live.known.values()), 0)
            )
            again = live.chain.open_solves(live.known) * solve
            seconds = left_to_solve * solve + (missing - left_to_solve) * other + again
            total += seconds
            longest = max(longest, seconds / self._slots if live.chain.full else seconds)
        return max(total / self._slots, longest)


def _cap_text(job: Job) -> str:
    size_bytes = None if job.memory_cap is None else job.memory_cap.size_bytes
    if job.memory_cap is None or job.memory_cap.above_floor or size_bytes is None:
        return job.name
    return show_bytes(size_bytes)


def _show(seconds: float) -> str:
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
