"""The gain of a step from one more GiB of memory: the time, and the entries that the choice adds.

The known schedules fit looser caps, too, so the gain is never negative. Two
searches differ by chance, so a gain counts as proven only by bounds.
"""

from dataclasses import dataclass

from apsched.whole_step.choices import Choice
from apsched.whole_step.solve import Answer, AnyStep, best_choice

MORE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """The answer for a step, and the one under a cap that is looser by ``more_bytes``."""

    now: Answer
    more: Answer
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
        """Entries that only the choice with more memory has; none where nothing is gained."""
        return self.more.best.kept - self.now.best.kept if self.gain_ticks else Choice()

    @property
    def no_longer_kept(self) -> Choice:
        """Entries that the choice now has alone."""
        return self.now.best.kept - self.more.best.kept if self.gain_ticks else Choice()


def with_more_memory(step: AnyStep, now: Answer, more_bytes: int = MORE_BYTES) -> MoreMemory:
    """Return the gain from ``more_bytes`` of memory for ``step``; its answer ``now`` must fit."""
    looser: AnyStep = step.with_more(more_bytes)
    looser.solve(now.best.kept)
    return MoreMemory(now=now, more=best_choice(looser), more_bytes=more_bytes)
