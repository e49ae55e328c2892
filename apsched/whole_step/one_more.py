"""The gain of a step from one more GiB of memory: the further kept parameters, and the time.

The known schedules fit looser caps, too, so the gain is never negative. Two
searches differ by chance, so a gain counts as proven only by bounds.
"""

from dataclasses import dataclass, replace

from apsched.whole_step.choices import Choice
from apsched.whole_step.pair import Step
from apsched.whole_step.search import StepAnswer, solve_step

MORE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """The answer for a step, and the one under a cap that is looser by ``more_bytes``."""

    now: StepAnswer
    more: StepAnswer
    more_bytes: int

    @property
    def gain_ticks(self) -> int:
        """Return the reduction of the step time."""
        return max(self.now.best.step_ticks - self.more.best.step_ticks, 0)

    @property
    def proven_ticks(self) -> int:
        """The bound now less the step time with more memory: gained over any choice and schedules
        that fit now; 0 where that is not positive.
        """
        return max(self.now.bound.ticks - self.more.best.step_ticks, 0)

    @property
    def possible_ticks(self) -> int:
        """The step time now less the bound with more memory: no choice gains more."""
        return max(self.now.best.step_ticks - self.more.bound.ticks, 0)

    @property
    def also_kept(self) -> Choice:
        """Parameters that are kept only with more memory; none where nothing is gained."""
        return self.more.best.kept - self.now.best.kept if self.gain_ticks else Choice()

    @property
    def no_longer_kept(self) -> Choice:
        """Parameters that are kept now alone."""
        return self.now.best.kept - self.more.best.kept if self.gain_ticks else Choice()


def with_more_memory(step: Step, now: StepAnswer, more_bytes: int = MORE_BYTES) -> MoreMemory:
    """Return the gain from ``more_bytes`` of memory for ``step``; its answer ``now`` must fit."""
    caps = (cap if cap is None else cap + more_bytes for cap in step.cap_bytes)
    forward, backward = caps
    looser = replace(step, cap_bytes=(forward, backward), solved={})
    looser.solve(now.best.kept)
    return MoreMemory(now=now, more=solve_step(looser), more_bytes=more_bytes)
