"""The solver's answer equals exhaustive search on small random problems.

A few dozen here; ``APSCHED_BRUTE_FORCE=3000 pytest tests/solver/test_against_brute_force.py`` for
as many seeds of each.
"""

import os
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import SolveResult
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import solve
from tests.helpers.oracle import best_schedule, least_memory
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import a_problem_with_caps, random_caps, random_problem

NUM_SEEDS = int(os.environ.get("APSCHED_BRUTE_FORCE", "0"))
STRICT = SolveOptions(time_slack=0.0, budget=20.0)


def seeds(few: int) -> range:
    """Return ``few`` seeds, or as many as asked for."""
    return range(NUM_SEEDS or few)


def case(seed: int, *, max_collectives: int = 4, max_compute: int = 4) -> tuple[Problem, Caps]:
    """Return a problem and caps; every third has a memory cap at, just under or just above the
    least that is possible.
    """
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=max_collectives, max_compute=max_compute)
    caps = random_caps(rng, problem)
    if seed % 3 == 0:
        floor = least_memory(problem, caps)
        if floor is not None:
            caps = replace(
                caps, memory_cap_bytes=max(0, floor + rng.choice((-1, 0, 0, 512, 1024, 4096)))
            )
    return problem, caps


def assert_optimal(problem: Problem, caps: Caps, result: SolveResult) -> None:
    best = best_schedule(problem, caps)
    if best is None:
        assert result.status == "infeasible"
        assert result.best is None
        assert result.infeasibility is not None
        return
    assert result.best is not None
    assert verify(problem, result.best.schedule, caps) == ()
    timeline = simulate(problem, result.best.schedule)
    claimed = (result.best.step_time_ticks, result.best.peak_memory_bytes, result.best.num_launches)
    assert claimed == (timeline.step_time_ticks, timeline.peak_memory_bytes, timeline.num_launches)
    assert result.bound_ticks <= best.step_time_ticks
    assert claimed == best.value
    assert (result.status == "optimal") == (result.bound_ticks == best.step_time_ticks)
    if not problem.travels:  # the search above is of the normal form
        assert result.status == "optimal"
        assert result.bound_ticks == best.step_time_ticks


@pytest.mark.parametrize("seed", seeds(80))
def test_the_optimum_is_that_of_exhaustive_search(seed: int) -> None:
    """Step time, then peak, then launches; a bound that meets it; infeasible exactly where nothing
    keeps the caps.
    """
    problem, caps = case(seed)
    assert_optimal(problem, caps, solve(problem, caps, STRICT))


@pytest.mark.parametrize("seed", seeds(4))
def test_the_optimum_is_that_of_exhaustive_search_with_up_to_eight_collectives(seed: int) -> None:
    """Few compute nodes, so that exhaustive search still ends."""
    problem, caps = case(seed, max_collectives=8, max_compute=3)
    assert_optimal(problem, caps, solve(problem, caps, STRICT))


@given(a_problem_with_caps(max_collectives=8, max_compute=3))
@settings(max_examples=NUM_SEEDS or 20, derandomize=True)
def test_the_optimum_is_that_of_exhaustive_search_on_what_hypothesis_finds(
    given_: tuple[Problem, Caps],
) -> None:
    """The same, with failures shrunk to the smallest problem."""
    assert_optimal(*given_, solve(*given_, STRICT))


@pytest.mark.parametrize("seed", seeds(20))
def test_the_floor_is_the_least_memory_of_any_schedule(seed: int) -> None:
    problem, caps = case(seed)
    floor = least_memory(problem, caps)
    result = solve(problem, caps, STRICT)
    if floor is None:
        assert result.status == "infeasible"
    else:
        assert result.floor_bound_bytes <= floor
        assert result.floor_memory_bytes == floor


@pytest.mark.parametrize("seed", seeds(15))
def test_a_looser_cap_is_never_slower(seed: int) -> None:
    """Each cap lifted in turn, and memory by some."""
    problem, caps = case(seed, max_collectives=5)
    tight = solve(problem, caps, STRICT)
    if tight.best is None:
        return
    looser = [
        replace(caps, **{name: None})
        for name in Caps.__dataclass_fields__
        if getattr(caps, name) is not None
    ]
    if caps.memory_cap_bytes is not None:
        looser.append(replace(caps, memory_cap_bytes=caps.memory_cap_bytes + 1024))
    for loose_caps in looser:
        loose = solve(problem, loose_caps, STRICT)
        assert loose.best is not None
        assert loose.best.step_time_ticks <= tight.best.step_time_ticks


@pytest.mark.parametrize("seed", seeds(15))
def test_never_slower_than_a_baseline_that_fits(seed: int) -> None:
    """Also with slack for memory, and where no search is allowed."""
    problem, caps = case(seed, max_collectives=7, max_compute=6)
    for options in (SolveOptions(budget=0.0), SolveOptions(time_slack=0.5, budget=1.0)):
        result = solve(problem, caps, options)
        fitting = [b for b in result.baselines if not verify(problem, b.schedule, caps)]
        assert [b.name for b in result.baselines if b.fits] == [b.name for b in fitting]
        assert {"as_captured", "transformer_block", "greedy_bytes", "greedy_bytes_span"} <= {
            b.name for b in result.baselines
        }
        if fitting:
            assert result.best is not None
            assert verify(problem, result.best.schedule, caps) == ()
            assert result.best.step_time_ticks <= min(b.step_time_ticks for b in fitting)
            assert result.bound_ticks <= result.best.step_time_ticks


@pytest.mark.parametrize("seed", range(25))
def test_no_random_schedule_beats_the_exhaustive_search(seed: int) -> None:
    """A check of the search itself: what it calls the least memory and the best figures, random
    legal orders do not beat.
    """
    problem = random_problem(random.Random(seed), max_collectives=4, max_compute=4)
    best, floor = best_schedule(problem, Caps()), least_memory(problem, Caps())
    assert best is not None
    assert floor is not None
    orders = [as_captured(problem.num_nodes), *(random_schedule(problem, s) for s in range(60))]
    for order in orders:
        if verify(problem, order, Caps()):
            continue  # it moves compute
        timeline = simulate(problem, order)
        assert timeline.peak_memory_bytes >= floor
        finishing = sum(
            problem.duration_ticks[node] for node in problem.travels
        )  # what random orders may place better
        assert timeline.step_time_ticks >= best.step_time_ticks - finishing


def test_a_cap_on_prefetch_reaches_through_a_gather_that_another_takes_further() -> None:
    """What the second gather brings is needed by the second compute node, and so is what the first
    one brings.
    """
    hand = ByHand(prices={"all_gather": line(10)})
    x, shard = hand.input("x", 1024), hand.input("shard", 1024, kept=True)
    first = hand.wait("w1", hand.start("all_gather", "ag1", shard, 1024, 2048))
    second = hand.wait("w2", hand.start("all_gather", "ag2", first, 2048, 4096, group="tp"))
    a = hand.compute("a", 50, x, size=512)
    problem, caps = hand.output(hand.compute("b", 5, a, second, size=512)), Caps(max_prefetch=0)
    assert_optimal(problem, caps, solve(problem, caps, STRICT))
    assert best_schedule(problem, Caps()) != best_schedule(problem, caps)
