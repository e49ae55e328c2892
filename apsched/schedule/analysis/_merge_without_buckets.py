"""What a step takes at least where every collective is launched alone: what buckets are worth, as a proof, not as a guess."""

from collections import Counter

from apsched.graph.dag import NodeKind
from apsched.problem import Problem


def without_buckets_ticks(problem: Problem) -> int:
    """Return a lower bound on the step time of every schedule of ``problem`` without buckets.

    Work on a stream runs one after the other, and neither an order nor waits change how long it takes:
    max(compute and launches, for each group the sum of T_c over its collectives c). Contention only makes it longer.
    """
    busy = Counter[int]()
    for c in problem.collectives:
        key = problem.keys[c.key]
        busy[key.stream] += key.price(c.size_bytes)
    runs = (NodeKind.COMPUTE, NodeKind.START)
    return max(sum(ticks for ticks, kind in zip(problem.duration_ticks, problem.kinds, strict=True) if kind in runs), *busy.values(), 0)
