"""Memory caps on one graph: the caps to solve, and the caps to answer from the others.

Along a cap everything is monotone: a schedule with peak p is feasible under every cap >= p, and a
bound holds under every tighter cap. So

1. solve under the loosest cap, which also gives the floor and the memory that the fastest schedule
   needs;
2. solve under the tightest cap that is not below the floor;
3. solve in the middle of the interval where most is unknown, ``MOST_SOLVES`` in all: between solved
   neighbours a < b the step time lies between T(b) and T(a), so that n caps between them leave n
   (T(a) - T(b)) unknown;
4. answer the others in ascending order, each from the solved caps and from the cap before it
   (:mod:`apsched.solver.frontier`);
5. if a tighter cap has a faster schedule than a solved cap, a looser cap a faster one that fits,
   or a looser cap a higher bound, take that schedule or bound;
6. where neighbours differ by more than the slack, and only other caps answered one of them, solve
   in the middle of the caps around them that are not solved, and repeat step 5, until
   neighbours that differ are solved or proven optimal.

If every cap is solved, only step 5 follows. If schedules are not ordered by their step time,
nothing follows.

The next question depends on the answers alone, not on when they came: any number of workers, and a
run that was interrupted and resumed, end with the same points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from apsched.errors import InputError
from apsched.quantities import MemoryCap
from apsched.schedule.result import Status
from apsched.solver import Known
from apsched.study.axes import MemoryRange
from apsched.study.worker import ALONG, Outcome

MOST_SOLVES = 3
_UNLIMITED = 2**62

Stated = MemoryCap | MemoryRange | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeEnds:
    """The ends of ranges of memory caps."""

    solved_floor_bytes: int
    solved_peak_bytes: int | None
    memory_cap_bytes: int | None = None
    """Of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The next thing to do: a solve, or with ``starts`` an answer from other caps."""

    name: str
    """Of the cap, from :func:`cap_name`."""
    memory_cap: MemoryCap | None
    starts: tuple[str, ...] = ()
    """Names of caps whose schedules are known."""
    start_ticks: tuple[int | None, ...] = ()
    """Step times of those schedules: with a faster one it is another job."""
    known: Known | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The memory caps of one graph under one setting."""

    stated: tuple[Stated, ...]
    full: bool
    """Solve under every cap, whatever is known under others."""
    alone: bool = False
    """Nothing follows from the answers under other caps; with ``full``."""
    slack: float
    """Share of the step time below which a difference is not worth a solve."""

    @property
    def first(self) -> MemoryCap | None:
        """The loosest cap."""
        ends = [cap.last if isinstance(cap, MemoryRange) else cap for cap in self.stated]
        return max(ends, key=_looseness)

    @property
    def first_name(self) -> str:
        """Name of the loosest cap."""
        return cap_name(self.first)

    def expected(self) -> int:
        """Return the largest possible number of points."""
        return sum(cap.count if isinstance(cap, MemoryRange) else 1 for cap in self.stated)

    def names(self, known: Mapping[str, Outcome]) -> tuple[str, ...]:
        """Return the names of all caps, ascending, as far as they can be known."""
        top = known.get(self.first_name)
        if top is None:
            return ()
        first = {top.memory_cap_bytes: self.first_name}
        return tuple(first.get(cap, _bytes_name(cap)) for cap in self._caps(top))

    def next_jobs(self, known: Mapping[str, Outcome]) -> tuple[Job, ...]:
        """Return the jobs that can run now; none if all are done."""
        top = known.get(self.first_name)
        if top is None:
            return (Job(name=self.first_name, memory_cap=self.first),)
        names = dict(zip(self._caps(top), self.names(known), strict=True))
        missing = [cap for cap, name in names.items() if name not in known]
        hopeless = [
            cap
            for cap in missing
            if top.step_ticks is None or (cap is not None and cap < top.solved_floor_bytes)
        ]
        alone = missing if self.full else hopeless
        if alone or self.alone:
            return tuple(_solve(cap) for cap in alone)
        caps = [cap for cap in names if cap is None or cap >= top.solved_floor_bytes]
        if not caps:
            return ()
        if ends := [cap for cap in dict.fromkeys((caps[-1], caps[0])) if cap in missing]:
            return tuple(_solve(cap) for cap in ends)
        outcomes = {
            cap: known[name] for cap, name in names.items() if cap in caps and name in known
        }
        if answers := self._answers(caps, names, outcomes):
            return answers
        if beside := self._unsolved(caps, outcomes):
            return (_solve(_middle(beside[0], caps, outcomes)),)
        return ()

    def open_solves(self, known: Mapping[str, Outcome]) -> int:
        """Return the number of caps that have an answer and are solved nevertheless."""
        top = known.get(self.first_name)
        if top is None or self.alone or top.step_ticks is None:
            return 0
        names = zip(self._caps(top), self.names(known), strict=True)
        outcomes = {cap: known[name] for cap, name in names if name in known}
        return len(self._unsolved(list(outcomes), outcomes))

    def _answers(
        self,
        caps: Sequence[int | None],
        names: Mapping[int | None, str],
        outcomes: Mapping[int | None, Outcome],
    ) -> tuple[Job, ...]:
        """Return steps 3 to 5: one job, or none where each cap has an answer that no neighbour
        betters.
        """
        missing = [cap for cap in caps if cap not in outcomes]
        if (worth := self._worth_solving(caps, outcomes)) is not None:
            return (_solve(worth),)
        solved = tuple(
            cap
            for cap in caps
            if cap in outcomes
            and outcomes[cap].how != ALONG
            and outcomes[cap].status != Status.INFEASIBLE
        )
        before: tuple[int | None, ...] = ()
        for cap in caps:
            if cap in missing:
                return (
                    (
                        _along(cap, (*before, *solved), caps, names, outcomes)
                        if before
                        else _solve(cap)
                    ),
                )
            before = (cap,) if outcomes[cap].status != Status.INFEASIBLE else before
        return _bettered(caps, names, outcomes)

    def _unsolved(
        self, caps: Sequence[int | None], outcomes: Mapping[int | None, Outcome]
    ) -> list[int | None]:
        """Return the caps of step 6, ascending: only other caps answered, and a neighbour differs
        by more than the slack.
        """
        found: dict[int | None, None] = {}
        for tighter, looser in pairwise(caps):
            slower, faster = outcomes[tighter].step_ticks, outcomes[looser].step_ticks
            if slower is not None and faster is not None and slower - faster > self.slack * faster:
                found |= {cap: None for cap in (tighter, looser) if _is_open(outcomes[cap])}
        return list(found)

    def _caps(self, top: Outcome) -> list[int | None]:
        """Return all caps in bytes, ascending, each once."""
        found = {cap for stated in self.stated for cap in resolved(stated, top)}
        return sorted(found, key=lambda cap: _UNLIMITED if cap is None else cap)

    def _worth_solving(
        self, caps: Sequence[int | None], outcomes: Mapping[int | None, Outcome]
    ) -> int | None:
        """Return the cap in the middle of where most is unknown; ``None`` where nothing is, or
        enough was solved.
        """
        solved = [k for k, cap in enumerate(caps) if cap in outcomes and outcomes[cap].how != ALONG]
        best, middle = 0, None
        for a, b in pairwise(solved):
            between = [k for k in range(a + 1, b) if caps[k] not in outcomes]
            slower, faster = outcomes[caps[a]].step_ticks, outcomes[caps[b]].step_ticks
            if (
                not between
                or slower is None
                or faster is None
                or slower - faster <= self.slack * faster
            ):
                continue
            if len(solved) < MOST_SOLVES and len(between) * (slower - faster) > best:
                best, middle = len(between) * (slower - faster), caps[between[len(between) // 2]]
        return middle


def _middle(
    beside: int | None, caps: Sequence[int | None], outcomes: Mapping[int | None, Outcome]
) -> int | None:
    """Return the cap in the middle of those around ``beside`` that only other caps answered."""
    place = caps.index(beside)
    before, after = caps[:place][::-1], caps[place + 1 :]
    tighter, looser = (
        [*takewhile(lambda cap: _is_open(outcomes[cap]), side)] for side in (before, after)
    )
    between = [*tighter[::-1], beside, *looser]
    return between[len(between) // 2]


def _is_open(outcome: Outcome) -> bool:
    """Return whether only other caps answered, and a solve may find a faster schedule."""
    return outcome.how == ALONG and outcome.status != Status.OPTIMAL


def _bettered(
    caps: Sequence[int | None],
    names: Mapping[int | None, str],
    outcomes: Mapping[int | None, Outcome],
) -> tuple[Job, ...]:
    """Return step 5: the tightest cap that another one betters, answered from both."""
    feasible = [cap for cap in caps if outcomes[cap].status != Status.INFEASIBLE]
    for k, cap in enumerate(feasible):
        fitting = (c for c in feasible[k + 1 :] if _fits(outcomes[c], cap))
        others = (*feasible[max(k - 1, 0) : k], *fitting)
        best = min(others, key=lambda c: outcomes[c].value[:4], default=cap)
        if _faster(outcomes[best], outcomes[cap]):
            return (_along(cap, (best, cap), caps, names, outcomes),)
        if k and _bound(cap, caps, outcomes)[0] > outcomes[cap].bound_ticks:
            return (_along(cap, (feasible[k - 1], cap), caps, names, outcomes),)
    return ()


def _fits(outcome: Outcome, cap: int | None) -> bool:
    """Return whether the schedule of ``outcome`` fits a cap."""
    return cap is None or (outcome.peak_memory_bytes or 0) <= cap


def cap_name(cap: MemoryCap | None) -> str:
    """Return the name of a cap in a study: ``device``, ``none``, bytes, ``floor`` or ``floor+``
    bytes.
    """
    if cap is None:
        return "device"
    if cap.above_floor:
        return f"floor+{cap.size_bytes}" if cap.size_bytes else "floor"
    return _bytes_name(cap.size_bytes)


def _bytes_name(cap_bytes: int | None) -> str:
    return "none" if cap_bytes is None else str(cap_bytes)


def _looseness(cap: MemoryCap | None) -> tuple[int, int]:
    if cap is None:
        return -1, 0
    return 0 if cap.above_floor else 1, _UNLIMITED if cap.size_bytes is None else cap.size_bytes


def resolved(stated: Stated, top: Outcome | RangeEnds) -> list[int | None]:
    """Return the caps of ``stated``, by the facts known under the loosest cap."""
    if stated is None:
        return [top.memory_cap_bytes]
    if not isinstance(stated, MemoryRange):
        return [_in_bytes(stated, top)]
    low, high = _in_bytes(stated.first, top), _in_bytes(stated.last, top)
    assert low is not None
    most = high if high is not None else max(top.solved_peak_bytes or low, low)
    if most < low:
        raise InputError(
            f"--vary memory_cap: expected a range that rises; found one from {low} to {most} bytes,"
            " the floor included"
        )
    last = stated.count - 1
    return [*(low + (most - low) * k // last for k in range(last)), high]


def _in_bytes(cap: MemoryCap, top: Outcome | RangeEnds) -> int | None:
    return (cap.size_bytes or 0) + top.solved_floor_bytes if cap.above_floor else cap.size_bytes


def _solve(cap: int | None) -> Job:
    return Job(name=_bytes_name(cap), memory_cap=MemoryCap(size_bytes=cap))


def _along(
    cap: int | None,
    starts: tuple[int | None, ...],
    caps: Sequence[int | None],
    names: Mapping[int | None, str],
    outcomes: Mapping[int | None, Outcome],
) -> Job:
    bound_ticks, bound_source = _bound(cap, caps, outcomes)
    known = Known(
        bound_ticks=bound_ticks,
        bound_source=bound_source,
        floor_memory_bytes=min(o.floor_memory_bytes for o in outcomes.values()),
        floor_bound_bytes=max(o.floor_bound_bytes for o in outcomes.values()),
    )
    starts = tuple(dict.fromkeys(starts))
    return Job(
        name=names[cap],
        memory_cap=MemoryCap(size_bytes=cap),
        starts=tuple(names[start] for start in starts),
        start_ticks=tuple(outcomes[start].step_ticks for start in starts),
        known=known,
    )


def _bound(
    cap: int | None, caps: Sequence[int | None], outcomes: Mapping[int | None, Outcome]
) -> tuple[int, str]:
    """Return the highest bound known under this cap or a looser one."""
    looser = [outcomes[c] for c in caps[caps.index(cap) :] if c in outcomes]
    best = max(looser, key=lambda outcome: outcome.bound_ticks)
    return best.bound_ticks, best.bound_source


def _faster(one: Outcome, other: Outcome) -> bool:
    return one.value[:4] < other.value[:4]
