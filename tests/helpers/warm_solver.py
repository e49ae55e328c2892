"""Compile the inner loops of the solver once: numba keeps the machine code, and the tests'
processes load it.

usage: python -m tests.helpers.warm_solver
"""

import random
import sys

from apsched.config import Caps, SolveOptions
from apsched.solver import solve
from tests.helpers.problems.contended import contended
from tests.helpers.problems.strategies import (
    layered_problem,
    random_caps,
    random_problem,
    with_coalesced_price,
)
from tests.workers.graphs.digest_worker import LIMIT, digests


def compile_all() -> None:
    """Solve random problems, whole and by search, alone and under contention: that calls nearly
    every compiled function.
    """
    digests()
    for seed in range(6):
        rng = random.Random(seed)
        problem = contended(random_problem(rng, max_collectives=6, max_compute=5), seed)
        solve(with_coalesced_price(problem, rng), random_caps(rng, problem))
    setattr(sys.modules[LIMIT[0]], LIMIT[1], -1)
    for seed in range(3):
        problem = layered_problem(random.Random(seed), num_layers=4)
        for other in (problem, contended(problem, seed)):
            solve(other, Caps(max_compute_move=20), SolveOptions(budget=0.5))


if __name__ == "__main__":
    compile_all()
