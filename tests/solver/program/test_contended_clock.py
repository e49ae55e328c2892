"""One semantics under contention, too: the compiled clock and ``simulate`` agree to the tick; and
nobody gets faster by it.
"""

import random

import numpy as np
import pytest

from apsched.config import Caps
from apsched.problem.contention import Contention
from apsched.problem.problem import Problem, with_contention
from apsched.schedule.simulate import simulate
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.program.evaluate import evaluate, trace
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.decoder import Decoder
from apsched.solver.search.local_search import policies
from tests.helpers.problems.contended import contended
from tests.helpers.problems.random_programs import random_program
from tests.helpers.problems.strategies import layered_problem, random_problem, with_coalesced_price


def assert_one_semantics(problem: Problem, seed: int) -> bool:
    """Compare a random program of ``problem``; return whether contention made it slower."""
    small = problem_arrays(problem)
    program = random_program(Pricer(Instance(problem=problem, arrays=small)), seed)
    schedule = expand(Instance(problem=problem, arrays=small), program)
    timeline, figures, where = (
        simulate(problem, schedule),
        evaluate(small, program),
        trace(small, program),
    )
    assert figures.step_time_ticks == timeline.step_time_ticks
    assert figures.peak_memory_bytes == timeline.peak_memory_bytes
    ends = {frozenset(transfer.members): transfer.end_ticks for transfer in timeline.transfers}
    found = zip(program.partition.buckets, where.transfer_end_ticks.tolist(), strict=True)
    assert {frozenset(members): end for members, end in found} == ends
    free = simulate(with_contention(problem, None), schedule)
    pairs = [*zip(timeline.end_ticks, free.end_ticks, strict=True)]
    pairs += [
        (t.end_ticks, f.end_ticks) for t, f in zip(timeline.transfers, free.transfers, strict=True)
    ]
    assert all(slowed >= alone for slowed, alone in pairs)
    assert (timeline.live_bytes, timeline.in_flight_bytes) == (
        free.live_bytes,
        free.in_flight_bytes,
    )
    return timeline.step_time_ticks > free.step_time_ticks


@pytest.mark.parametrize("chunk", range(2))
def test_small_problems(chunk: int) -> None:
    slower = 0
    for seed in range(chunk * 300, (chunk + 1) * 300):
        slower += assert_one_semantics(
            contended(random_problem(random.Random(seed), max_collectives=8, max_compute=6), seed),
            seed,
        )
    assert slower > 40


def test_layered_problems() -> None:
    """Half of them with buckets of either form."""
    problems = [
        contended(layered_problem(random.Random(seed), num_layers=2 + seed % 9), seed)
        for seed in range(40)
    ]
    problems[20:] = [
        with_coalesced_price(problem, random.Random(seed))
        for seed, problem in enumerate(problems[20:])
    ]
    assert sum(assert_one_semantics(problem, seed) for seed, problem in enumerate(problems)) > 20


def test_what_search_judges_is_what_its_program_takes() -> None:
    for seed in range(20):
        problem = contended(layered_problem(random.Random(seed), num_layers=3), seed)
        small = problem_arrays(problem)
        decoder = Decoder(Pricer(Instance(problem=problem, arrays=small)), Caps())
        labels = np.arange(len(problem.collectives))
        for policy in policies(small)[:4]:
            figures = decoder.figures(labels, policy, None)
            assert figures is not None
            schedule = expand(
                Instance(problem=problem, arrays=small), decoder.program(labels, policy, None)
            )
            assert figures.step_time_ticks == simulate(problem, schedule).step_time_ticks


def test_no_contention_is_the_machine_without_it() -> None:
    """Links that nobody shares, and compute that nothing slows, leave every time as it is."""
    for seed in range(50):
        problem = random_problem(random.Random(seed), max_collectives=8, max_compute=6)
        idle = Contention(
            links=tuple(problem.streams),
            links_of_group=tuple((group, (k,)) for k, group in enumerate(problem.streams)),
        )
        program = random_program(Pricer(Instance.of(problem)), seed)
        schedule = expand(Instance.of(problem), program)
        assert simulate(with_contention(problem, idle), schedule) == simulate(problem, schedule)
