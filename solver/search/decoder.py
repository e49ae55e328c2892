"""The decoder lays out and evaluates a partition under a policy in one compiled call."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from apsched.config import Caps
from apsched.solver.arrays.bucket_prices import (
    COPY_IN_TICKS,
    FLAT,
    IN_BUFFER,
    LAUNCH_TICKS,
    NEED_SLOT,
    OUT_BUFFER,
    TRANSFER_TICKS,
    Tables,
    bucket_figures,
    legal,
    members_of,
)
from apsched.solver.arrays.contention import ContentionArrays
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import Ints, ProblemArrays
from apsched.solver.program.contended_clock import with_shared_clock
from apsched.solver.program.evaluate import live, most_prefetch, walk
from apsched.solver.program.program import Buckets, Figures, Program, WalkInput, fixed
from apsched.solver.search.construct import construct, lay_out
from apsched.solver.search.launch_policy import BaseTimes, Policy, Rules, base_times, rules

_SHOWN_EVERY = 100
"""Evaluations between two calls of ``BudgetUse.shown``."""


@dataclass(slots=True, kw_only=True)
class BudgetUse:
    """Work of all searches for one answer: evaluations, or deterministic time of CP-SAT."""

    planned: float = 0.0
    """At most; 0 while it is unknown."""
    done: float = 0.0
    shown: Callable[[], None] = lambda: None
    """Called now and then while evaluations are counted; it has no influence on the answer."""

    @property
    def share(self) -> float:
        """Share of the planned work that is done; nan while that is unknown."""
        return min(1.0, self.done / self.planned) if self.planned > 0 else float("nan")

    def restart(self, planned: float) -> None:
        """Count again from zero, in another unit of work."""
        self.planned, self.done = planned, 0.0

    def count_evaluation(self) -> None:
        """Count one evaluation."""
        self.done += 1
        if self.done % _SHOWN_EVERY == 0:
            self.shown()


@dataclass(slots=True)
class Decoder:
    """Evaluates partitions, given as labels, and counts how often."""

    pricer: Pricer
    caps: Caps
    use: BudgetUse = field(default_factory=BudgetUse)
    evaluations: int = 0
    _fixed: WalkInput = field(init=False)
    _clock: BaseTimes = field(init=False)
    _rules: dict[tuple[Policy, int | None], Rules] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._fixed, self._clock = fixed(self.arrays), base_times(self.arrays)

    @property
    def arrays(self) -> ProblemArrays:
        """The problem as arrays."""
        return self.pricer.arrays

    def figures(self, labels: Ints, policy: Policy, steer_bytes: int | None) -> Figures | None:
        """Return the cost of the buckets of ``labels`` under ``policy``; None if they are not
        legal, or break the cap on prefetch.
        """
        known = self._rules.get((policy, steer_bytes))
        if known is None:
            known = self._rules[policy, steer_bytes] = rules(
                self.arrays, policy, self.caps, steer_bytes
            )
        self.evaluations += 1
        self.use.count_evaluation()
        possible, step_time, peak, in_flight, launches = evaluate_labels(
            self.pricer.tables, self._fixed, self._clock, known, self.arrays.shares, labels
        )
        if not possible:
            return None
        return Figures(
            step_time_ticks=step_time,
            peak_memory_bytes=peak + self.arrays.kept_bytes,
            peak_in_flight_bytes=in_flight,
            num_launches=launches,
        )

    def program(self, labels: Ints, policy: Policy, steer_bytes: int | None) -> Program:
        """Return the program that ``figures`` evaluates: where ``steer_bytes`` is None, no cap on
        memory steers it.
        """
        steer = None if steer_bytes is None else max(steer_bytes, 0)  # lowered below nothing
        return construct(
            self.pricer,
            self.pricer.partition_of(labels, policy.coalesced_of(len(labels))),
            policy,
            replace(self.caps, memory_cap_bytes=steer),
        )


@compiled
def evaluate_labels(
    t: Tables, f: WalkInput, clock: BaseTimes, r: Rules, s: ContentionArrays | None, labels: Ints
) -> tuple[bool, int, int, int, int]:
    """Return whether the buckets and their prefetch are legal, and their step time, peak, bytes in
    flight and number of launches.

    Under contention (``s``) buckets are laid out as without it. numba compiles each of the two
    apart, and leaves out the other.
    """
    bucket_of, member_begin, member_list = members_of(labels)
    if not legal(t, member_begin, member_list, r.bucket_cap, r.span_cap):
        return False, 0, 0, 0, 0
    figures = bucket_figures(t, member_begin, member_list, r.coalesced)
    operation, argument = lay_out(t, f, clock, r, bucket_of, member_begin, member_list, figures)
    if (
        most_prefetch(operation, argument, figures[:, NEED_SLOT].copy(), len(f.compute_ticks))
        > r.max_prefetch
    ):
        return False, 0, 0, 0, 0  # a gather went ahead with one that waits for it
    buckets = Buckets(
        bucket_of,
        member_begin,
        member_list,
        figures[:, FLAT] == 1,
        figures[:, LAUNCH_TICKS].copy(),
        figures[:, TRANSFER_TICKS].copy(),
        figures[:, COPY_IN_TICKS].copy(),
        figures[:, IN_BUFFER].copy(),
        figures[:, OUT_BUFFER].copy(),
    )
    walked = walk(operation, argument, buckets, f)
    step_time = (
        walked.step_time
        if s is None
        else with_shared_clock(walked, operation, argument, buckets, f, s).step_time
    )
    return True, step_time, live(walked, buckets, f).peak, walked.peak_in_flight, len(figures)
