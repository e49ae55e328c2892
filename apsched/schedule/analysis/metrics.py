"""Metrics of the collectives of a schedule: for each process group, kind and direction, and for
all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from apsched.config import Caps
from apsched.kinds import CollectiveKind, NodeKind
from apsched.names import direction_named
from apsched.problem.problem import Collective, Problem
from apsched.quantities import show_bytes, show_us
from apsched.schedule.schedule import Schedule, StepKind
from apsched.schedule.simulate import Timeline
from apsched.units import ticks_to_us


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMetrics:
    """FSDP collectives of one kind, group and direction."""

    group: str
    group_size: int
    kind: CollectiveKind
    direction: str
    num_collectives: int
    """As captured."""
    num_launches: int
    num_buckets: int
    """Launches of two members or more."""
    num_coalesced: int
    """Those of them that have no buffer."""
    largest_bytes: int
    mean_bytes: float
    largest_span: int
    """Topo-span; 0 for a launch of one member."""
    mean_span: float
    closed_by_bytes: int
    """Launches that the next one of their key could not join without breaking the cap on bucket
    bytes.
    """
    closed_by_span: int
    """Launches that kept the cap on bytes, but not that on topo-span."""

    def __str__(self) -> str:
        return (
            f"{self.direction or 'any'} {self.kind} on group {self.group} ({self.group_size}):"
            f" {self.num_collectives} collectives in {self.num_launches} launches,"
            f" {self.num_buckets} of several{self._forms()}; largest"
            f" {show_bytes(self.largest_bytes)}, mean {show_bytes(round(self.mean_bytes))}; span at"
            f" most {self.largest_span}, mean {self.mean_span:.1f}; closed by bytes"
            f" {self.closed_by_bytes}, by span {self.closed_by_span}"
        )

    def _forms(self) -> str:
        return f" ({self.num_coalesced} coalesced)" if self.num_coalesced else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A schedule as a whole."""

    launches: tuple[LaunchMetrics, ...]
    """By direction, group and kind."""
    longest_run_captured: int
    """The most compute nodes before a reduce-scatter is launched, from the beginning or the one
    before on; as captured.
    """
    longest_run: int
    """The same in the schedule: much bucketing of gradients makes it long, and memory with it
    (AutoParallel #481).
    """
    exposed_us: float
    peak_memory_bytes: int

    def lines(self) -> tuple[str, ...]:
        """Return the metrics for people, one line for each group, kind and direction, and one for
        the whole.
        """
        whole = (
            f"compute nodes between reduce-scatters: at most {self.longest_run_captured} as"
            f" captured, {self.longest_run} now; exposed {show_us(self.exposed_us)}; peak memory"
            f" {show_bytes(self.peak_memory_bytes)}"
        )
        return (*map(str, self.launches), whole)


@dataclass(frozen=True, slots=True)
class _Launch:
    key: int
    num_members: int
    num_coalesced: int
    """1 where it is a coalesced bucket."""
    size_bytes: int
    first: int
    last: int
    """Ranks of the first and the latest member."""

    @property
    def span(self) -> int:
        return self.last - self.first

    def joined(self, other: "_Launch") -> "_Launch":
        """Return one launch of both."""
        num_members, size_bytes = (
            self.num_members + other.num_members,
            self.size_bytes + other.size_bytes,
        )
        return _Launch(
            self.key,
            num_members,
            0,
            size_bytes,
            min(self.first, other.first),
            max(self.last, other.last),
        )


def metrics_of(problem: Problem, schedule: Schedule, timeline: Timeline, caps: Caps) -> Metrics:
    """Return the metrics of ``schedule``, whose timeline is given; ``caps`` are those that close
    buckets.
    """
    sets: dict[tuple[str, str, CollectiveKind], list[_Launch]] = {}
    for transfer in timeline.transfers:
        members = [problem.collectives[c] for c in transfer.members]
        if not members[0].on_path:
            sets.setdefault(_set_of(problem, members[0]), []).append(
                _launch(members, transfer.coalesced)
            )
    captured = {c.start for c in problem.collectives if _scatters(problem, c)}
    return Metrics(
        launches=tuple(
            _launch_metrics(problem, *name, launches, caps)
            for name, launches in sorted(sets.items())
        ),
        longest_run_captured=_longest_run(
            problem, [(node, node in captured) for node in range(problem.num_nodes)]
        ),
        longest_run=_longest_run(problem, _scheduled(problem, schedule)),
        exposed_us=ticks_to_us(timeline.exposed_ticks),
        peak_memory_bytes=timeline.peak_memory_bytes,
    )


