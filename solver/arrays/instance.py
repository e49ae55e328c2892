"""The input of the solver: a problem, its arrays, and the caps."""

from dataclasses import dataclass, field, replace

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.solver.arrays.problem_arrays import ProblemArrays, problem_arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A problem with its compute in some order, and the caps that a schedule keeps."""

    problem: Problem
    arrays: ProblemArrays
    """Those of ``problem``."""
    caps: Caps = field(default_factory=Caps)

    @classmethod
    def of(cls, problem: Problem, caps: Caps | None = None) -> "Instance":
        """Return ``problem`` with its arrays, under ``caps``."""
        return cls(problem=problem, arrays=problem_arrays(problem), caps=caps or Caps())

    def within(self, caps: Caps) -> "Instance":
        """Return the same problem under ``caps``."""
        return self if caps is self.caps else replace(self, caps=caps)

    def has_room(self, peak_bytes: int) -> bool:
        """Return whether a peak of ``peak_bytes`` keeps the memory cap."""
        cap_bytes = self.caps.memory_cap_bytes
        return cap_bytes is None or peak_bytes <= cap_bytes

    def without_memory_cap(self) -> "Instance":
        """Return the same problem with as much memory as a schedule takes."""
        return self.within(replace(self.caps, memory_cap_bytes=None))
