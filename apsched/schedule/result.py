"""What the solver answers: schedules with their figures, a certificate, or why there is none."""

from dataclasses import dataclass

from apsched.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The exact figures of an order, whoever made it and in whatever terms."""

    name: str
    """Who made it: a baseline's name, or ``apsched``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """How far one cap has to give way, the others as they are, but without those that clash
    whatever it is.
    """

    cap: str
    """Its name, as a field of :class:`apsched.config.Caps`."""
    stated: int
    least: int | None
    """The least value with which a schedule is known; ``None`` where none is known with any
    value.
    """
    bound: int
    """No lower value will do."""
    lifted: tuple[str, ...]
    """Caps that were left out, since they clash whatever the value of this one: they have to give
    way, too.
    """

    @property
    def proven(self) -> bool:
        """Whether no lower value than ``least`` will do."""
        return self.least is not None and self.least <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPlace:
    """A node where the schedule with the least memory holds more than the cap."""

    node: str
    live_bytes: int
    alive: tuple[tuple[str, int, int], ...]
    """What is alive there: where it comes from, how many tensors, bytes; the largest first, the
    rest as one.
    """


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
    """Where memory is short, the fullest first."""
    message: str
    """One sentence with all of that."""

    @property
    def caps(self) -> tuple[str, ...]:
        """Names of all caps that clash."""
        return tuple(dict.fromkeys(cap for clash in self.clashes for cap in clash))

    @property
    def least(self) -> tuple[tuple[str, int], ...]:
        """For each cap the least value known to do, where there is one (with some lifted where they
        have to give way, too).
        """
        return tuple((r.cap, r.least) for r in self.relaxations if r.least is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveResult:
    """The answer to one problem."""

    status: str
    """``optimal`` (bound met), ``feasible`` or ``infeasible``."""
    best: Scored | None
    bound_ticks: int
    """No schedule within the caps is faster."""
    bound_source: str
    """What the bound rests on: ``compute``, ``head``, ``stream <group>``, ``cp-sat`` ..."""
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
    """The part of the solver that found ``best``."""
    deterministic_work: float
    """CP-SAT's deterministic time."""
    infeasibility: Infeasibility | None

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
