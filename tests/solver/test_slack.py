"""The answer takes at most the time slack longer than the fastest schedule of the whole solve, and
its limit is that slack: also where search finds a faster schedule on its way to less memory.
"""

import random
import sys
from dataclasses import replace

import pytest

from apsched.config import DEFAULT_COMPUTE_MOVE, Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import SolveResult, Status
from apsched.solver import solve, solve_requested
from apsched.solver.answer import slack_limit
from apsched.solver.arrays.instance import Instance
from apsched.solver.program.evaluate import evaluate
from apsched.solver.search.local_search import Search
from tests.helpers.problems.chains import random_chains
from tests.helpers.problems.strategies import layered_problem, random_caps, random_problem
from tests.workers.graphs import digest_worker


@pytest.fixture
def by_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """No problem is small."""
    module, name = digest_worker.LIMIT
    monkeypatch.setattr(sys.modules[module], name, -1)


def within(result: SolveResult, options: SolveOptions) -> bool:
    """Check the limit of an answer; return whether there is one."""
    if result.best is None:
        return False
    limit = slack_limit(result.fastest_ticks, options, result.baselines)
    assert result.fastest_ticks <= result.best.step_time_ticks <= limit
    assert result.time_limit_ticks == limit
    return True


def caps_around_the_fastest(problem: Problem, caps: Caps, options: SolveOptions) -> list[Caps]:
    """Return ``caps`` without a cap on memory and with some near the peak of the fastest."""
    free = solve(problem, replace(caps, memory_cap_bytes=None), options)
    assert free.best is not None
    peak = max(p.peak_memory_bytes for p in (free.best, *free.trade_offs[-1:]))
    few = [replace(caps, memory_cap_bytes=int(peak * share)) for share in (0.97, 1.0, 1.02)]
    return [replace(caps, memory_cap_bytes=None), *few]


@pytest.mark.usefixtures("by_search")
@pytest.mark.parametrize(
    ("layers", "seed", "move"),
    [
        *((3, 9, 0), (3, 13, 0), (3, 23, 0), (5, 7, 0), (5, 12, 0)),
        *((3, 9, DEFAULT_COMPUTE_MOVE), (3, 23, DEFAULT_COMPUTE_MOVE)),
    ],
)
def test_the_answer_of_the_search_is_within_the_slack_of_the_fastest(
    layers: int, seed: int, move: int
) -> None:
    """In most of these graphs the search for less memory finds a faster schedule; under a loose cap
    the fastest of (3, 23) and (5, 12) was found without a cap.
    """
    problem = layered_problem(random.Random(seed), num_layers=layers)
    for caps in caps_around_the_fastest(
        problem, Caps(max_compute_move=move), SolveOptions(budget=0.1)
    ):
        for budget, slack in ((0.1, 0.001), (0.1, 0.03)):
            options = SolveOptions(budget=budget, time_slack=slack)
            assert within(solve(problem, caps, options), options) or caps.memory_cap_bytes


@pytest.mark.parametrize("seed", range(10))
def test_the_answer_of_a_small_problem_is_within_the_slack_of_the_fastest(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=4, max_compute=6)
    caps = random_caps(rng, problem)
    for budget, slack in ((0.0, 0.03), (0.01, 0.001), (0.1, 0.03)):
        options = SolveOptions(budget=budget, time_slack=slack)
        found = solve_requested(problem, caps, options)
        assert within(found, options) or found.status == Status.INFEASIBLE


@pytest.mark.parametrize("seed", range(3))
def test_the_answer_of_merged_chains_is_within_the_slack_of_the_fastest(seed: int) -> None:
    """Also solved again from a start, with no work."""
    problem = random_chains(random.Random(seed), num_stages=3)
    options = SolveOptions(budget=0.02, time_slack=0.05)
    found = solve_requested(problem, Caps(max_compute_move=None), options)
    assert within(found, options)
    assert found.best is not None
    less = replace(options, budget=0.0)
    again = solve_requested(problem, Caps(max_compute_move=None), less, start=found.best.schedule)
    assert within(again, less)


@pytest.mark.parametrize("seed", range(6))
def test_a_candidate_that_no_cap_on_memory_steered_is_laid_out_as_it_was_judged(seed: int) -> None:
    """Whatever cap the search has that lays it out: the program is the one that was evaluated."""
    problem = layered_problem(random.Random(seed), num_layers=4)
    free = Search(
        instance=Instance.of(problem, Caps(max_compute_move=0)),
        report=lambda *_: None,
        max_evaluations=200,
        floor_bytes=0,
    )
    free.portfolio()
    assert free.best is not None
    for found in free.front:
        cap = found.candidate.figures.peak_memory_bytes
        capped = free.within(replace(free.instance.caps, memory_cap_bytes=cap), 1)
        capped.consider(found.candidate)
        assert evaluate(capped.instance.arrays, capped.program()) == found.candidate.figures
