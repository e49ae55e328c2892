"""The results of a search: partitions under policies, and the front of step time against peak."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.program.program import Figures
from apsched.solver.search.launch_policy import Policy


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition under a policy, with its figures."""

    labels: Ints
    policy: Policy
    steer_bytes: int | None
    """Memory cap that the policy steered by; None for none."""
    figures: Figures

    @property
    def value(self) -> tuple[int, int, int]:
        """Step time, peak, launches: the order of the objectives."""
        return (
            self.figures.step_time_ticks,
            self.figures.peak_memory_bytes,
            self.figures.num_launches,
        )

    @property
    def layout(self) -> tuple[Policy, int | None]:
        """Everything but the partition that decides how it is laid out."""
        return self.policy, self.steer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A candidate, and the order of the compute that it is laid out around."""

    instance: Instance
    candidate: Candidate


@dataclass(slots=True)
class Front:
    """The evaluated schedules for which no other one is both as fast and as small."""

    _peaks: list[int] = field(default_factory=list)
    """Ascending; the step times behind them descend."""
    _times: list[int] = field(default_factory=list)
    _found: list[Found] = field(default_factory=list)

    def offer(self, instance: Instance, candidate: Candidate) -> None:
        """Take ``candidate`` where nothing that is as small is as fast."""
        time, peak = (
            candidate.figures.step_time_ticks,
            candidate.figures.peak_memory_bytes,
        )
        at = bisect_right(self._peaks, peak)
        if at and self._times[at - 1] <= time:
            return
        first = bisect_left(self._peaks, peak)
        past = first
        while past < len(self._times) and self._times[past] >= time:
            past += 1
        self._peaks[first:past] = [peak]
        self._times[first:past] = [time]
        self._found[first:past] = [Found(instance=instance, candidate=candidate)]

    def __iter__(self) -> Iterator[Found]:
        """Yield the schedules of the front, the smallest peak first."""
        return iter(tuple(self._found))

    def fastest(self, cap_bytes: int | None = None) -> Found | None:
        """Return the fastest within a memory cap; None where nothing fits."""
        at = len(self._peaks) if cap_bytes is None else bisect_right(self._peaks, cap_bytes)
        return self._found[at - 1] if at else None

    def smallest(self, limit_ticks: int) -> Found | None:
        """Return the schedule of least peak within ``limit_ticks``; None where there is none."""
        return next(
            (
                found
                for found, time in zip(self._found, self._times, strict=True)
                if time <= limit_ticks
            ),
            None,
        )
