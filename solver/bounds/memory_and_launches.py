"""Lower bounds on the later objectives: peak memory, and number of launches, of schedules that keep
a limit on step time.

Symbols as in ``apsched.solver.bounds.step_time``. With Z the limit on step time, D_j = Z -
sum_{i>=j} d_i is the latest begin of compute node j, and R_k the earliest time at which slot k is
reached; A_k is the bytes alive at compute node k in every schedule.

    (P1)  peak >= A_k + output of every gather c with R_{k+1} + T_c > D_need, need > k: launched
                      behind k it would come too late + input of every reduce-scatter c with R_ready
                      + T_c > D_k, ready <= k: waiting for it before k would take too long
    (L1)  launches of a key >= the least number of slots such that each of its collectives can be
         launched in one of them
    (L2)  launches of a key >= its longest chain of collectives that wait for each other; >= its
         bytes / cap on the bytes of a bucket
    (L3)  launches of a key >= the least i for which i buckets are enough: sorted by need k_1 < k_2
          < ..., the first i gather buckets hold all gathers needed before k_{i+1}, their transfers
          end by D_{k_i}, and their outputs needed behind k_i are alive there; likewise reduction
          buckets from the last one back
    (L4)  launches >= min sum_key n_key, a linear program over the shares y_c of collectives that
         are in buckets
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from ortools.linear_solver import pywraplp

from apsched.config import Caps
from apsched.costs.price_curve import PriceCurve
from apsched.schedule.result import Score
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import ALL_GATHER, REDUCE_SCATTER, Ints, ProblemArrays
from apsched.solver.arrays.relaxed import without_copies
from apsched.solver.bounds.linear_program import Floats, rows_of
from apsched.solver.bounds.step_time import copy_rest, earliest, least_live_bytes, memory_bound
from apsched.solver.bounds.tighten import holds_input, holds_output, tighten


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterBounds:
    """Lower limits of every schedule with a step time of at most ``limit_ticks``."""

    limit_ticks: int
    peak_bytes: int
    launches: int
    """With at most the peak of the best schedule."""


def later_bounds(
    instance: Instance,
    best: Score,
    limit_ticks: int,
    floor_bound_bytes: int,
) -> LaterBounds:
    """Return the bounds that ``best`` is measured by; ``floor_bound_bytes`` is a lower
    bound of the peak of every schedule, at any step time.
    """
    instance = without_copies(instance)
    limit = max(limit_ticks, best.step_time_ticks)
    peak = max(floor_bound_bytes, peak_bound(instance, limit))
    at_peak = replace(instance.caps, memory_cap_bytes=best.peak_memory_bytes)
    launches = launches_bound(instance.within(at_peak), limit)
    return LaterBounds(
        limit_ticks=limit,
        peak_bytes=min(peak, best.peak_memory_bytes),
        launches=min(launches, best.num_launches),
    )


def peak_bound(instance: Instance, limit_ticks: int) -> int:
    """(P1) Return bytes that the peak of no schedule with a step time of at most ``limit_ticks`` is
    below.
    """
    arrays = instance.arrays
    num_compute = len(arrays.compute_ticks)
    _, reached = earliest(instance)
    latest = limit_ticks - arrays.time_after
    inputs = _held_inputs(arrays, np.arange(len(arrays.kind)))
    forced = np.zeros(num_compute + 2, dtype=np.int64)
    for c in range(len(arrays.kind)):
        if arrays.on_path[c]:
            continue
        need, ready, ticks = (
            int(arrays.need_slot[c]),
            int(arrays.ready_slot[c]),
            int(arrays.transfer_ticks[c]),
        )
        if arrays.kind[c] == ALL_GATHER and need < num_compute and holds_output(arrays, c):
            held, past = int(arrays.output_bytes[c]), need
            first = int(np.searchsorted(reached, latest[need] - ticks, side="right")) - 1
        elif arrays.kind[c] == REDUCE_SCATTER and need == num_compute and holds_input(arrays, c):
            held, first = min(int(arrays.input_bytes[c]), int(inputs[c])), ready
            past = int(np.searchsorted(latest, reached[ready] + ticks, side="left"))
        else:
            continue
        if first < past:
            forced[max(first, 0)] += held
            forced[past] -= held
    live = least_live_bytes(arrays) + np.cumsum(forced)[: num_compute + 1]
    return max(memory_bound(arrays), int(live.max()))


def launches_bound(instance: Instance, limit_ticks: int) -> int:
    """(L4) Return a lower bound on the launches of every schedule within the caps and a step time
    of at most ``limit_ticks``.

    With n_k launches and b_k buckets of several members of key k, of at most M_k members each and
    N_k collectives in all:

        n_k >= N_k - sum_c y_c + b_k,  n_k >= (L1), (L2), (L3),  b_k >= sum_c y_c / M_k, Z >=
        const_i + sum_c ((1 - y_c) alone_ic + y_c shared_ic)  for every row of
        ``apsched.solver.bounds.linear_program``

    where a bucket's launch, and the price of copying nothing, add to the row of the compute stream.
    The result is the Lagrangian of the weights that the LP finds, which holds for any weights.
    """
    problem = instance.problem
    if not len(instance.arrays.kind):
        return 0
    tightened = tighten(instance)
    forced = tightened.arrays
    rows = rows_of(tightened)
    excess = np.array([r.constant + r.alone.sum() for r in rows]) - limit_ticks
    change = np.array([r.shared - r.alone for r in rows])
    keys = range(len(problem.keys))
    _, reached = earliest(tightened)
    least = [_least_of_key(instance, forced, limit_ticks, reached, k) for k in keys]
    most = [_most_members(forced, instance.caps, k) for k in keys]
    extra = np.array(
        [problem.keys[k].launch_ticks + copy_rest(problem) for k in keys], dtype=np.float64
    )
    weights, shares = _weights(forced, excess, change, least, most, extra)
    total = float(weights @ excess)
    for k in keys:
        of_key = np.nonzero(forced.key == k)[0]
        together = of_key[forced.bucketable[of_key]]
        total += (1 - shares[k]) * least[k] + shares[k] * len(of_key)
        if most[k] > 1:
            price = (shares[k] + weights[0] * extra[k]) / most[k]
            total += float(np.minimum(weights @ change[:, together] - shares[k] + price, 0.0).sum())
    return max(sum(least), int(np.ceil(total * (1 - 1e-9) - 1e-6)))


def _least_of_key(
    instance: Instance,
    arrays: ProblemArrays,
    limit_ticks: int,
    reached: Ints,
    key: int,
) -> int:
    """(L1), (L2) Return the launches that the places (in ``compact`` those that memory leaves),
    chains and sizes of ``key`` force.
    """
    caps = instance.caps
    of_key = np.nonzero(arrays.key == key)[0]
    together = of_key[arrays.bucketable[of_key]]
    num_alone = len(of_key) - len(together)
    if not len(together):
        return num_alone
    done_by = (
        limit_ticks
        - arrays.time_after[arrays.need_slot[together]]
        - arrays.transfer_ticks[together]
    )
    last = np.minimum(
        np.searchsorted(reached, done_by, side="right") - 1, arrays.need_slot[together]
    )
    first = arrays.ready_slot[together]
    counts = [_pierced(first, np.maximum(last, first)), _longest_chain(arrays, key)]
    if caps.max_topo_span is not None:
        ranks = arrays.start_rank[together]
        counts.append(_pierced(ranks, ranks + caps.max_topo_span))
    counts.append(_chained_buckets(instance, limit_ticks, reached, together))
    for sizes, cap in _capped(arrays, caps, together):
        counts.append(int((sizes > cap).sum()) + -(-int(sizes[sizes <= cap].sum()) // max(cap, 1)))
    return num_alone + max(counts)


def _chained_buckets(instance: Instance, limit_ticks: int, reached: Ints, collectives: Ints) -> int:
    """(L3) Return how many launches ``collectives``, of one key, need.

    Gathers go by node k of their need, with D_k ticks for all transfers up to the one needed there.
    Reductions go by slot from the last one back, with Z - R_g ticks from there on.
    """
    arrays, caps = instance.arrays, instance.caps
    num_compute = len(arrays.compute_ticks)
    free = np.full(num_compute + 1, np.inf)
    if caps.memory_cap_bytes is not None:
        free = (caps.memory_cap_bytes - least_live_bytes(arrays)).astype(np.float64)
    if bool(
        (
            (arrays.need_slot[collectives] < num_compute) & (arrays.kind[collectives] == ALL_GATHER)
        ).all()
    ):
        place = arrays.need_slot[collectives]
        held = np.where(
            [holds_output(arrays, int(c)) for c in collectives], arrays.output_bytes[collectives], 0
        )
        at = np.unique(place)
        ticks, room = limit_ticks - arrays.time_after[at], free[at]
        rank = np.searchsorted(at, place)
    elif bool((arrays.need_slot[collectives] >= num_compute).all()):
        place, held = arrays.ready_slot[collectives], _held_inputs(arrays, collectives)
        at = np.unique(place)[::-1]
        ticks, room = (
            limit_ticks - reached[at],
            np.where(at > 0, free[np.maximum(at - 1, 0)], np.inf),
        )
        rank = np.searchsorted(-at, -place)
    else:
        return 1
    size_of, held_of = np.zeros(len(at)), np.zeros(len(at))
    np.add.at(size_of, rank, arrays.size_bytes[collectives])
    np.add.at(held_of, rank, held)
    sizes = arrays.size_bytes[collectives]
    largest = float(
        sizes.sum()
        if caps.bucket_cap_bytes is None
        else max(caps.bucket_cap_bytes, int(sizes.max()))
    )
    return _fewest(
        np.cumsum(size_of),
        np.cumsum(held_of),
        ticks,
        room,
        _below(instance.problem.keys[int(arrays.key[collectives[0]])].price),
        largest,
    )


def _held_inputs(arrays: ProblemArrays, collectives: Ints) -> Ints:
    """Return the bytes of the input of each of ``collectives`` that its launch alone keeps alive
    behind the compute node that makes it.
    """
    held: Ints = np.zeros(len(collectives), dtype=np.int64)
    s = arrays.input_storage[collectives]
    (own,) = np.nonzero(s >= 0)  # the others reduce a storage of the caller
    s = s[own]
    known = (
        (np.bincount(s, minlength=len(arrays.storage_bytes))[s] == 1)
        & (arrays.storage_birth_compute[s] >= 0)
        & (arrays.storage_last_compute[s] < arrays.ready_slot[collectives[own]])
    )
    held[own] = np.where(known, arrays.storage_bytes[s], 0)
    return held


def _fewest(
    sizes: Floats,
    held: Floats,
    ticks: Ints,
    room: Floats,
    below: list[tuple[float, float]],
    largest: float,
) -> int:
    """Return the least i such that i buckets can hold everything.

    ``sizes`` and ``held`` are totals up to each place; i buckets, the last of which begins at place
    p, have ``ticks[p]`` for their transfers and ``room[p]`` for the bytes that they hold beyond p.
    Those i buckets hold everything before the place where the next one begins.
    """
    past = 0  # the next bucket begins at this place or before
    for i in range(1, len(sizes) + 1):
        begins = slice(0, past + 1)
        reach = np.full(past + 1, i * largest)
        for latency, slope in below:
            spare = ticks[begins] - i * latency
            reach = np.minimum(
                reach, spare / slope if slope > 0 else np.where(spare >= 0, np.inf, -1.0)
            )
        by_size = np.searchsorted(sizes, reach * (1 + 1e-12) + 1, side="right")
        by_room = np.searchsorted(
            held, (held[begins] + room[begins]) * (1 + 1e-12) + 1, side="right"
        )
        past = max(past, int(np.minimum(by_size, by_room).max()))
        if past >= len(sizes):
            return i
    return len(sizes)


def _below(price: PriceCurve) -> list[tuple[float, float]]:
    """Return lines (price of nothing, price of a byte) that the curve is nowhere below: the edges
    of its lower hull.
    """
    hull: list[tuple[int, int]] = []
    for point in zip(price.size_bytes, price.price_ticks, strict=True):
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (point[0] - hull[-1][0]) >= (
            point[1] - hull[-1][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append(point)
    lines = [((q - p) / (b - a), a, p) for (a, p), (b, q) in pairwise(hull)]
    last = (price.price_ticks[-1] - price.price_ticks[-2]) / (
        price.size_bytes[-1] - price.size_bytes[-2]
    )
    return [(p - slope * a, slope) for slope, a, p in lines if slope <= last]


def _capped(arrays: ProblemArrays, caps: Caps, collectives: Ints) -> Iterable[tuple[Ints, int]]:
    """Return the bytes of ``collectives`` that a cap limits in a bucket, with the cap."""
    if caps.bucket_cap_bytes is not None:
        yield arrays.size_bytes[collectives], caps.bucket_cap_bytes
    if caps.in_flight_cap_bytes is not None:
        yield arrays.output_bytes[collectives], caps.in_flight_cap_bytes


def _pierced(first: Ints, last: Ints) -> int:
    """Return the least number of points such that each interval [first, last] has one: those that
    end first, one after the other.
    """
    count, point = 0, -1
    for i in np.argsort(last, kind="stable"):
        if first[i] > point:
            count, point = count + 1, int(last[i])
    return count


def _longest_chain(arrays: ProblemArrays, key: int) -> int:
    depth: list[int] = []
    for c in range(len(arrays.kind)):  # ordered by start, so those before it are known
        before = arrays.awaited_by(c)
        depth.append(
            int(arrays.key[c] == key and arrays.bucketable[c])
            + max((depth[d] for d in before), default=0)
        )
    return max(depth, default=0)


def _most_members(arrays: ProblemArrays, caps: Caps, key: int) -> int:
    """Return the most members that a bucket of ``key`` can have."""
    of_key = np.nonzero((arrays.key == key) & arrays.bucketable)[0]
    if not len(of_key):
        return 1
    counts = [_deepest(arrays.ready_slot[of_key], arrays.need_slot[of_key])]
    if caps.max_topo_span is not None:
        counts.append(
            _deepest(arrays.start_rank[of_key], arrays.start_rank[of_key] + caps.max_topo_span)
        )
    for sizes, cap in _capped(arrays, caps, of_key):
        counts.append(int(np.searchsorted(np.cumsum(np.sort(sizes)), cap, side="right")))
    return max(min(counts), 1)


def _deepest(first: Ints, last: Ints) -> int:
    """Return the most intervals [first, last] that have a point in common."""
    begins, ends = np.sort(first), np.sort(last)
    return int((np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, side="left")).max())


def _weights(
    arrays: ProblemArrays,
    excess: Floats,
    change: Floats,
    least: list[int],
    most: list[int],
    extra: Floats,
) -> tuple[Floats, Floats]:
    """Return the duals of the rows, and for each key that of n_k >= N_k - sum y_c + b_k (at most
    1); zeros where there are none.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity, scale = solver.infinity(), float(max(np.abs(excess).max(), 1.0))
    launches = [solver.NumVar(float(least[k]), infinity, "") for k in range(len(least))]
    buckets = [solver.NumVar(0, infinity, "") for _ in least]
    shares = {
        int(c): solver.NumVar(0, 1, "")
        for c in np.nonzero(arrays.bucketable)[0]
        if most[int(arrays.key[c])] > 1
    }
    limits = []
    for i in range(len(excess)):  # sum_c change_ic y_c (+ buckets) <= -excess_i
        row = solver.Constraint(-infinity, -float(excess[i]) / scale)
        for c, share in shares.items():
            if change[i, c]:
                row.SetCoefficient(share, float(change[i, c]) / scale)
        if i == 0:
            for k, bucket in enumerate(buckets):
                row.SetCoefficient(bucket, float(extra[k]) / scale)
        limits.append(row)
    counts = []
    for k, count in enumerate(launches):
        row = solver.Constraint(float((arrays.key == k).sum()), infinity)
        enough = solver.Constraint(0, infinity)
        row.SetCoefficient(count, 1)
        row.SetCoefficient(buckets[k], -1)
        enough.SetCoefficient(buckets[k], most[k])
        for c, share in shares.items():
            if arrays.key[c] == k:
                row.SetCoefficient(share, 1)
                enough.SetCoefficient(share, -1)
        counts.append(row)
    solver.Minimize(sum(launches))
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return np.zeros(len(excess)), np.zeros(len(least))
    found = np.array([max(-row.dual_value(), 0.0) for row in limits]) / scale
    return found, np.array([min(max(row.dual_value(), 0.0), 1.0) for row in counts])