def _launch(members: Sequence[Collective], coalesced: bool) -> _Launch:
    starts = [c.start for c in members]
    return _Launch(
        members[0].key,
        len(members),
        int(coalesced),
        sum(c.size_bytes for c in members),
        min(starts),
        max(starts),
    )


def _set_of(problem: Problem, collective: Collective) -> tuple[str, str, CollectiveKind]:
    key = problem.keys[collective.key]
    direction = direction_named(problem.name) or collective.direction
    return direction, key.group, key.kind


def _launch_metrics(
    problem: Problem,
    direction: str,
    group: str,
    kind: CollectiveKind,
    launches: Sequence[_Launch],
    caps: Caps,
) -> LaunchMetrics:
    by_bytes = by_span = 0
    for key in {launch.key for launch in launches}:
        for one, other in pairwise(launch for launch in launches if launch.key == key):
            both = one.joined(other)
            if caps.bucket_cap_bytes is not None and both.size_bytes > caps.bucket_cap_bytes:
                by_bytes += 1
            elif caps.max_topo_span is not None and both.span > caps.max_topo_span:
                by_span += 1
    return LaunchMetrics(
        group=group,
        group_size=problem.keys[launches[0].key].group_size,
        kind=kind,
        direction=direction,
        num_collectives=sum(launch.num_members for launch in launches),
        num_launches=len(launches),
        num_buckets=sum(launch.num_members > 1 for launch in launches),
        num_coalesced=sum(launch.num_coalesced for launch in launches),
        largest_bytes=max(launch.size_bytes for launch in launches),
        mean_bytes=sum(launch.size_bytes for launch in launches) / len(launches),
        largest_span=max(launch.span for launch in launches),
        mean_span=sum(launch.span for launch in launches) / len(launches),
        closed_by_bytes=by_bytes,
        closed_by_span=by_span,
    )


def _scatters(problem: Problem, collective: Collective) -> bool:
    return (
        problem.keys[collective.key].kind == CollectiveKind.REDUCE_SCATTER
        and not collective.on_path
    )


def _scheduled(problem: Problem, schedule: Schedule) -> Iterator[tuple[int, bool]]:
    """Yield node (-1 where it is none of the captured) and whether it launches a reduce-scatter of
    gradients, for each step.
    """
    alone = {c.start for c in problem.collectives if _scatters(problem, c)}
    for step in schedule.steps:
        if step.kind is StepKind.NODE:
            yield step.index, step.index in alone
        elif step.kind is StepKind.START:
            yield (
                -1,
                _scatters(problem, problem.collectives[schedule.buckets[step.index].members[0]]),
            )


def _longest_run(
    problem: Problem, steps: Sequence[tuple[int, bool]] | Iterator[tuple[int, bool]]
) -> int:
    compute_order = frozenset(problem.captured_order)
    longest = run = 0
    for node, scatters in steps:
        if scatters:
            longest, run = max(longest, run), 0
        elif node in compute_order:
            run += 1
    return longest


def without_buckets_ticks(problem: Problem) -> int:
    """Return a lower bound on the step time of every schedule of ``problem`` without buckets.

    Work on a stream runs one after the other, and neither an order nor waits change how long it
    takes: max(compute and launches, for each group the sum of T_c over its collectives c).
    Contention only makes it longer.
    """
    busy = Counter[int]()
    for c in problem.collectives:
        key = problem.keys[c.key]
        busy[key.stream] += key.price(c.size_bytes)
    runs = (NodeKind.COMPUTE, NodeKind.START)
    return max(
        sum(
            ticks
            for ticks, kind in zip(problem.duration_ticks, problem.kinds, strict=True)
            if kind in runs
        ),
        *busy.values(),
        0,
    )
