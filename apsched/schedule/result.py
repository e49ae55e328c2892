"""The answer of the solver: schedules with their figures, a certificate, or the reason why there is
none.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeVar

from apsched.schedule.schedule import Schedule

AS_CAPTURED = "as_captured"
"""Name of the baseline that is the order of the graph itself."""
IN_A_ROW, ALTERNATING = "in_a_row", "alternating"
"""Baselines of a graph of several micro-batches: one behind the other, and by turns, a stretch
between two collectives on the path each, with compute that may move from there.
"""


class Status(StrEnum):
    """The status of the schedule of an answer."""

    OPTIMAL = "optimal"  # its step time meets the bound
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"  # there is none within the caps, or none was found


class SolvedBy(StrEnum):
    """Parts of the program that find schedules, where their name is fixed; others are baselines, or
    a MILP with its solver.
    """

    START = "start"
    CP_SAT = "cp-sat"
    JUST_IN_TIME = "just in time"
    SEARCH = "search"
    ANOTHER_CAP = "another cap"
    ALONG_CAPS = "search along caps"
    SCHEDULE_FILE = "schedule file"


class BoundSource(StrEnum):
    """The arguments of bounds that have a fixed name; others name a stream, a link, a collective or
    a solver.
    """

    COMPUTE = "compute"
    CRITICAL_PATH = "critical path"
    BETWEEN_COLLECTIVES = "compute between collectives on the path"
    PATHS = "paths"
    WEIGHED_ALONG_PATHS = "buckets weighed along paths"
    MEMORY_ALONG_PATHS = "buckets and memory weighed along paths"
    LAUNCH_SEQUENCE = "all sequences of launches"
    WEIGHED_ALONG_CHAIN = "buckets weighed along a chain"
    TWO_CHAINS = "two chains between collectives"
    WEIGHED = "launches and copies against transfers"
    CP_SAT = "cp-sat"
    CONTENTION = "contention"
    SLOWER_COMPUTE = "slower compute"
    SLOWER_TRANSFERS = "slower transfers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The exact figures of an order, independent of its author and its form."""

    name: str
    """Its author: a baseline's name, or ``apsched``."""
    step_time_ticks: int
    exposed_ticks: int
    peak_memory_bytes: int
    num_launches: int
    violations: tuple[str, ...]
    """Caps that it breaks, a sentence each; empty where it fits."""

    @property
    def fits(self) -> bool:
        """Whether it keeps every cap."""
        return not self.violations


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored(Score):
    """A schedule with its exact figures."""

    schedule: Schedule


_AnyScore = TypeVar("_AnyScore", bound=Score)


