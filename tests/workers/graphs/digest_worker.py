"""Solve a few random problems, whole and by search, and print what was found: ``python
digest_worker.py NUM_CORES``.
"""

import os
import random
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from apsched.config import SolveOptions
from apsched.solver import solve
from tests.helpers.problems.strategies import layered_problem, random_caps, random_problem

LIMIT = "apsched.solver.reorder.min_memory", "_SMALL_LITERALS"
"""Where the size stands up to which a problem is solved whole: module, name."""


def digests() -> list[str]:
    """Return the schedule and the figures of each answer, as text."""
    answers = []
    for seed in range(6):
        rng = random.Random(seed)
        problem = random_problem(rng, max_collectives=6, max_compute=5)
        answers.append(solve(problem, random_caps(rng, problem)))
    module, name = sys.modules[LIMIT[0]], LIMIT[1]
    limit = getattr(module, name)
    setattr(module, name, -1)
    try:
        for seed in range(3):
            rng = random.Random(seed)
            problem = layered_problem(rng, num_layers=4)
            answers.append(solve(problem, random_caps(rng, problem), SolveOptions(budget=0.2)))
    finally:
        setattr(module, name, limit)
    return [
        f"{a.status} {a.bound_ticks} {a.floor_memory_bytes} {a.deterministic_work} {a.best}"
        for a in answers
    ]


if __name__ == "__main__":
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
    print("\n".join(digests()))
