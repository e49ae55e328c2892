"""Step times of schedules over sampled costs."""

from dataclasses import dataclass

from apsched.config import ScenarioOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Step times of one schedule."""

    name: str
    step_time_ticks: int
    """At the costs as they are."""
    mean_ticks: int
    """Over the scenarios."""
    worst_ticks: int

    @property
    def slower(self) -> float:
        """Relative increase of the step time in the worst of the scenarios over the stated
        costs.
        """
        return self.worst_ticks / self.step_time_ticks - 1 if self.step_time_ticks else 0.0

    def measured(self, options: ScenarioOptions) -> tuple[int, int]:
        """Return the ticks of the measure of ``options``, then of the other one: the best schedule
        has the least.
        """
        both = self.worst_ticks, self.mean_ticks
        return both if options.measure == "worst" else both[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """The result of the scenarios."""

    options: ScenarioOptions
    baselines: tuple[Spread, ...]
    """Those that fit."""
    as_priced: Spread
    """The schedule that believes the costs."""
    chosen: Spread
    """The schedule of the answer; the same where no other is better by the measure."""
    num_candidates: int

    @property
    def spreads(self) -> tuple[Spread, ...]:
        """All schedules, the chosen one last."""
        own = (self.as_priced,) if self.chosen == self.as_priced else (self.as_priced, self.chosen)
        return (*self.baselines, *own)
