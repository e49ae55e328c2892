"""Claims of answers hold for all schedules that ``verify`` accepts: about a minute of what
``run_bounds.py`` does for as long as you like.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from tests.helpers.claims import judged, random_case
from tests.helpers.problems.strategies import random_caps, random_problem
from tests.helpers.verify_oracle import TooLargeError, bucketings, find_schedule

FALSE_ONCE = (
    *(2, 1005, 1104, 1140, 1204, 1225, 1228, 1336, 1359, 1368, 1493, 1509, 1520, 2176),
    *(5283, 5515, 5573),
    6037640,
)
"""Cases whose answers claimed too much: of the normal form, of one order of the compute, of
a cap that clashes with one that is lifted.
"""


@pytest.mark.parametrize("seed", FALSE_ONCE)
def test_claims_that_were_false_once_hold(seed: int) -> None:
    result, broken = judged(seed)
    assert broken == [], (result.status, result.bound_ticks, result.bound_source)


@pytest.mark.parametrize("copied", [0.0, 0.9])
@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_claims_hold(first_seed: int, copied: float) -> None:
    """Also where the compute that finishes a reduction reads its gradient."""
    num_judged = 0
    for seed in range(first_seed, first_seed + 20):
        try:
            _, broken = judged(seed, copied=copied)
        except TooLargeError:
            continue
        assert broken == [], seed
        num_judged += 1
    assert num_judged >= 15


def every_schedule(problem: Problem, caps: Caps) -> Iterator[Schedule]:
    """Yield all orders of all buckets; of nodes, those that keep dependences as captured."""
    for buckets in bucketings(problem, caps):
        members = {c for bucket in buckets for c in bucket.members}
        replaced = {problem.collectives[c].start for c in members}
        replaced |= {problem.collectives[c].wait for c in members}
        steps = []
        for b, bucket in enumerate(buckets):
            steps += [Step(StepKind.START, b), Step(StepKind.WAIT, b)]
            if bucket.coalesced:
                continue
            steps.append(Step(StepKind.COPY_IN, b))
            collectives = [problem.collectives[c] for c in bucket.members]
            replaced |= {node for c in collectives for node in c.cast}
            if problem.keys[collectives[0].key].kind == "all_gather":
                steps += [Step(StepKind.COPY_OUT, c) for c in bucket.members]
        nodes = [node for node in range(problem.num_nodes) if node not in replaced]
        steps += [Step(StepKind.NODE, node) for node in nodes]
        for order in _orders(problem, steps, frozenset(nodes), ()):
            yield Schedule(buckets=buckets, steps=order)


def _orders(
    problem: Problem, left: list[Step], nodes: frozenset[int], order: tuple[Step, ...]
) -> Iterator[tuple[Step, ...]]:
    if not left:
        yield order
    waiting = {step.index for step in left if step.kind is StepKind.NODE}
    for step in left:
        before = problem.predecessors[step.index] if step.kind is StepKind.NODE else ()
        if not waiting.intersection(before):
            yield from _orders(problem, [s for s in left if s != step], nodes, (*order, step))


def test_the_oracle_finds_what_all_permutations_have() -> None:
    """Least time under the caps, and least peak: on problems of so few steps that all orders can
    be simulated.
    """
    num_tried = 0
    for seed in range(400):
        rng = random.Random(seed)
        problem = random_problem(rng, max_collectives=2, max_compute=2)
        if problem.num_nodes > 9:
            continue
        caps = replace(random_caps(rng, problem), max_compute_move=rng.choice((0, 1, None)))
        fitting = [
            simulate(problem, schedule)
            for schedule in every_schedule(problem, caps)
            if not verify(problem, schedule, caps)
        ]
        least = min((t.step_time_ticks for t in fitting), default=None)
        if least is None:
            assert find_schedule(problem, caps) is None, seed
            continue
        assert find_schedule(problem, caps, limit_ticks=least) is not None, seed
        assert find_schedule(problem, caps, limit_ticks=least - 1) is None, seed
        peak = min(t.peak_memory_bytes for t in fitting)
        assert find_schedule(problem, replace(caps, memory_cap_bytes=peak)) is not None, seed
        assert find_schedule(problem, replace(caps, memory_cap_bytes=peak - 1)) is None, seed
        num_tried += 1
        if num_tried == 40:
            return
    pytest.fail(f"only {num_tried} problems are small enough")


def test_the_cases_have_what_they_are_for() -> None:
    """Prologues, casts, epilogues, kernels with cuts, plans, forms, and every cap on moves."""
    cases = [random_case(seed) for seed in range(200)]
    problems = [problem for problem, _ in cases]
    collectives = [c for problem in problems for c in problem.collectives]
    for some in (
        [c for c in collectives if c.prologue],
        [c for c in collectives if c.cast and c.may_share],
        [c for c in collectives if c.epilogue],
        [c for c in collectives if c.on_path],
        [problem for problem in problems if problem.cuts],
        [problem for problem in problems if problem.rules],
        [p for p in problems if any(k.coalesced_member_ticks is not None for k in p.keys)],
        [caps for _, caps in cases if caps.in_flight_cap_bytes is not None],
        [caps for _, caps in cases if caps.max_prefetch is not None],
    ):
        assert len(some) >= 15
    assert {caps.max_compute_move for _, caps in cases} == {0, 1, 2, 200, None}
    copied = [random_case(seed, copied=0.9)[0] for seed in range(200)]
    assert sum(map(_finishes_into_its_input, copied)) >= 15
    assert not any(map(_finishes_into_its_input, problems))


def _finishes_into_its_input(problem: Problem) -> bool:
    """Whether an epilogue reads the input of its reduction."""
    return any(
        set(c.epilogue) & set(problem.storages[c.input_storage].uses) for c in problem.collectives
    )
