"""Large problems: a portfolio of partitions and policies, then local moves, each judged by exact evaluation.

The amount of work is counted in evaluations, so that the answer does not depend on the speed of the machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from apsched.config import Caps
from apsched.problem import Problem
from apsched.solver.compact import ALL_GATHER, Compact
from apsched.solver.evaluate import Figures, Program, evaluate
from apsched.solver.families import canonical, families
from apsched.solver.partition import Members, Pricer
from apsched.solver.place import construct
from apsched.solver.policies import Policy

Move = Callable[[tuple[Members, ...]], tuple[Members, ...] | None]
"""Buckets -> changed buckets, or None where the move is impossible by now."""
LEADS = (np.inf, 16.0, 4.0, 2.0, 1.0, 0.5, 0.0)
_FIRST_POLICIES = (Policy(lead=np.inf, copy_out_early=True), Policy(lead=1.0, copy_out_early=True))
_PROMISING = 6
"""Partitions of the portfolio that are tried under every policy."""
_STEERING_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition under a policy, with its program and figures."""

    buckets: tuple[Members, ...]
    policy: Policy
    steer_bytes: int | None
    """Memory cap that the policy steered by; None for none."""
    program: Program
    figures: Figures

    @property
    def value(self) -> tuple[int, int, int]:
        """Step time, peak, launches: the order of the objectives."""
        return self.figures.step_time_ticks, self.figures.peak_memory_bytes, self.figures.num_launches


