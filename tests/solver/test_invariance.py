"""The optimum does not depend on how a problem is written down: on numbers and names, on the unit
of time, on the unit of bytes.
"""

import random
from dataclasses import replace

import pytest

from apsched.config import SolveOptions
from apsched.schedule.result import SolveResult
from apsched.solver import solve
from tests.helpers.problems.strategies import random_caps, random_problem
from tests.helpers.problems.transformed import enlarged, enlarged_caps, exact_ticks, permuted

STRICT = SolveOptions(time_slack=0.0)


def figures(result: SolveResult, *, ticks: int = 1, size: int = 1) -> tuple[object, ...]:
    """Return status, optimum, bound and floor, times ``ticks`` and ``size``."""
    if result.best is None:
        return result.status, result.floor_memory_bytes * size
    best = result.best
    optimum = best.step_time_ticks * ticks, best.peak_memory_bytes * size, best.num_launches
    return result.status, optimum, result.bound_ticks * ticks, result.floor_memory_bytes * size


@pytest.mark.parametrize("seed", range(30))
def test_numbers_and_names_mean_nothing(seed: int) -> None:
    """Nodes in another legal order, so that collectives are numbered anew; storages, keys and
    streams shuffled; other names.

    The topo-span is left out: it is measured in the very numbers that change.
    """
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=5, max_compute=5)
    caps = replace(random_caps(rng, problem), max_topo_span=None)
    assert figures(solve(permuted(problem, rng), caps, STRICT)) == figures(
        solve(problem, caps, STRICT)
    )


@pytest.mark.parametrize("seed", range(30))
def test_all_times_three_times_as_long(seed: int) -> None:
    """First all ticks so large that no price is rounded; then as large again by three."""
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=5, max_compute=4, units=(1, 7))
    caps, exact = random_caps(rng, problem), exact_ticks(problem)
    once, thrice = (solve(enlarged(problem, k * exact, 1), caps, STRICT) for k in (1, 3))
    if once.status == "feasible":  # the bound lies between two ticks, and is rounded
        assert 0 <= thrice.bound_ticks - 3 * once.bound_ticks < 3
        thrice = replace(thrice, bound_ticks=3 * once.bound_ticks)
    assert figures(thrice) == figures(once, ticks=3)


@pytest.mark.parametrize("seed", range(30))
def test_all_bytes_three_times_as_many(seed: int) -> None:
    """The allocator rounds no size, buffers of buckets included."""
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=5, max_compute=4, grain=2**13)
    caps = random_caps(rng, problem)
    once, thrice = (
        solve(problem, caps, STRICT),
        solve(enlarged(problem, 1, 3), enlarged_caps(caps, 3), STRICT),
    )
    assert figures(thrice) == figures(once, size=3)