def captured_of(baselines: Iterable[_AnyScore]) -> _AnyScore | None:
    """Return the order as captured among ``baselines``; ``None`` where it is not there."""
    return next((b for b in baselines if b.name == AS_CAPTURED), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The least value of one cap with the others as they are, excluding caps that conflict for
    every value.
    """

    cap: str
    """Its name, as a field of :class:`apsched.config.Caps`."""
    stated: int
    least: int | None
    """The least value with which a schedule is known; ``None`` where none is known with any
    value.
    """
    bound: int
    """No lower value fits (proven)."""
    lifted: tuple[str, ...]
    """Caps that were left out, since they clash for every value of this one: they must be relaxed,
    too.
    """

    @property
    def proven(self) -> bool:
        """Whether it is proven that no value lower than ``least`` fits."""
        return self.least is not None and self.least <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPlace:
    """A node where the schedule with the least memory holds more than the cap."""

    node: str
    live_bytes: int
    alive: tuple[tuple[str, int, int], ...]
    """The live tensors there: origin, number, bytes; the largest first, the rest as one."""


WITHOUT_PLAN = "without the plan"
"""Words of a message about a plan that binds; a surface that makes the plan itself has others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasibility:
    """Why no schedule keeps the caps."""

    clashes: tuple[tuple[str, ...], ...]
    """Sets of caps, as fields of :class:`apsched.config.Caps`, that no schedule keeps together
    though it can all but any one of them.
    """
    proven: bool
    """Whether the clashes are proven; otherwise no schedule was found."""
    nodes: tuple[str, ...]
    """Names of the nodes where they clash."""
    relaxations: tuple[Relaxation, ...]
    """For each cap that clashes."""
    places: tuple[FullPlace, ...]
    """Places where memory is short, the fullest first."""
    message: str
    """One sentence with all of that."""

    @property
    def caps(self) -> tuple[str, ...]:
        """Names of all caps that clash."""
        return tuple(dict.fromkeys(cap for clash in self.clashes for cap in clash))

    @property
    def least(self) -> tuple[tuple[str, int], ...]:
        """For each cap the least value known to fit, where there is one (with some lifted where
        they must be relaxed, too).
        """
        return tuple((r.cap, r.least) for r in self.relaxations if r.least is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """A schedule that was found on the way: no other that was found is as fast and as small."""

    peak_memory_bytes: int
    step_time_ticks: int


def _front(found: tuple[TradeOff, ...], others: tuple[Scored, ...]) -> tuple[TradeOff, ...]:
    """Return those of ``found`` and ``others`` that no other beats in both; nothing where nothing
    was found.
    """
    if not found:
        return ()
    figures = {(f.peak_memory_bytes, f.step_time_ticks) for f in found}
    figures |= {(f.peak_memory_bytes, f.step_time_ticks) for f in others}
    front: list[TradeOff] = []
    for peak_bytes, ticks in sorted(figures):
        if not front or ticks < front[-1].step_time_ticks:
            front.append(TradeOff(peak_memory_bytes=peak_bytes, step_time_ticks=ticks))
    return tuple(front)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveResult:
    """The answer to one problem."""

    status: Status
    best: Scored | None
    bound_ticks: int
    """No schedule within the caps is faster."""
    bound_source: str
    """The argument of the bound: a :class:`BoundSource`, or the name of a stream, a link, a
    collective or a solver.
    """
    baselines: tuple[Scored, ...]
    floor_memory_bytes: int
    """The least peak for which a schedule is known, with the other caps as they are."""
    floor_bound_bytes: int
    """No schedule has a lower peak."""
    fastest_ticks: int
    """The least step time found; ``best`` may be slower by the slack, for less memory and fewer
    launches. 0 for none.
    """
    time_limit_ticks: int
    """Step time that less memory and fewer launches could cost: the step time found and the
    slack.
    """
    peak_bound_bytes: int
    """No schedule within the caps and that limit has a lower peak."""
    launches_bound: int
    """No schedule within the caps, that limit and the peak of ``best`` has fewer launches."""
    solved_by: str
    """The method that found ``best``: a :class:`SolvedBy`, a baseline or a solver."""
    deterministic_work: float
    """CP-SAT's deterministic time."""
    infeasibility: Infeasibility | None
    """The reasons why no schedule fits; ``None`` where one does, or where they were left out."""
    search_ticks: int = 0
    """The least step time of the search, from which CP-SAT started; 0 where CP-SAT did not run, or
    had nothing to start from.
    """
    trade_offs: tuple[TradeOff, ...] = ()
    """Memory against step time, the least memory first, as far as the search found both; within the
    caps. ``--time-slack`` chooses one of those that are no slower than a baseline that fits.
    """
    may_improve: bool = False
    """Whether CP-SAT was left out on request: it may find a faster schedule."""
    lacks_floor: bool = False
    """Whether the least memory around other orders of the compute was left out on request."""

    @property
    def is_final(self) -> bool:
        """Whether nothing was left out: CP-SAT, the reasons why no schedule fits, or the least
        memory around other orders of the compute.
        """
        return not (self.may_improve or self.lacks_reasons or self.lacks_floor)

    @property
    def lacks_reasons(self) -> bool:
        """Whether no schedule fits, and the reasons were left out."""
        return self.best is None and self.infeasibility is None

    @property
    def knee(self) -> TradeOff | None:
        """The trade-off where more memory begins to gain little: the furthest below the line from
        the smallest to the fastest; None where there are fewer than three.
        """
        if len(self.trade_offs) < 3:
            return None
        small, fast = self.trade_offs[0], self.trade_offs[-1]
        more = fast.peak_memory_bytes - small.peak_memory_bytes
        less = small.step_time_ticks - fast.step_time_ticks

        def saved(point: TradeOff) -> float:
            memory = (point.peak_memory_bytes - small.peak_memory_bytes) / more
            return (small.step_time_ticks - point.step_time_ticks) / less - memory

        return max(self.trade_offs, key=saved)

    @classmethod
    def found(
        cls,
        best: Scored,
        *,
        bound_ticks: int,
        bound_source: str,
        baselines: tuple[Scored, ...],
        floor_memory_bytes: int,
        floor_bound_bytes: int,
        fastest_ticks: int,
        time_limit_ticks: int,
        peak_bound_bytes: int,
        launches_bound: int,
        solved_by: str,
        deterministic_work: float = 0.0,
        search_ticks: int = 0,
        trade_offs: tuple[TradeOff, ...] = (),
    ) -> Self:
        """Return the answer whose best schedule is ``best``. No bound exceeds the figure of
        ``best``: a larger bound is lowered to that figure.

        ``best`` is optimal where its step time meets ``bound_ticks``; ``floor_memory_bytes`` and
        ``fastest_ticks`` are the least values known apart from ``best`` itself.
        """
        bound_ticks = max(bound_ticks, 0)
        return cls(
            status=Status.OPTIMAL if best.step_time_ticks <= bound_ticks else Status.FEASIBLE,
            best=best,
            bound_ticks=min(bound_ticks, best.step_time_ticks),
            bound_source=bound_source,
            baselines=baselines,
            floor_memory_bytes=min(floor_memory_bytes, best.peak_memory_bytes),
            floor_bound_bytes=floor_bound_bytes,
            fastest_ticks=min(fastest_ticks, best.step_time_ticks),
            time_limit_ticks=time_limit_ticks,
            peak_bound_bytes=peak_bound_bytes,
            launches_bound=min(launches_bound, best.num_launches),
            solved_by=solved_by,
            deterministic_work=deterministic_work,
            infeasibility=None,
            search_ticks=search_ticks,
            trade_offs=_front(trade_offs, (best, *(b for b in baselines if b.fits))),
        )

    @classmethod
    def infeasible(
        cls,
        why: Infeasibility | None,
        *,
        bound_ticks: int,
        bound_source: str,
        baselines: tuple[Scored, ...],
        floor_memory_bytes: int,
        floor_bound_bytes: int,
        solved_by: str,
        deterministic_work: float = 0.0,
    ) -> Self:
        """Return the answer that there is no schedule, and ``why``; ``None`` leaves that out."""
        return cls(
            status=Status.INFEASIBLE,
            best=None,
            bound_ticks=bound_ticks,
            bound_source=bound_source,
            baselines=baselines,
            floor_memory_bytes=floor_memory_bytes,
            floor_bound_bytes=floor_bound_bytes,
            fastest_ticks=0,
            time_limit_ticks=0,
            peak_bound_bytes=floor_bound_bytes,
            launches_bound=0,
            solved_by=solved_by,
            deterministic_work=deterministic_work,
            infeasibility=why,
        )

    @property
    def gap(self) -> float:
        """(step time - bound) / step time; 0 where there is no schedule."""
        if self.best is None or self.best.step_time_ticks == 0:
            return 0.0
        return (self.best.step_time_ticks - self.bound_ticks) / self.best.step_time_ticks

    @property
    def fastest_gap(self) -> float:
        """(least step time found - bound) / least step time found; 0 where there is no schedule."""
        return (
            (self.fastest_ticks - self.bound_ticks) / self.fastest_ticks
            if self.fastest_ticks
            else 0.0
        )

    @property
    def peak_gap(self) -> float:
        """(peak - bound) / peak; 0 where there is no schedule."""
        if self.best is None or self.best.peak_memory_bytes == 0:
            return 0.0
        return (self.best.peak_memory_bytes - self.peak_bound_bytes) / self.best.peak_memory_bytes

    @property
    def launches_gap(self) -> float:
        """(launches - bound) / launches; 0 where there is no schedule."""
        if self.best is None or self.best.num_launches == 0:
            return 0.0
        return (self.best.num_launches - self.launches_bound) / self.best.num_launches
