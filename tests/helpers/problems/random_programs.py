"""Random legal programs: any partition, any order of the units around the compute order that the
data allow. No policy, no solver.
"""

import random
from itertools import pairwise

import numpy as np

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Step, StepKind
from apsched.solver.arrays.partition import Pricer
from apsched.solver.program.program import COPY_IN, COPY_OUT, LAUNCH, NODE, START, WAIT, Program
from tests.helpers.problems.random_schedules import random_buckets, step_precedence

_MODES = ("any", "eager", "lazy", "gathers early")


def random_program(pricer: Pricer, seed: int, *, max_members: int = 6) -> Program:
    """Return a program whose schedule ``verify`` accepts without caps; made from the problem's data
    alone.
    """
    rng, problem = random.Random(seed), pricer.problem
    buckets = random_buckets(problem, rng, max_members)
    while (order := _random_order(problem, buckets, rng)) is None:
        buckets = rng.sample(
            buckets, len(buckets) - 1
        )  # two buckets wait for each other, or a member for another
    shared = {c for bucket in buckets for c in bucket.members}
    alone = [(c,) for c in range(len(problem.collectives)) if c not in shared]
    coalesced = np.zeros(len(problem.collectives), dtype=np.bool_)
    coalesced[[c for bucket in buckets if bucket.coalesced for c in bucket.members]] = True
    partition = pricer.partition([*(bucket.members for bucket in buckets), *alone], coalesced)
    operations = _operations(problem, buckets, order, partition.bucket_of, rng)
    table = np.array(operations, dtype=np.int64).reshape(-1, 2)
    return Program(
        partition=partition,
        operation=np.ascontiguousarray(table[:, 0]),
        argument=np.ascontiguousarray(table[:, 1]),
    )


def _random_order(problem: Problem, buckets: list[Bucket], rng: random.Random) -> list[Step] | None:
    """Return a topological order of all steps in which compute stands as captured, or None where
    there is a cycle.
    """
    before = step_precedence(problem, buckets)
    for first, second in pairwise(problem.compute_order):
        before[Step(StepKind.NODE, second)].add(Step(StepKind.NODE, first))
    rank = _random_rank(problem, rng)
    missing = {step: set(earlier) for step, earlier in before.items()}
    after: dict[Step, list[Step]] = {}
    for step, earlier in before.items():
        for other in earlier:
            after.setdefault(other, []).append(step)
    ready = sorted(step for step, earlier in missing.items() if not earlier)
    order = []
    while ready:
        step = min(ready, key=rank) if rng.random() < 0.8 else rng.choice(ready)
        ready.remove(step)
        order.append(step)
        for other in after.get(step, ()):
            missing[other].discard(step)
            if not missing[other]:
                ready.append(other)
    return order if len(order) == len(before) else None


def _random_rank(problem: Problem, rng: random.Random):
    """Return what decides between steps that are ready: chance, or a liking for launches, for waits
    or for compute.
    """
    mode, chance = rng.choice(_MODES), {}

    def group(step: Step) -> int:
        if mode == "any":
            return 0
        waits = step.kind in (StepKind.WAIT, StepKind.COPY_OUT)
        waits = waits or (step.kind is StepKind.NODE and problem.kinds[step.index] is NodeKind.WAIT)
        computes = step.kind is StepKind.NODE and step.index in problem.compute_order
        return {"eager": (0, 1, 2), "lazy": (2, 1, 0), "gathers early": (1, 2, 0)}[mode][
            2 if computes else 1 if waits else 0
        ]

    def rank(step: Step) -> tuple[int, float]:
        return group(step), chance.setdefault(step, rng.random())

    return rank


def _operations(
    problem: Problem, buckets: list[Bucket], order: list[Step], bucket_of, rng: random.Random
) -> list[tuple[int, int]]:
    """Return the units of ``order``; a start right behind its copy-in may be one operation with
    it.
    """
    place = {node: k for k, node in enumerate(problem.compute_order)}
    operations: list[tuple[int, int]] = []
    for step in order:
        if step.kind is StepKind.NODE and step.index in place:
            operations.append((NODE, place[step.index]))
        elif step.kind is StepKind.NODE and step.index in problem.collective_of_node:
            b = int(bucket_of[problem.collective_of_node[step.index]])
            operations.append((LAUNCH if problem.kinds[step.index] is NodeKind.START else WAIT, b))
        elif step.kind is StepKind.COPY_IN:
            operations.append((COPY_IN, step.index))
        elif step.kind is StepKind.START and buckets[step.index].coalesced:
            operations.append((LAUNCH, step.index))
        elif step.kind is StepKind.START:
            if operations[-1] == (COPY_IN, step.index) and rng.random() < 0.5:
                operations[-1] = (LAUNCH, step.index)
            else:
                operations.append((START, step.index))
        elif step.kind is StepKind.WAIT:
            operations.append((WAIT, step.index))
        elif step.kind is StepKind.COPY_OUT:
            operations.append((COPY_OUT, step.index))
    return operations
