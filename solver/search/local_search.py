"""Large problems: a portfolio of partitions and policies, then moves in all layers at once and in
one place, each judged exactly.

The amount of work is counted in evaluations, so that the answer does not depend on the speed of the
machine.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from apsched.config import Caps
from apsched.schedule.schedule import Bucket
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays
from apsched.solver.program.program import Figures, Program
from apsched.solver.search.bucket_forms import flipped, flips, in_forms, like
from apsched.solver.search.decoder import BudgetUse, Decoder
from apsched.solver.search.front import Candidate, Front
from apsched.solver.search.launch_policy import Policy
from apsched.solver.search.neighbourhood import Move, Neighbourhood, TriedMoves
from apsched.solver.search.open_bucket.partitions import open_bucket_partitions
from apsched.solver.search.start_partitions import families

LEADS = (np.inf, 16.0, 4.0, 2.0, 1.0, 0.5, 0.0)
FIRST_POLICIES = (Policy(lead=np.inf, copy_out_early=True), Policy(lead=1.0, copy_out_early=True))
_PROMISING = 6
"""Partitions of the portfolio that are tried under every policy."""
_BASINS = 3
"""Number of starts with a full descent."""
_SHARE_OF_LARGEST = 2
"""Under a memory cap, the largest bucket so far over that of a partition to start from."""
_NEAR = 1.02
"""The largest ratio of their step time to that of the best for a descent."""
_STEERING_ROUNDS = 4
_BISECTIONS = 12
_SEED = 0
_SHORTEST_WALK = 500
"""Least number of evaluations for random moves."""
_THRESHOLD = 2e-4
"""Share of the step time that a random move may cost at first."""
_SHARE_OF_POLICIES = 0.01
"""Share of random moves that change the policy."""
_SHARE_OF_FORMS = 0.15
"""Share of random moves that change the form of a bucket, where that has a price."""

_Trial = tuple[bytes, Policy, int | None]
"""Labels, a policy, and the memory that steers it."""


@dataclass(slots=True)
class Search:
    """One search: the problem, the caps, the best so far, and the evaluations left."""

    instance: Instance
    report: Callable[[str, int], None]
    """Called with the stage and the best step time in ticks."""
    max_evaluations: int
    floor_bytes: int
    """The least peak for which a schedule is known."""
    use: BudgetUse = field(default_factory=BudgetUse)
    """Counts the evaluations of this search and of those under tighter caps."""
    pricer: Pricer = field(init=False)
    best: Candidate | None = None
    front: Front = field(default_factory=Front)
    """The front of schedules within the caps, shared with other searches."""
    known_starts: dict[_Trial, Candidate | None] = field(default_factory=dict)
    """Partitions to start from that a shorter search for the same has evaluated."""
    _judge: Decoder = field(init=False)
    _neighbourhood: Neighbourhood = field(init=False)
    _is_spread: bool = False
    """Whether a descent from other starts has run."""
    _starts_evaluated: dict[_Trial, Candidate | None] = field(init=False, default_factory=dict)
    _tried: set[_Trial] = field(init=False, default_factory=set)
    _tried_moves: TriedMoves = field(init=False)

    def __post_init__(self) -> None:
        self.pricer = Pricer(self.instance)
        self._judge = Decoder(self.pricer, self.instance.caps, self.use)
        self._neighbourhood = Neighbourhood(self.instance.arrays)
        self._tried_moves = TriedMoves(num_collectives=len(self.instance.arrays.kind))

    @property
    def evaluations(self) -> int:
        """Evaluations so far, those under lower caps left out."""
        return self._judge.evaluations

    @property
    def step_time_ticks(self) -> int:
        """Step time of the best candidate."""
        assert self.best is not None
        return self.best.figures.step_time_ticks

    def around(self, instance: Instance, max_evaluations: int) -> "Search":
        """Return a new search for the same under another order of the compute."""
        return replace(
            self,
            instance=instance.within(self.instance.caps),
            max_evaluations=max_evaluations,
            best=None,
            known_starts={},
        )

    def within(self, caps: Caps, max_evaluations: int) -> "Search":
        """Return a new search for the same under other caps."""
        return replace(
            self,
            instance=self.instance.within(caps),
            max_evaluations=max_evaluations,
            best=None,
            known_starts={},
            _is_spread=False,
        )

    def again(self, max_evaluations: int) -> "Search":
        """Return a new search for the same, which knows the partitions to start from."""
        return replace(
            self,
            max_evaluations=max_evaluations,
            best=None,
            known_starts=self._starts_evaluated,
            _is_spread=False,
        )

    def program(self) -> Program:
        """Return the program of the best candidate."""
        assert self.best is not None
        return self._judge.program(self.best.labels, self.best.policy, self.best.steer_bytes)

    def evaluate(self, labels: Ints, policy: Policy, steer_bytes: int | None) -> Candidate | None:
        """Return the candidate if it keeps the caps; steer lower where the policy overshot the
        memory cap.
        """
        cap = self.instance.caps.memory_cap_bytes if steer_bytes is None else steer_bytes
        for _ in range(_STEERING_ROUNDS):
            figures = self._judge.figures(labels, policy, cap)
            if figures is None:
                return None
            if self.keeps_caps(figures):
                candidate = Candidate(labels, policy, cap, figures)
                self.front.offer(self.instance, candidate)
                return candidate
            if (
                cap is None
                or self.instance.caps.memory_cap_bytes is None
                or figures.peak_memory_bytes <= self.instance.caps.memory_cap_bytes
            ):
                return None
            cap -= figures.peak_memory_bytes - self.instance.caps.memory_cap_bytes
        return None

    def _evaluate_start(
        self, labels: Ints, policy: Policy, steer_bytes: int | None
    ) -> Candidate | None:
        """As ``evaluate``, unless a shorter search has evaluated it."""
        trial = (labels.tobytes(), policy, steer_bytes)
        if trial in self.known_starts:
            return self.known_starts[trial]
        candidate = self.evaluate(labels, policy, steer_bytes)
        self._starts_evaluated[trial] = candidate
        return candidate

    def keeps_caps(self, figures: Figures) -> bool:
        """Whether the caps that a position can break are kept (those on buckets hold by
        construction).
        """
        memory, in_flight = (
            self.instance.caps.memory_cap_bytes,
            self.instance.caps.in_flight_cap_bytes,
        )
        return (memory is None or figures.peak_memory_bytes <= memory) and (
            in_flight is None or figures.peak_in_flight_bytes <= in_flight
        )

    def consider(self, candidate: Candidate | None) -> bool:
        """Keep ``candidate`` if it is better than the best."""
        if candidate is not None:
            self.front.offer(self.instance, candidate)
        if candidate is None or (self.best is not None and candidate.value >= self.best.value):
            return False
        self.best = candidate
        return True

    # the stages

    def portfolio(self) -> None:
        """Partitions under two policies; the best of them under all; then the best partition of
        each key in turn.
        """
        partitions = list(families(self.pricer, self.instance.caps))
        tried: list[tuple[tuple[int, int, int], int]] = []
        for i, labels in enumerate(partitions):
            for policy in in_forms(self.instance.arrays, FIRST_POLICIES):
                candidate = self._evaluate_start(labels, policy, None)
                self.consider(candidate)
                if candidate is not None:
                    tried.append((candidate.value, i))
        promising = list(dict.fromkeys(i for _, i in sorted(tried)))[:_PROMISING] or list(
            range(len(partitions))
        )
        steers = (
            (None,) if self.instance.caps.memory_cap_bytes is None else (None, self.floor_bytes)
        )
        for i in promising:
            for policy in in_forms(self.instance.arrays, policies(self.instance.arrays)):
                for steer in steers:  # a looser cap must not lose what a tight one finds
                    self.consider(self._evaluate_start(partitions[i], policy, steer))
        if self.best is None:
            return
        for _ in range(2):
            for key in range(len(self.instance.problem.keys)):
                for labels in partitions:
                    # labels name members, and buckets keep to one key
                    mixed = np.where(self.instance.arrays.key == key, labels, self.best.labels)
                    if not np.array_equal(mixed, self.best.labels):
                        layout = self.best.layout
                        self.consider(self._evaluate_start(mixed, *layout))
            for policy in like(self.best.policy, policies(self.instance.arrays)):
                self.consider(self._evaluate_start(self.best.labels, policy, None))
        self.report("portfolio", self.best.figures.step_time_ticks)

    def try_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Consider these buckets, all others alone, under all policies."""
        labels, coalesced = (
            np.arange(len(self.instance.arrays.kind)),
            bytearray(len(self.instance.arrays.kind)),
        )
        for bucket in buckets:
            labels[list(bucket.members)] = min(bucket.members)
            coalesced[min(bucket.members)] = bucket.coalesced
        for policy in policies(self.instance.arrays):
            self.consider(
                self.evaluate(
                    labels,
                    replace(policy, coalesced=bytes(coalesced) if any(coalesced) else b""),
                    None,
                )
            )

    def try_again(self, candidates: Iterable[Candidate]) -> None:
        """Consider the buckets of ``candidates`` under all policies, laid out within the caps."""
        for candidate in candidates:
            self.consider(self.evaluate(candidate.labels, *candidate.layout))
            for policy in like(candidate.policy, policies(self.instance.arrays)):
                self.consider(self.evaluate(candidate.labels, policy, None))

    def improve(self, stop_at_ticks: int) -> None:
        """Take moves that help until none does; then take random moves with half of the evaluations
        that are left, and so on.
        """
        self.descend_from_many(stop_at_ticks)
        while (
            self._neighbourhood.pairs
            and (left := self.max_evaluations - self.evaluations) >= _SHORTEST_WALK
            and not self._done(stop_at_ticks)
        ):
            self._wander(left // 2, stop_at_ticks)
            self.descend(stop_at_ticks)

    def descend_from_many(self, stop_at_ticks: int) -> None:
        """Descend from the best, and once from partitions with one bucket open at a time: moves
        lead from different starts to different ends, and the best start has seldom the best end.
        """
        if not self._is_spread and not self._done(stop_at_ticks):
            self._is_spread = True
            best = self._starts(stop_at_ticks)
            for i, start in enumerate(tuple(best)):
                for layers_first in (False, True) if i == 0 else (False,):
                    self.best = start
                    if layers_first:
                        self._sweep(self._neighbourhood.periodic, stop_at_ticks, "periodic moves")
                    self._sweep(self._neighbourhood.local, stop_at_ticks, "local moves")
                    best = [*best, self.best]
            self.best = min(best, key=lambda candidate: candidate.value)
        self.descend(stop_at_ticks)

    def _starts(self, stop_at_ticks: int) -> list[Candidate]:
        """Return the best, and the best partitions with one bucket open at a time."""
        assert self.best is not None
        caps, arrays, first = self.instance.caps, self.instance.arrays, self.best
        if caps.memory_cap_bytes is not None:
            largest = int(np.bincount(first.labels, arrays.size_bytes).max()) // _SHARE_OF_LARGEST
            caps = replace(caps, bucket_cap_bytes=min(largest, caps.bucket_cap_bytes or largest))
        starts = [first]
        for labels in open_bucket_partitions(self.pricer, caps):
            tried = [
                self._evaluate_start(labels, policy, first.steer_bytes)
                for policy in dict.fromkeys((first.policy, *in_forms(arrays, FIRST_POLICIES)))
                if not self._done(stop_at_ticks)
            ]
            kept = [candidate for candidate in tried if candidate is not None]
            starts += sorted(kept, key=lambda candidate: candidate.value)[:1]
        starts.sort(key=lambda candidate: candidate.value)
        self.report("open buckets", starts[0].figures.step_time_ticks)
        near = starts[0].figures.step_time_ticks * _NEAR
        return [start for start in starts[:_BASINS] if start.figures.step_time_ticks <= near]

    def descend(self, stop_at_ticks: int) -> None:
        """Take moves that help, in all layers at once and then one by one, and other policies,
        until nothing does.
        """
        improved = True
        while improved and not self._done(stop_at_ticks):
            improved = self._sweep(self._neighbourhood.periodic, stop_at_ticks, "periodic moves")
            improved |= self._sweep(self._neighbourhood.local, stop_at_ticks, "local moves")
            improved |= self._other_forms(stop_at_ticks)
            improved |= self._other_policies()

    def descend_among(self, among: Bools, stop_at_ticks: int) -> None:
        """As ``descend``, with moves of the collectives ``among`` one by one only."""

        def moves(labels: Ints) -> Iterator[Move]:
            return (
                m
                for m in self._neighbourhood.local(labels)
                if among[m.of].all() and among[m.to].all()
            )

        improved = True
        while improved and not self._done(stop_at_ticks):
            improved = self._sweep(moves, stop_at_ticks, "moves at the end")

    def _other_forms(self, stop_at_ticks: int) -> bool:
        """Try buckets in their other form, many at once and then one by one."""
        assert self.best is not None
        improved = False
        for mask in flips(
            self.instance.arrays, self.best.labels, self.best.policy, self._neighbourhood.alike
        ):
            if self._done(stop_at_ticks):
                break
            improved |= self._try(
                self.best.labels, flipped(self.best.policy, mask), self.best.steer_bytes
            )
        return improved

    def _other_policies(self) -> bool:
        assert self.best is not None
        improved = False
        for steer in dict.fromkeys((self.best.steer_bytes, None)):
            for policy in like(self.best.policy, policies(self.instance.arrays)):
                improved |= self._try(self.best.labels, policy, steer)
        return improved

    def _sweep(
        self, moves: Callable[[Ints], Iterator[Move]], stop_at_ticks: int, stage: str
    ) -> bool:
        """Try each move of the best once, and keep the moves that help; return whether one did."""
        assert self.best is not None
        improved = False
        for move in moves(self.best.labels):
            if self._done(stop_at_ticks):
                break
            if not self._tried_moves.is_new(move, self.best.labels, self.best.layout):
                continue
            improved |= self._try(
                self._neighbourhood.applied(move, self.best.labels), *self.best.layout
            )
        self.report(stage, self.best.figures.step_time_ticks)
        return improved

    def _try(self, labels: Ints, policy: Policy, steer_bytes: int | None) -> bool:
        """Consider a candidate that has not been tried yet."""
        trial = (labels.tobytes(), policy, steer_bytes)
        if trial in self._tried:
            return False
        self._tried.add(trial)
        return self.consider(self.evaluate(labels, policy, steer_bytes))

    def _wander(self, num_evaluations: int, stop_at_ticks: int) -> None:
        """Take random moves that do not cost more than a threshold, which falls to nothing
        (threshold accepting).
        """
        assert self.best is not None
        current, first = self.best, self.evaluations
        rng = random.Random(_SEED + first)
        highest = self.best.figures.step_time_ticks * _THRESHOLD
        others = policies(self.instance.arrays)
        forms = np.nonzero(self.instance.arrays.coalesces)[0].tolist()
        while (done := self.evaluations - first) < num_evaluations and not self._done(
            stop_at_ticks
        ):
            threshold = highest * (1 - done / num_evaluations) * rng.random() ** 2
            policy, labels = current.policy, current.labels
            if rng.random() < _SHARE_OF_POLICIES:
                policy = replace(others[rng.randrange(len(others))], coalesced=policy.coalesced)
            elif forms and rng.random() < _SHARE_OF_FORMS:
                policy = flipped(policy, labels == labels[rng.choice(forms)])
            else:
                labels = self._neighbourhood.applied(
                    self._neighbourhood.at_random(rng), current.labels
                )
            if labels is current.labels and policy == current.policy:
                continue
            candidate = self.evaluate(labels, policy, current.steer_bytes)
            if (
                candidate is not None
                and candidate.figures.step_time_ticks <= current.figures.step_time_ticks + threshold
            ):
                current = candidate
                self.consider(current)
        self.report("random moves", self.best.figures.step_time_ticks)

    def _done(self, stop_at_ticks: int) -> bool:
        return (
            self.best is None
            or self.best.figures.step_time_ticks <= stop_at_ticks
            or self.evaluations >= self.max_evaluations
        )

    def lower_memory(self, limit_ticks: int) -> None:
        """Find the least peak with a step time of at most ``limit_ticks``: bisect the cap that the
        policies steer by.
        """
        if self.best is None:
            return
        for policy in (self.best.policy, *like(self.best.policy, policies(self.instance.arrays))):
            low, high = 0, self.best.figures.peak_memory_bytes
            for _ in range(_BISECTIONS):
                middle = (low + high) // 2
                candidate = self.evaluate(self.best.labels, policy, middle)
                if candidate is not None and candidate.figures.step_time_ticks <= limit_ticks:
                    if candidate.figures.peak_memory_bytes < self.best.figures.peak_memory_bytes:
                        self.best = candidate
                    high = min(middle, self.best.figures.peak_memory_bytes)
                else:
                    low = middle
        self.report("lower memory", self.best.figures.step_time_ticks)

    def fewer_launches(self, limit_ticks: int) -> None:
        """Join neighbours while the step time stays within ``limit_ticks`` and the peak does not
        rise.
        """
        if self.best is None:
            return
        peak = self.best.figures.peak_memory_bytes
        for move in self._neighbourhood.joins(self.best.labels):
            if self.evaluations >= self.max_evaluations:
                break
            labels = self._neighbourhood.applied(move, self.best.labels)
            candidate = self.evaluate(labels, self.best.policy, self.best.steer_bytes)
            if (
                candidate is not None
                and candidate.figures.step_time_ticks <= limit_ticks
                and candidate.figures.peak_memory_bytes <= peak
            ):
                self.best = candidate
        self.report("fewer launches", self.best.figures.step_time_ticks)


def kept_as_near(candidate: Candidate, caps: Caps) -> Candidate:
    """Return ``candidate``, found under ``caps``, with a policy that gives the same program under
    caps that allow more prefetch.
    """
    if candidate.policy.most_ahead is not None:
        return candidate
    return replace(candidate, policy=replace(candidate.policy, most_ahead=caps.max_prefetch))


def policies(arrays: ProblemArrays) -> tuple[Policy, ...]:
    """Return the portfolio of policies; those that use stalls only where on-path collectives make
    some.
    """
    stalls = (False, True) if bool(arrays.on_path.any()) else (False,)
    leads = tuple(
        Policy(lead=lead, copy_out_early=early, in_stalls=in_stalls)
        for in_stalls in stalls
        for lead in LEADS
        for early in (True, False)
    )
    return (*leads, Policy(lead=0.0, copy_out_early=True, prefetch=False))
