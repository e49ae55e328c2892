"""Late waits cost nothing in the model, and keep what a schedule gains where the model is wrong."""

import random

import numpy as np
import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.verify import verify
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.program.evaluate import evaluate, trace
from apsched.solver.program.program import COPY_IN, LAUNCH, NODE, START, WAIT, Program
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.late_waits import late_waits
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.random_programs import random_program
from tests.helpers.problems.strategies import layered_problem, random_problem

KIB = 1024


def fixed_part(program: Program) -> list[tuple[int, int]]:
    """Return what late waits leave in its order: compute and launches."""
    kept = np.isin(program.operation, (NODE, LAUNCH, COPY_IN, START))
    return list(zip(program.operation[kept].tolist(), program.argument[kept].tolist(), strict=True))


def check(problem: Problem, seeds: range) -> int:
    """Compare random programs of ``problem`` with what becomes of them; return how many changed."""
    small, changed = problem_arrays(problem), 0
    pricer = Pricer(Instance(problem=problem, arrays=small))
    for seed in seeds:
        before = random_program(pricer, seed)
        was = evaluate(small, before)
        caps = Caps(
            memory_cap_bytes=was.peak_memory_bytes,
            in_flight_cap_bytes=was.peak_in_flight_bytes if seed % 2 else None,
        )
        after = late_waits(Instance(problem=problem, arrays=small, caps=caps), before)
        now = evaluate(small, after)
        assert verify(problem, expand(Instance(problem=problem, arrays=small), after), caps) == ()
        assert fixed_part(after) == fixed_part(before)
        assert now.step_time_ticks <= was.step_time_ticks
        assert now.peak_memory_bytes <= was.peak_memory_bytes
        changed += after is not before
    return changed


@pytest.mark.parametrize("chunk", range(2))
def test_they_cost_nothing_and_keep_every_dependence(chunk: int) -> None:
    small = sum(
        check(
            random_problem(random.Random(seed), max_collectives=8, max_compute=6),
            range(seed, seed + 2),
        )
        for seed in _seeds(chunk)
    )
    layered = sum(
        check(layered_problem(random.Random(seed), num_layers=2 + seed % 6), range(seed, seed + 2))
        for seed in _seeds(chunk)[:8]
    )
    assert small > 12  # of 120
    assert layered > 4  # of 16


def _seeds(chunk: int) -> range:
    return range(60 * chunk, 60 * chunk + 60)


def gradients(*, room: bool) -> Problem:
    """Two gradients of 8 KiB, each reduced in 10 us behind compute of 20 us; an activation of 16
    KiB at the end, if there is no room.
    """
    b = ByHand(
        prices={"reduce_scatter": line(10_000)}, copy_price=line(2_000), bucket_launch_ticks=1_000
    )
    x = b.input("x", 512)
    y = b.compute("y", 20_000, x, size=8 * KIB)
    g = b.wait("g", b.start("reduce_scatter", "rs_y", y, 8 * KIB, KIB, launch_ticks=1_000))
    middle = b.compute("middle", 20_000, x, size=512)
    other = b.compute("other", 20_000, middle, size=512)
    big = b.compute("big", 20_000, other, size=512 if room else 16 * KIB)
    end = b.compute("end", 20_000, big, size=512)
    return b.output(g, end)


def program_of(problem: Problem, *, wait_before: int) -> Program:
    """Return the program that launches at once and waits before that compute node."""
    compute_order = [(NODE, k) for k in range(len(problem.compute_order))]
    table = [
        *compute_order[:1],
        (LAUNCH, 0),
        *compute_order[1:wait_before],
        (WAIT, 0),
        *compute_order[wait_before:],
    ]
    partition = Pricer(Instance.of(problem)).partition([(0,)])
    operation, argument = np.array(table, dtype=np.int64).T
    return Program(partition=partition, operation=operation.copy(), argument=argument.copy())


def wait_of(program: Program) -> int:
    """Return the compute nodes before the wait."""
    at = int(np.nonzero(program.operation == WAIT)[0][0])
    return int((program.operation[:at] == NODE).sum())


