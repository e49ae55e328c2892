"""Partitions by a rule: runs of neighbours, in order of urgency, that share a launch. Partitions
are labels: one for each bucket.
"""

from collections.abc import Callable, Iterable

import numpy as np

from apsched.config import Caps
from apsched.solver.arrays.bucket_prices import Tables
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.plan_groups import whole
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Bools, Ints, ProblemArrays
from apsched.solver.search.launch_policy import UNLIMITED


def urgencies(arrays: ProblemArrays) -> Ints:
    """Return the urgency of each collective as a slot: the need slot of a gather, the ready slot of
    any other.
    """
    return np.where(arrays.kind == ALL_GATHER, arrays.need_slot, arrays.ready_slot)


def merge_runs(
    pricer: Pricer, limits: Caps, keys: Iterable[int], tag: Callable[[int], object]
) -> Ints:
    """Return labels of buckets of neighbours with one tag, as long as ``limits`` and dependences
    allow; other keys stay alone.
    """
    numbers: dict[object, int] = {}
    tags = np.array(
        [numbers.setdefault(tag(c), len(numbers)) for c in range(len(pricer.arrays.kind))],
        dtype=np.int64,
    )
    return group(pricer, limits, keys, tags=tags)


def group(
    pricer: Pricer,
    limits: Caps,
    keys: Iterable[int],
    *,
    tags: Ints | None = None,
    most_bytes: int | None = None,
    reach_slots: int | None = None,
) -> Ints:
    """Return labels of buckets of neighbours with one tag that are urgent within ``reach_slots`` of
    each other.

    Collectives of more than ``most_bytes`` stay alone, and neighbours on their two sides may share
    a bucket.
    """
    arrays, unlimited = pricer.arrays, int(UNLIMITED)
    a, t = pricer.tables.plan_groups, pricer.tables
    urgency = np.where(arrays.kind == ALL_GATHER, a.need_slot, a.ready_slot)
    of_keys = np.zeros(len(pricer.problem.keys), dtype=np.bool_)
    of_keys[list(keys)] = True
    wanted = (
        of_keys[arrays.key] & arrays.bucketable & ~a.closed & (a.leader == np.arange(len(urgency)))
    )
    if most_bytes is not None:
        wanted &= a.size_bytes <= most_bytes
    return whole(
        a,
        _runs(
            t,
            np.lexsort((np.arange(len(urgency)), urgency, arrays.key)),
            np.zeros(len(urgency), dtype=np.int64) if tags is None else tags,
            wanted,
            urgency,
            unlimited if limits.bucket_cap_bytes is None else limits.bucket_cap_bytes,
            unlimited if limits.max_topo_span is None else limits.max_topo_span,
            unlimited if reach_slots is None else reach_slots,
        ),
    )


@compiled
def _runs(
    t: Tables,
    order: Ints,
    tags: Ints,
    wanted: Bools,
    urgency: Ints,
    bucket_cap: int,
    span_cap: int,
    reach: int,
) -> Ints:
    labels, a = np.arange(len(order)), t.plan_groups
    head, last, size, ready, need, low, high = -1, -1, 0, 0, 0, 0, 0
    for c in order:
        if not wanted[c]:
            continue
        if (
            head >= 0
            and t.key[c] == t.key[head]
            and tags[c] == tags[last]
            and t.depth[c] == t.depth[head]
            and urgency[c] - urgency[head] <= reach
            and size + a.size_bytes[c] <= bucket_cap
            and max(high, a.last_rank[c]) - min(low, a.first_rank[c]) <= span_cap
            and max(ready, a.ready_slot[c]) <= min(need, a.need_slot[c])
        ):
            size += a.size_bytes[c]
            ready, need = max(ready, a.ready_slot[c]), min(need, a.need_slot[c])
            low, high = min(low, a.first_rank[c]), max(high, a.last_rank[c])
        else:
            head, size, ready, need = c, a.size_bytes[c], a.ready_slot[c], a.need_slot[c]
            low, high = a.first_rank[c], a.last_rank[c]
        labels[c] = head
        last = c
    return labels


@compiled
def canonical(labels: Ints) -> Ints:
    """Return ``labels`` with each bucket named by its lowest member."""
    lowest = np.full(len(labels), -1, np.int64)
    result = np.empty(len(labels), np.int64)
    for c in range(len(labels)):
        if lowest[labels[c]] < 0:
            lowest[labels[c]] = c
        result[c] = lowest[labels[c]]
    return result
