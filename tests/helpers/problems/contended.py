"""Random contention for random problems."""

import random

from apsched.problem.contention import Contention
from apsched.problem.problem import Problem, with_contention


def random_contention(rng: random.Random, problem: Problem) -> Contention:
    """Return any of the three rules, or several, with up to two links."""
    links = tuple(f"link {k}" for k in range(rng.randint(0, 2)))
    groups = tuple(
        (group, tuple(k for k in range(len(links)) if rng.random() < 0.8))
        for group in problem.streams
    )
    compute, transfer, latency = (
        rng.choice(((1, 1), (6, 5), (5, 4), (2, 1), (1138, 1000), (3, 1))) for _ in range(3)
    )
    return Contention(
        links=links,
        links_of_group=groups,
        compute_slowdown=compute,
        transfer_slowdown=transfer,
        latency_slowdown=latency,
    )


def contended(problem: Problem, seed: int) -> Problem:
    """Return ``problem`` on a machine with random contention."""
    return with_contention(problem, random_contention(random.Random(seed), problem))
