"""Bounds on peak memory and on launches: no schedule is below them, and they are met where the
whole problem is solved.
"""

import random
from dataclasses import replace

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.bounds.memory_and_launches import launches_bound, peak_bound
from apsched.solver.bounds.step_time import memory_bound
from apsched.solver.bounds.tighten import tighten
from tests.helpers.oracle import best_schedule, least_memory
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import random_caps, random_problem

STRICT = SolveOptions(time_slack=0.0, budget=20.0)


def test_the_optimum_of_exhaustive_search_is_not_below() -> None:
    """Among the fastest the least peak, and among those the fewest launches; the bound on launches
    mostly meets them.
    """
    met = higher = total = 0
    for seed in range(150):
        rng = random.Random(seed)
        problem = random_problem(rng, max_collectives=5, max_compute=4)
        caps = random_caps(rng, problem)
        best = best_schedule(problem, caps)
        if best is None:
            continue
        small, within = (
            problem_arrays(problem),
            replace(caps, memory_cap_bytes=best.peak_memory_bytes),
        )
        peak = peak_bound(Instance(problem=problem, arrays=small, caps=caps), best.step_time_ticks)
        launches = launches_bound(
            Instance(problem=problem, arrays=small, caps=within), best.step_time_ticks
        )
        assert peak <= best.peak_memory_bytes, seed
        assert launches <= best.num_launches, seed
        total, met, higher = (
            total + 1,
            met + (launches == best.num_launches),
            higher + (peak > memory_bound(small)),
        )
    assert met >= 0.6 * total
    assert higher >= 3, "a limit on time forces bytes to be in flight"


@pytest.mark.parametrize("seed", range(40))
def test_no_random_schedule_is_below(seed: int) -> None:
    """Each is measured by the bounds for its own step time and peak."""
    problem = random_problem(random.Random(seed), max_collectives=9, max_compute=8)
    small = problem_arrays(problem)
    for order in (
        as_captured(problem.num_nodes),
        *(random_schedule(problem, s) for s in range(15)),
    ):
        if verify(problem, order, Caps()):
            continue  # it moves compute
        timeline = simulate(problem, order)
        assert (
            peak_bound(Instance(problem=problem, arrays=small), timeline.step_time_ticks)
            <= timeline.peak_memory_bytes
        )
        within = Caps(memory_cap_bytes=timeline.peak_memory_bytes)
        assert (
            launches_bound(
                Instance(problem=problem, arrays=small, caps=within), timeline.step_time_ticks
            )
            <= timeline.num_launches
        )


def test_all_three_objectives_are_proven_where_the_whole_problem_is_solved() -> None:
    """Where nothing travels, the small model holds every schedule that ``verify`` accepts."""
    proven = 0
    for seed in range(16):
        rng = random.Random(seed)
        problem = random_problem(rng, max_collectives=5, max_compute=4)
        caps = random_caps(rng, problem)
        result = solve(problem, caps, STRICT)
        if result.best is None:
            continue
        gaps = (result.gap, result.peak_gap, result.launches_gap)
        assert gaps == (0.0, 0.0, 0.0) or problem.travels, (seed, gaps)
        assert min(gaps) >= 0.0, (seed, gaps)
        assert gaps[0] > 0.0 or result.time_limit_ticks == result.best.step_time_ticks, seed
        proven += gaps == (0.0, 0.0, 0.0)
    assert proven >= 5


def four_gathers(holding: int, at_node: int) -> Problem:
    """Four compute nodes of 100 ticks, each with a gather of 4 KiB that takes 10; ``at_node`` makes
    so many bytes beside its result.
    """
    b = ByHand(prices={"all_gather": line(10)})
    x = b.input("x", 512)
    results = []
    for i in range(4):
        shard = b.input(f"s{i}", 2048, kept=True)
        w = b.wait(f"w{i}", b.start("all_gather", f"ag{i}", shard, 2048, 4096))
        results.append(b.compute(f"c{i}", 100, x, w, size=holding if i == at_node else 0))
    return b.output(*results)


def test_memory_forces_launches() -> None:
    """With room for two gathers beside what is needed, all four cannot share a launch; with room
    for one, no two can.
    """
    problem = four_gathers(512, 0)
    small = problem_arrays(problem)
    floor = memory_bound(small)
    bounds = [
        launches_bound(
            Instance(problem=problem, arrays=small, caps=Caps(memory_cap_bytes=floor + room)),
            10_000,
        )
        for room in (3 * 4096, 2 * 4096, 4096, 0)
    ]
    assert bounds == [1, 2, 2, 4]


