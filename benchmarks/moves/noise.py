"""The step time of a schedule under durations that differ from those of its solve.

The order is fixed. The time of each node and each transfer is its time in the model, multiplied by
a factor of mean 1 (``apsched.what_if.scenarios``), so that the total work stays the same on
average.
"""

import numpy as np

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.simulate import simulate
from apsched.what_if.scenarios import Replay, sampled
from benchmarks.common.records import Noise

SIGMAS = (0.2, 0.5)
_SEEDS = range(10)


def noise_of(problem: Problem, schedule: Schedule, waits: str) -> tuple[Noise, ...]:
    """Return the mean and the worst step time of ``schedule`` under each size of noise; ``waits``
    says where its waits stand.
    """
    timeline, replay = simulate(problem, schedule), Replay(problem, schedule)
    found = []
    for sigma in SIGMAS:
        ticks = [
            replay.step_time_ticks(sampled(problem, sigma, seed, correlated=False))
            for seed in _SEEDS
        ]
        mean = round(sum(ticks) / len(ticks))
        found.append(
            Noise(
                waits=waits,
                sigma=sigma,
                mean_ticks=mean,
                worst_ticks=max(ticks),
                peak_bytes=timeline.peak_memory_bytes,
            )
        )
    return tuple(found)


def waits_when_done(problem: Problem, schedule: Schedule) -> Schedule:
    """Return ``schedule`` with every wait as early as the clock of the model says that its transfer
    is over.
    """
    timeline = simulate(problem, schedule)
    begin = timeline.begin_ticks
    to = {
        t.wait_step: min(
            t.wait_step, max(int(np.searchsorted(begin, t.end_ticks)), t.start_step + 1)
        )
        for t in timeline.transfers
    }
    return _reordered(schedule, {wait: at for wait, at in to.items() if at < wait})


def waits_at_the_end(problem: Problem, schedule: Schedule) -> Schedule:
    """Return ``schedule`` with the waits that only outputs need, and all that follows from them,
    before the output.
    """
    timeline, at_node = simulate(problem, schedule), _steps_of_nodes(schedule)
    end = len(schedule.steps) - 1
    to: dict[int, int] = {}
    for transfer in timeline.transfers:
        behind = _behind(problem, [problem.collectives[c].wait for c in transfer.members])
        if all(
            problem.kinds[node] in (NodeKind.VIEW, NodeKind.COMPUTE, NodeKind.OUTPUT)
            for node in behind
        ) and not (behind & set(problem.compute_order)):
            to[transfer.wait_step] = end
            to.update(
                {
                    at_node[node]: end
                    for node in behind
                    if problem.kinds[node] is not NodeKind.OUTPUT and node in at_node
                }
            )
    return _reordered(schedule, to)


def _behind(problem: Problem, nodes: list[int]) -> set[int]:
    """Return all nodes that depend on ``nodes``, these left out."""
    seen: set[int] = set()
    stack = list(nodes)
    while stack:
        for after in problem.successors[stack.pop()]:
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return seen - set(nodes)


def _steps_of_nodes(schedule: Schedule) -> dict[int, int]:
    return {step.index: k for k, step in enumerate(schedule.steps) if step.kind is StepKind.NODE}


def _reordered(schedule: Schedule, to: dict[int, int]) -> Schedule:
    """Return ``schedule`` with steps moved to right before others, in the order that they have."""
    order = sorted(range(len(schedule.steps)), key=lambda k: (to.get(k, k), k not in to, k))
    steps: tuple[Step, ...] = tuple(schedule.steps[k] for k in order)
    return Schedule(buckets=schedule.buckets, steps=steps)
