"""No bound lies above what a schedule reaches, also where prices are no straight lines."""

import random

import pytest

from apsched.config import Caps, SolveOptions
from apsched.costs.price_curve import PriceCurve
from apsched.problem.problem import Problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.bounds.linear_program import lp_bound
from apsched.solver.bounds.step_time import memory_bound, step_time_bound
from apsched.solver.bounds.tighten import tighten
from tests.helpers.oracle import best_schedule, least_memory
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.strategies import random_caps, random_problem


def assert_holds(problem: Problem) -> None:
    result = solve(problem, Caps(), SolveOptions(time_slack=0.0))
    assert result.best is not None
    assert step_time_bound(Instance.of(problem)).ticks <= result.best.step_time_ticks


def test_copies_that_cost_the_same_up_to_some_size() -> None:
    """max(latency, bytes / bandwidth): the first bytes are free, so the latency must not be counted
    beside them.
    """
    b = ByHand(
        prices={"reduce_scatter": line(1)},
        copy_price=PriceCurve(size_bytes=(0, 10240, 20480), price_ticks=(1000, 1000, 101000)),
        bucket_launch_ticks=1,
    )
    x = b.input("x", 1024)
    grads = [b.compute(f"g{i}", 10, x, size=5120) for i in range(2)]
    starts = [
        b.start("reduce_scatter", f"rs{i}", g, 5120, 2560, launch_ticks=1500)
        for i, g in enumerate(grads)
    ]
    assert_holds(b.output(*(b.wait(f"w{i}", s) for i, s in enumerate(starts))))


def test_copy_outs_for_outputs_run_beside_the_last_reduction() -> None:
    """Gathers that only outputs need: their copies are no work before the last launch."""
    b = ByHand(
        prices={"reduce_scatter": line(500), "all_gather": line(0, 100)}, copy_price=line(0, 100)
    )
    shards = [b.input(f"s{i}", 16, kept=True) for i in range(2)]
    x = b.input("x", 1024)
    starts = [
        b.start("all_gather", f"ag{i}", s, 16, 1024, launch_ticks=1000)
        for i, s in enumerate(shards)
    ]
    waits = [b.wait(f"w{i}", s) for i, s in enumerate(starts)]
    g = b.compute("g", 1000, x, size=5120)
    assert_holds(b.output(*waits, b.wait("w", b.start("reduce_scatter", "rs", g, 5120, 2560))))


def test_an_input_that_is_not_held_may_go_before_the_wait() -> None:
    """The memory cap forces no wait where the reduction does not hold its input."""
    b = ByHand(prices={"reduce_scatter": line(1000)})
    x = b.input("x", 512)
    g = b.compute("g", 10, x, size=64 * 1024)
    w = b.wait("w", b.start("reduce_scatter", "rs", g, 64 * 1024, 1024, holds_input=False))
    problem, caps = (
        b.output(w, b.compute("h", 500, x, size=64 * 1024)),
        Caps(memory_cap_bytes=100 * 1024),
    )
    result = solve(problem, caps, SolveOptions(time_slack=0.0))
    assert result.best is not None
    assert (
        step_time_bound(tighten(Instance.of(problem, caps))).ticks
        <= result.best.step_time_ticks
        == 1010
    )


def test_the_launch_of_an_on_path_collective_takes_time_before_its_transfer() -> None:
    """Nothing else can run then, so that the bound is the optimum."""
    b = ByHand(prices={"all_reduce": line(200)}, bucket_launch_ticks=7)
    x = b.input("x", 512)
    for i in range(3):
        x = b.compute(f"f{i}", 100, x, size=512)
        x = b.wait(
            f"w{i}", b.start("all_reduce", f"ar{i}", x, 512, 512, launch_ticks=7, on_path=True)
        )
    problem = b.output(b.compute("last", 100, x, size=512))
    result = solve(problem, Caps(), SolveOptions(time_slack=0.0))
    assert result.best is not None
    assert (
        step_time_bound(Instance.of(problem)).ticks
        == result.best.step_time_ticks
        == 4 * 100 + 3 * 207
    )


def test_a_price_that_is_rounded_up_is_no_rate() -> None:
    """Ten bytes take a tick and eleven take two, in whole ticks: of 110 bytes in buckets of up to
    eleven the first say 11 ticks, the last 20.
    """
    b = ByHand(prices={"all_gather": PriceCurve(size_bytes=(0, 100), price_ticks=(0, 10))})
    shards = [b.input(f"s{i}", 5, kept=True) for i in range(11)]
    starts = [b.start("all_gather", f"ag{i}", s, 5, 10) for i, s in enumerate(shards)]
    waits = [b.wait(f"w{i}", s) for i, s in enumerate(starts)]
    problem, caps = b.output(b.compute("last", 1, *waits)), Caps(bucket_cap_bytes=11)
    captured = simulate(problem, as_captured(problem.num_nodes))
    assert captured.step_time_ticks == 11 + 1
    instance = Instance.of(problem, caps)
    assert step_time_bound(instance).ticks <= captured.step_time_ticks
    assert lp_bound(instance).ticks <= captured.step_time_ticks


@pytest.mark.parametrize("chunk", range(7))
def test_no_bound_is_above_the_optimum_of_exhaustive_search(chunk: int) -> None:
    """700 problems: each bound on time, what the memory cap forces included, and the one on memory;
    a few of them meet the optimum.
    """
    met = 0
    for seed in range(chunk * 100, (chunk + 1) * 100):
        rng = random.Random(seed)
        problem = random_problem(rng, max_collectives=5, max_compute=4)
        caps = random_caps(rng, problem)
        if (best := best_schedule(problem, caps)) is None:
            continue
        small = problem_arrays(problem)
        forced = tighten(Instance(problem=problem, arrays=small, caps=caps)).arrays
        bounds = [
            step_time_bound(Instance(problem=problem, arrays=small, caps=caps)),
            step_time_bound(Instance(problem=problem, arrays=forced, caps=caps)),
            lp_bound(Instance(problem=problem, arrays=forced, caps=caps)),
        ]
        assert max(bound.ticks for bound in bounds) <= best.step_time_ticks, (seed, bounds)
        met += max(bound.ticks for bound in bounds) == best.step_time_ticks
        least = least_memory(problem, caps)
        assert least is not None
        assert memory_bound(small) <= least, seed
    assert met >= 10
