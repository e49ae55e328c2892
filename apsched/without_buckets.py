"""What a step takes at least where every collective is launched alone: what buckets are worth, as a proof, not as a guess."""

from collections import Counter
from dataclasses import replace

from apsched.problem import Problem
from apsched.schedule import as_captured
from apsched.simulate import simulate


def without_buckets_ticks(problem: Problem) -> int:
    """Return a lower bound on the step time of every schedule of ``problem`` without buckets.

    Work on a stream runs one after the other, and neither an order nor waits change how long it takes:
    max(compute and launches, for each group the sum of T_c over its collectives c). Contention only makes it longer.
    """
    alone = simulate(replace(problem, contention=None), as_captured(problem.num_nodes))
    busy = Counter[int]()
    for transfer in alone.transfers:
        busy[transfer.stream] += transfer.end_ticks - transfer.begin_ticks
    return max(alone.compute_ticks, *busy.values()) if busy else alone.compute_ticks
