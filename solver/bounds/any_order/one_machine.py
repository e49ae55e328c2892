"""Jobs on one stream that have heads and tails: the least time of the stream."""

from heapq import heappop, heappush

import numpy as np

from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Ints


def one_machine(head: Ints, tail: Ints, ticks: Ints) -> int:
    """Return the longest of min head + sum of ticks + min tail over all sets of jobs, (V3).

    Jackson's rule gives it: of the jobs that may run, run the one with the longest tail, and let
    those that come interrupt it.
    """
    return _end_by_jacksons_rule(head, tail, ticks, np.argsort(head, kind="stable"))


def critical_jobs(head: Ints, tail: Ints, ticks: Ints) -> tuple[int, int, int]:
    """Return min head + sum of ticks + min tail of the set for which it is longest, with its least
    head and its least tail.

    Sets are all jobs with at least some head and some tail: at most 256 of the heads are tried.
    """
    heads = np.unique(head)
    tried = heads[:: max(len(heads) // 256, 1)]
    return _longest(head, tail, ticks, tried, np.argsort(-tail, kind="stable"))


@compiled
def _end_by_jacksons_rule(head: Ints, tail: Ints, ticks: Ints, by_head: Ints) -> int:
    left = ticks.copy()
    heap = [(np.int64(0), np.int64(0))]
    heap.pop()
    clock, best, k = np.int64(0), np.int64(0), 0
    while k < len(by_head) or len(heap) > 0:
        if len(heap) == 0:
            clock = max(clock, head[by_head[k]])
        while k < len(by_head) and head[by_head[k]] <= clock:
            heappush(heap, (-tail[by_head[k]], by_head[k]))
            k += 1
        while len(heap) > 0 and (k == len(by_head) or clock < head[by_head[k]]):
            job = heap[0][1]
            run = left[job] if k == len(by_head) else min(left[job], head[by_head[k]] - clock)
            clock += run
            left[job] -= run
            if left[job] == 0:
                heappop(heap)
                best = max(best, clock + tail[job])
    return int(best)


@compiled
def _longest(
    head: Ints, tail: Ints, ticks: Ints, tried: Ints, by_tail: Ints
) -> tuple[int, int, int]:
    best, best_head, best_tail = np.int64(-1), np.int64(0), np.int64(0)
    for h in tried:
        total = np.int64(0)
        for j in by_tail:
            if head[j] >= h:
                total += ticks[j]
                if h + total + tail[j] > best:
                    best, best_head, best_tail = h + total + tail[j], h, tail[j]
    return int(best), int(best_head), int(best_tail)