@dataclass(slots=True)
class Search:
    """One search: the problem, the caps, the best so far, and the evaluations left."""

    problem: Problem
    compact: Compact
    caps: Caps
    report: Callable[[str, int], None]
    """Called with the stage and the best step time in ticks."""
    evaluations_left: int
    floor_bytes: int
    """The least peak for which a schedule is known."""
    pricer: Pricer = field(init=False)
    best: Candidate | None = None

    def __post_init__(self) -> None:
        self.pricer = Pricer(self.problem, self.compact)

    def evaluate(self, buckets: tuple[Members, ...], policy: Policy, steer_bytes: int | None) -> Candidate | None:
        """Return the candidate if it keeps the caps; steer lower where the policy overshot the memory cap."""
        partition = self.pricer.partition(buckets)
        cap = self.caps.memory_cap_bytes if steer_bytes is None else steer_bytes
        for _ in range(_STEERING_ROUNDS):
            self.evaluations_left -= 1
            program = construct(self.compact, partition, policy, self.caps, cap)
            figures = evaluate(self.compact, program)
            if self.keeps_caps(figures):
                return Candidate(buckets, policy, cap, program, figures)
            if cap is None or self.caps.memory_cap_bytes is None or figures.peak_memory_bytes <= self.caps.memory_cap_bytes:
                return None
            cap -= figures.peak_memory_bytes - self.caps.memory_cap_bytes
        return None

    def keeps_caps(self, figures: Figures) -> bool:
        """Whether the caps that a position can break are kept (those on buckets hold by construction)."""
        memory, in_flight = self.caps.memory_cap_bytes, self.caps.in_flight_cap_bytes
        return (memory is None or figures.peak_memory_bytes <= memory) and (in_flight is None or figures.peak_in_flight_bytes <= in_flight)

    def consider(self, candidate: Candidate | None) -> bool:
        """Keep ``candidate`` if it is better than the best."""
        if candidate is None or (self.best is not None and candidate.value >= self.best.value):
            return False
        self.best = candidate
        return True

    # the three stages

    def portfolio(self) -> None:
        """Partitions under two policies; the best of them under all; then the best partition of each key in turn."""
        partitions = list(families(self.pricer, self.caps))
        tried: list[tuple[tuple[int, int, int], int]] = []
        for i, buckets in enumerate(partitions):
            for policy in _FIRST_POLICIES:
                candidate = self.evaluate(buckets, policy, None)
                self.consider(candidate)
                if candidate is not None:
                    tried.append((candidate.value, i))
        promising = list(dict.fromkeys(i for _, i in sorted(tried)))[:_PROMISING] or list(range(len(partitions)))
        steers = (None,) if self.caps.memory_cap_bytes is None else (None, self.floor_bytes)
        for i in promising:
            for policy in policies(self.compact):
                for steer in steers:  # a looser cap must not lose what a tight one finds
                    self.consider(self.evaluate(partitions[i], policy, steer))
        if self.best is None:
            return
        for _ in range(2):
            for key in range(len(self.problem.keys)):
                for buckets in partitions:
                    mixed = self._with_key(self.best.buckets, buckets, key)
                    if mixed != self.best.buckets:
                        self.consider(self.evaluate(mixed, self.best.policy, self.best.steer_bytes))
            for policy in policies(self.compact):
                self.consider(self.evaluate(self.best.buckets, policy, None))
        self.report("portfolio", self.best.figures.step_time_ticks)

    def local_moves(self, stop_at_ticks: int) -> None:
        """Merge neighbours and split buckets while that helps, until ``stop_at_ticks`` is reached or the evaluations are used up."""
        improved = True
        while improved and self.best is not None and self.evaluations_left > 0:
            improved = False
            for move in self._moves(self.best.buckets):
                if self.evaluations_left <= 0 or self.best.figures.step_time_ticks <= stop_at_ticks:
                    return
                buckets = move(self.best.buckets)
                if buckets is not None and self.consider(self.evaluate(buckets, self.best.policy, self.best.steer_bytes)):
                    improved = True
            self.report("local moves", self.best.figures.step_time_ticks)

    def lower_memory(self, limit_ticks: int) -> None:
        """Find the least peak with a step time of at most ``limit_ticks``: bisect the cap that the policies steer by."""
        if self.best is None:
            return
        for policy in (self.best.policy, *policies(self.compact)):
            low, high = 0, self.best.figures.peak_memory_bytes
            for _ in range(_BISECTIONS):
                middle = (low + high) // 2
                candidate = self.evaluate(self.best.buckets, policy, middle)
                if candidate is not None and candidate.figures.step_time_ticks <= limit_ticks:
                    if candidate.figures.peak_memory_bytes < self.best.figures.peak_memory_bytes:
                        self.best = candidate
                    high = min(middle, self.best.figures.peak_memory_bytes)
                else:
                    low = middle
        self.report("lower memory", self.best.figures.step_time_ticks)

    def fewer_launches(self, limit_ticks: int) -> None:
        """Merge neighbours while the step time stays within ``limit_ticks`` and the peak does not rise."""
        if self.best is None:
            return
        peak = self.best.figures.peak_memory_bytes
        i = 0
        while self.best is not None and i + 1 < len(self.best.buckets) and self.evaluations_left > 0:
            left, right = self.best.buckets[i], self.best.buckets[i + 1]
            merged = self._merge_pair(left, right, self.best.buckets)
            candidate = self.evaluate(merged, self.best.policy, self.best.steer_bytes) if merged is not None else None
            if candidate is not None and candidate.figures.step_time_ticks <= limit_ticks and candidate.figures.peak_memory_bytes <= peak:
                self.best = candidate
            else:
                i += 1
        self.report("fewer launches", self.best.figures.step_time_ticks)

    def _with_key(self, base: tuple[Members, ...], other: tuple[Members, ...], key: int) -> tuple[Members, ...]:
        of_key = self.compact.key
        return canonical(self.pricer, [b for b in base if of_key[b[0]] != key] + [b for b in other if of_key[b[0]] == key])

    def _moves(self, buckets: tuple[Members, ...]) -> Iterator[Move]:
        """Yield moves by the members that they concern, so that one stays meaningful after another was taken."""
        for i, left in enumerate(buckets):
            for right in buckets[i + 1 : i + 1 + _NEIGHBOURS]:
                if self.compact.key[left[0]] == self.compact.key[right[0]]:
                    yield partial(self._merge_pair, left, right)
        for bucket in buckets:
            for cut in range(1, len(bucket)):
                yield partial(self._split, bucket, cut)

    def _merge_pair(self, left: Members, right: Members, buckets: tuple[Members, ...]) -> tuple[Members, ...] | None:
        if left not in buckets or right not in buckets:
            return None
        merged = (*left, *right)
        if not self.pricer.same_depth(merged) or not self.pricer.allowed(merged, self.caps):
            return None
        # a gather is as urgent as its first member, anything else as ready as its last: the list stays in order
        stays, goes = (left, right) if self.compact.kind[left[0]] == ALL_GATHER else (right, left)
        return tuple(merged if b == stays else b for b in buckets if b != goes)

    def _split(self, bucket: Members, cut: int, buckets: tuple[Members, ...]) -> tuple[Members, ...] | None:
        if bucket not in buckets:
            return None
        i = buckets.index(bucket)
        return (*buckets[:i], bucket[:cut], bucket[cut:], *buckets[i + 1 :])


_BISECTIONS = 12
_NEIGHBOURS = 3
"""How far apart in order of urgency two buckets may be that a move merges."""


def policies(compact: Compact) -> tuple[Policy, ...]:
    """Return the portfolio of policies; those that use stalls only where on-path collectives make some."""
    stalls = (False, True) if bool(compact.on_path.any()) else (False,)
    leads = tuple(
        Policy(lead=lead, copy_out_early=early, in_stalls=in_stalls) for in_stalls in stalls for lead in LEADS for early in (True, False)
    )
    return (*leads, Policy(lead=0.0, copy_out_early=True, prefetch=False))