def test_time_forces_launches() -> None:
    """A transfer of a byte takes a tick in a KiB: one bucket of all would let the first node wait
    for the last gather.
    """
    b = ByHand(prices={"all_gather": line(10, 100)})
    x = b.input("x", 512)
    results = []
    for i in range(4):
        shard = b.input(f"s{i}", 2048, kept=True)
        results.append(
            b.compute(
                f"c{i}",
                1000,
                x,
                b.wait(f"w{i}", b.start("all_gather", f"ag{i}", shard, 2048, 4096)),
                size=512,
            )
        )
    problem = b.output(*results)
    small = problem_arrays(problem)
    assert launches_bound(Instance(problem=problem, arrays=small), 4000 + 10 + 1600) == 1
    assert launches_bound(Instance(problem=problem, arrays=small), 4000 + 10 + 1599) == 2
    assert launches_bound(Instance(problem=problem, arrays=small), 4000 + 410) == 3, (
        "the first alone; behind it there is time for two, not for three"
    )


def test_time_forces_bytes_in_flight() -> None:
    """No wait is possible: the second gather runs beside the first node, and its output is alive
    there.
    """
    problem = four_gathers(512, 0)
    small = problem_arrays(problem)
    assert peak_bound(Instance(problem=problem, arrays=small), 410) == memory_bound(small) + 4096
    assert peak_bound(Instance(problem=problem, arrays=small), 500) == memory_bound(small)


def test_a_gather_that_only_another_gather_reads_is_not_held_to_its_need() -> None:
    """Its output may go as soon as the second one is done: neither the cap nor the limit on time
    keeps it alive at the node before.
    """
    b = ByHand(prices={"all_gather": line(10)})
    x, shard = b.input("x", 512), b.input("s", 512, kept=True)
    first = b.wait("w0", b.start("all_gather", "ag0", shard, 512, 8192, holds_input=False))
    second = b.wait(
        "w1", b.start("all_gather", "ag1", first, 8192, 512, group="second", holds_input=False)
    )
    y = b.compute("y", 5, x, size=16384)
    problem = b.output(b.compute("z", 5, y, second, size=512))
    within = Caps(memory_cap_bytes=least_memory(problem, Caps()))
    best = best_schedule(problem, within)
    assert best is not None
    small = problem_arrays(problem)
    assert (
        peak_bound(Instance(problem=problem, arrays=small, caps=within), best.step_time_ticks)
        <= best.peak_memory_bytes
    )
    assert (
        tighten(Instance(problem=problem, arrays=small, caps=within)).arrays.ready_slot
        == small.ready_slot
    ).all(), "both gathers stand before y, when it is not there yet"


def test_a_launch_that_must_end_early_is_none_that_can_begin_late() -> None:
    """Within 65 ticks the long transfer begins at 15 at the latest, before the input of the other
    is there; at any time later they share a launch.
    """
    b = ByHand(prices={"all_gather": line(0, 10)})
    x, shard = b.input("x", 512), b.input("s", 2048, kept=True)
    long = b.start("all_gather", "long", shard, 2048, 4096)
    for k in range(2):
        x = b.compute(f"k{k}", 10, x, size=512)
    short = b.start("all_gather", "short", x, 512, 512, holds_input=False)
    for k in range(2, 5):
        x = b.compute(f"k{k}", 10, x, size=512)
    last = b.compute("k5", 10, x, b.wait("w0", long), b.wait("w1", short), size=512)
    instance = Instance.of(b.output(last))
    assert [launches_bound(instance, ticks) for ticks in (65, 80)] == [2, 1]


def test_each_link_of_the_longest_chain_is_a_launch() -> None:
    """The last collective waits for two, of which one waits for another."""
    b = ByHand()
    shard = b.input("s", 512, kept=True)
    first = b.wait("w0", b.start("all_gather", "ag0", shard, 512, 1024, group="a"))
    beside = b.wait("w1", b.start("all_gather", "ag1", shard, 512, 1024, group="b"))
    both = b.compute("both", 0, first, beside, size=1024)
    last = b.start("all_gather", "ag2", both, 1024, 2048, group="a", prologue=(both,))
    problem = b.output(b.compute("k", 1, b.wait("w2", last), size=512))
    assert launches_bound(Instance.of(problem), 10_000) == 3


def test_where_no_two_fit_into_a_bucket_all_are_launches_of_their_own() -> None:
    """Four of more than half of the cap each: by their bytes alone three launches would do."""
    problem = four_gathers(512, 0)
    instance = Instance.of(problem, Caps(bucket_cap_bytes=2 * 4096 - 1))
    assert launches_bound(instance, 10_000) == 4