def test_a_wait_goes_as_far_as_memory_allows() -> None:
    """With room to the end; where a large activation comes, to right before it."""
    for room, expected in ((True, 5), (False, 3)):
        problem = gradients(room=room)
        small = problem_arrays(problem)
        before = program_of(problem, wait_before=2)
        assert trace(small, before).transfer_end_ticks[0] <= 41_000
        after = late_waits(Instance(problem=problem, arrays=small), before)
        assert wait_of(after) == expected, room
        assert evaluate(small, after).peak_memory_bytes == evaluate(small, before).peak_memory_bytes


def test_bytes_that_were_freed_before_a_wait_do_not_hold_it_back() -> None:
    """A gradient of 64 KiB, whose reduction the third node needs, is the peak. The wait for another
    of 8 KiB may stand at the end, since by then those 64 KiB are free.
    """
    b = ByHand(prices={"reduce_scatter": line(10_000)})
    large = b.compute("large", 20_000, b.input("x", 512), size=64 * KIB)
    soon = b.wait("soon", b.start("reduce_scatter", "rs_large", large, 64 * KIB, KIB))
    y = b.compute("y", 20_000, b.input("z", 512), size=8 * KIB)
    g = b.wait("g", b.start("reduce_scatter", "rs_y", y, 8 * KIB, KIB))
    at = b.compute("c2", 20_000, soon, size=512)
    for k in range(3, 6):
        at = b.compute(f"c{k}", 20_000, at, size=512)
    problem = b.output(g, at)
    small = problem_arrays(problem)
    partition = Pricer(Instance.of(problem)).partition([(0,), (1,)])
    table = [
        *((NODE, 0), (LAUNCH, 0), (NODE, 1), (LAUNCH, 1), (WAIT, 0), (NODE, 2), (NODE, 3)),
        *((WAIT, 1), (NODE, 4), (NODE, 5)),
    ]
    operation, argument = np.array(table, dtype=np.int64).T
    before = Program(partition=partition, operation=operation.copy(), argument=argument.copy())
    after = late_waits(Instance(problem=problem, arrays=small), before)
    assert (after.operation[-1], after.argument[-1]) == (WAIT, 1)


def test_a_wait_goes_up_to_the_launch_that_needs_it() -> None:
    """A reduction, and an all-reduce of its result that is launched before the fifth node: the wait
    goes from before the third node to before the fourth, the last place with no launch before it.
    """
    b = ByHand(prices={"reduce_scatter": line(10_000), "all_reduce": line(10_000)})
    at = y = b.compute("y", 20_000, b.input("x", 512), size=8 * KIB)
    g = b.wait("g", b.start("reduce_scatter", "rs_y", y, 8 * KIB, KIB))
    r = b.wait("r", b.start("all_reduce", "ar_y", g, KIB, KIB, group="replicate"))
    for k in range(1, 6):
        at = b.compute(f"c{k}", 20_000, at, size=512)
    big = b.compute("big", 20_000, at, size=64 * KIB)
    problem = b.output(r, big)
    small = problem_arrays(problem)
    partition = Pricer(Instance.of(problem)).partition([(0,), (1,)])
    table = [
        *((NODE, 0), (LAUNCH, 0), (NODE, 1), (WAIT, 0), (NODE, 2), (NODE, 3), (LAUNCH, 1)),
        *((NODE, 4), (NODE, 5), (NODE, 6), (WAIT, 1)),
    ]
    operation, argument = np.array(table, dtype=np.int64).T
    before = Program(partition=partition, operation=operation.copy(), argument=argument.copy())
    assert wait_of(late_waits(Instance(problem=problem, arrays=small), before)) == 3


def test_a_wait_that_is_due_stays() -> None:
    problem = gradients(room=False)
    small = problem_arrays(problem)
    before = program_of(problem, wait_before=3)
    assert late_waits(Instance(problem=problem, arrays=small), before) is before


def test_without_collectives_there_is_nothing_to_do() -> None:
    b = ByHand()
    problem = b.output(b.compute("y", 1_000, b.input("x", 512), size=512))
    small = problem_arrays(problem)
    program = Program(
        partition=Pricer(Instance(problem=problem, arrays=small)).partition([]),
        operation=np.array([NODE], dtype=np.int64),
        argument=np.array([0], dtype=np.int64),
    )
    assert late_waits(Instance(problem=problem, arrays=small), program) is program
