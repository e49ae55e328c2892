"""One semantics: the compiled evaluator and ``simulate`` agree to the tick and to the byte, on
orders that no policy would make.
"""

import random

import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.program.evaluate import evaluate, trace
from apsched.solver.program.program import COPY_IN
from apsched.solver.program.to_schedule import expand
from tests.helpers.problems.random_programs import random_program
from tests.helpers.problems.strategies import layered_problem, random_problem, with_coalesced_price

CHUNK = 250
"""Problems of one test."""


def assert_one_semantics(problem: Problem, seeds: range) -> int:
    """Compare random programs of ``problem``; return how many had a copy-in apart from its
    start.
    """
    small = problem_arrays(problem)
    pricer, apart = Pricer(Instance(problem=problem, arrays=small)), 0
    for seed in seeds:
        program = random_program(pricer, seed)
        schedule = expand(Instance(problem=problem, arrays=small), program)
        assert verify(problem, schedule, Caps()) == ()
        timeline, figures = simulate(problem, schedule), evaluate(small, program)
        assert figures.step_time_ticks == timeline.step_time_ticks
        assert figures.peak_memory_bytes == timeline.peak_memory_bytes
        assert figures.peak_in_flight_bytes == timeline.peak_in_flight_bytes
        assert figures.num_launches == timeline.num_launches
        live = (
            trace(small, program).live_bytes[1:] + small.kept_bytes
        )  # without the inputs, of which there may be none
        assert set(live.tolist()) <= set(timeline.live_bytes)
        apart += bool((program.operation == COPY_IN).any())
    return apart


@pytest.mark.parametrize("chunk", range(6))
def test_small_problems_of_every_sort(chunk: int) -> None:
    """Two programs of each of 1,500 problems."""
    apart = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        apart += assert_one_semantics(
            random_problem(
                random.Random(seed), max_collectives=8, max_compute=6, copied=seed % 2 * 0.9
            ),
            range(seed, seed + 2),
        )
    assert apart > CHUNK / 10  # buckets whose copy-in stands apart are among them


def test_buckets_of_either_form() -> None:
    coalesced = 0
    for seed in range(CHUNK):
        rng = random.Random(seed)
        problem = with_coalesced_price(random_problem(rng, max_collectives=8, max_compute=6), rng)
        assert_one_semantics(problem, range(seed, seed + 2))
        coalesced += bool(
            random_program(Pricer(Instance.of(problem)), seed).partition.coalesced.any()
        )
    for seed in range(20):
        rng = random.Random(seed)
        assert_one_semantics(
            with_coalesced_price(layered_problem(rng, num_layers=2 + seed % 9), rng),
            range(seed, seed + 2),
        )
    assert coalesced > CHUNK / 10


@pytest.mark.parametrize("chunk", range(3))
def test_layered_problems(chunk: int) -> None:
    """Dozens of collectives on several streams, buckets of up to six."""
    for seed in range(chunk * 20, (chunk + 1) * 20):
        assert_one_semantics(
            layered_problem(random.Random(seed), num_layers=2 + seed % 9), range(seed, seed + 2)
        )
