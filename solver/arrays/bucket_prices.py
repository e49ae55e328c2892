"""Collectives and prices for compiled code, and the figures of buckets of any members."""

from typing import NamedTuple

import numpy as np

from apsched.costs.price_curve import PriceCurve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.plan_groups import PlanGroups, plan_groups
from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays
from apsched.units import ALLOCATION_BYTES

NUM_FIGURES = 8
LAUNCH_TICKS, TRANSFER_TICKS, COPY_IN_TICKS, IN_BUFFER, OUT_BUFFER, READY_SLOT, NEED_SLOT, FLAT = (
    range(NUM_FIGURES)
)
"""Columns of the figures of a bucket: ticks of its launch, transfer and copy-in; bytes of its
buffers, 0 where it has none; slots; 1 where it has several members and a buffer.
"""


class Tables(NamedTuple):
    """Arrays over collectives (C), keys (K) and the points of price curves (the copy's comes
    last).
    """

    key: Ints
    kind: Ints
    stream: Ints
    size_bytes: Ints
    input_bytes: Ints
    output_bytes: Ints
    copied_bytes: Ints
    """Bytes that it adds to a copy-in."""
    coalesces: Bools
    member_ticks: Ints
    launch_ticks: Ints
    transfer_ticks: Ints
    prologue_ticks: Ints
    cast_ticks: Ints
    """The share of the prologue that a bucket has not."""
    epilogue_ticks: Ints
    copy_out_ticks: Ints
    on_path: Bools
    bucketable: Bools
    start_rank: Ints
    ready_slot: Ints
    need_slot: Ints
    launch_last: Ints
    wait_first: Ints
    wait_last: Ints
    """Slots in which the user's plan allows a launch, and a wait."""
    plan_groups: PlanGroups
    by_need: Ints
    """Collectives by need slot."""
    depth: Ints
    """Number of collectives that must be waited for, one after the other, before its launch."""
    after_begin: Ints
    after_list: Ints
    key_launch: Ints
    """(K,)"""
    curve_begin: Ints
    """(K+2,)"""
    curve_size: Ints
    curve_price: Ints


def tables(instance: Instance) -> Tables:
    """Return the tables of ``problem``."""
    problem = instance.problem
    c, groups = instance.arrays, plan_groups(instance.arrays)
    curves = [*(key.price for key in problem.keys), problem.copy_price]
    return Tables(
        key=c.key,
        kind=c.kind,
        stream=c.stream,
        size_bytes=c.size_bytes,
        input_bytes=c.input_bytes,
        output_bytes=c.output_bytes,
        copied_bytes=c.copied_bytes,
        coalesces=c.coalesces,
        member_ticks=c.member_ticks,
        launch_ticks=c.launch_ticks,
        transfer_ticks=c.transfer_ticks,
        prologue_ticks=c.prologue_ticks,
        cast_ticks=c.cast_ticks,
        epilogue_ticks=c.epilogue_ticks,
        copy_out_ticks=c.copy_out_ticks,
        on_path=c.on_path,
        bucketable=c.bucketable,
        start_rank=c.start_rank,
        ready_slot=c.late_ready_slot,
        need_slot=c.need_slot,
        launch_last=c.launch_last,
        wait_first=c.wait_first,
        wait_last=c.wait_last,
        plan_groups=groups,
        by_need=np.argsort(c.need_slot, kind="stable"),
        depth=np.array(_chain_depths(c, groups.leader), dtype=np.int64),
        after_begin=c.after_begin,
        after_list=c.after_list,
        key_launch=np.array([key.launch_ticks for key in problem.keys], dtype=np.int64),
        curve_begin=np.cumsum([0, *(len(curve.size_bytes) for curve in curves)]),
        curve_size=_points(curves, "size_bytes"),
        curve_price=_points(curves, "price_ticks"),
    )


def with_places(t: Tables, arrays: ProblemArrays) -> Tables:
    """Return ``t`` with the places that collectives have in ``compact``, the same problem under
    another order of its compute.
    """
    return t._replace(
        plan_groups=plan_groups(arrays),
        ready_slot=arrays.late_ready_slot,
        need_slot=arrays.need_slot,
        by_need=np.argsort(arrays.need_slot, kind="stable"),
    )


def _points(curves: list[PriceCurve], name: str) -> Ints:
    return np.array([value for curve in curves for value in getattr(curve, name)], dtype=np.int64)


def _chain_depths(arrays: ProblemArrays, leader: Ints) -> list[int]:
    """Return the length of the longest chain before each collective; the same within an atom."""
    before: dict[int, set[int]] = {int(k): set() for k in leader}
    for c, k in enumerate(leader.tolist()):
        before[k] |= {int(leader[d]) for d in arrays.awaited_by(c)} - {k}
    depth: dict[int, int] = {}
    stack = sorted(before, reverse=True)
    while stack:
        deeper = sorted(d for d in before[stack[-1]] if d not in depth)
        if deeper:  # an atom may wait for one whose first member comes later
            stack += deeper
        else:
            k = stack.pop()
            depth[k] = 1 + max((depth[d] for d in before[k]), default=-1)
    return [depth[int(k)] for k in leader]


@compiled
def num_at_most(ascending: Ints, limit: float) -> int:
    """Return the number of sorted values that are at most ``limit``: ``np.searchsorted`` from the
    right, which takes numba a second to compile.
    """
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] <= limit:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def curve_price(begins: Ints, sizes: Ints, prices: Ints, curve: int, size_bytes: int) -> int:
    """Return the price that ``apsched.costs.price_curve.PriceCurve`` returns, in 64 bits: guess the
    quotient in floats, and correct it by the remainder.

    It takes the points of the curves alone: numba counts a reference to each array of ``Tables``
    in each call, which takes longer than the price.

    The remainder of a near guess is small, so it is exact although the products in it wrap around.
    """
    begin, past = begins[curve], begins[curve + 1]
    k = num_at_most(sizes[begin:past], size_bytes) - 1
    k = begin + min(max(k, 0), past - begin - 2)
    rise, run, over = prices[k + 1] - prices[k], sizes[k + 1] - sizes[k], size_bytes - sizes[k]
    up = np.int64(float(over) * float(rise) / float(run))
    rest = over * rise - up * run
    while rest > 0:
        rest -= run
        up += 1
    while rest <= -run:
        rest += run
        up -= 1
    return int(prices[k] + up)


@compiled
def bucket_figures(t: Tables, member_begin: Ints, member_list: Ints, coalesced: Bools) -> Ints:
    """Return (B, NUM_FIGURES): the costs of every bucket and the slots where it may stand.

    A bucket of several members is coalesced where ``coalesced`` (C,) marks its first member and all
    of its members may be coalesced.
    """
    figures = np.zeros((len(member_begin) - 1, NUM_FIGURES), np.int64)
    copy = len(t.key_launch)
    begins, sizes, prices = t.curve_begin, t.curve_size, t.curve_price
    for b in range(len(figures)):
        begin, past = member_begin[b], member_begin[b + 1]
        first = member_list[begin]
        ready, need = t.ready_slot[first], t.need_slot[first]
        size, inputs, outputs, copied = 0, 0, 0, 0
        flat = past - begin > 1 and not coalesced[first]
        for j in range(begin, past):
            c = member_list[j]
            if past - begin > 1 and not t.coalesces[c]:
                flat = True
            size += t.size_bytes[c]
            inputs += t.input_bytes[c]
            outputs += t.output_bytes[c]
            copied += t.copied_bytes[c]
            ready, need = max(ready, t.ready_slot[c]), min(need, t.need_slot[c])
        figures[b, READY_SLOT], figures[b, NEED_SLOT] = ready, need
        if past - begin == 1:
            figures[b, LAUNCH_TICKS], figures[b, TRANSFER_TICKS] = (
                t.launch_ticks[first],
                t.transfer_ticks[first],
            )
        else:
            figures[b, LAUNCH_TICKS] = t.key_launch[t.key[first]]
            figures[b, TRANSFER_TICKS] = curve_price(begins, sizes, prices, t.key[first], size)
        if past - begin > 1 and not flat:
            figures[b, TRANSFER_TICKS] += (past - begin) * t.member_ticks[first]
        if flat:
            figures[b, FLAT] = 1
            figures[b, COPY_IN_TICKS] = curve_price(begins, sizes, prices, copy, copied)
            figures[b, IN_BUFFER] = -(-inputs // ALLOCATION_BYTES) * ALLOCATION_BYTES
            figures[b, OUT_BUFFER] = -(-outputs // ALLOCATION_BYTES) * ALLOCATION_BYTES
    return figures


@compiled
def legal(t: Tables, member_begin: Ints, member_list: Ints, bucket_cap: int, span_cap: int) -> bool:
    """Whether every bucket may be one; atoms are whole in ``labels`` that come from
    ``apsched.solver.arrays.plan_groups.whole``.

    One key, bucketable, ready before needed, within the caps on bytes and span; and its members
    wait for equally long chains of other collectives, so that no two buckets can wait for each
    other.
    """
    for b in range(len(member_begin) - 1):
        begin, past = member_begin[b], member_begin[b + 1]
        if past - begin == 1:
            continue
        first = member_list[begin]
        ready, need, size = t.ready_slot[first], min(t.need_slot[first], t.launch_last[first]), 0
        low, high = t.start_rank[first], t.start_rank[first]
        for j in range(begin, past):
            c = member_list[j]
            if not t.bucketable[c] or t.key[c] != t.key[first] or t.depth[c] != t.depth[first]:
                return False
            if t.plan_groups.closed[c] and t.plan_groups.leader[c] != t.plan_groups.leader[first]:
                return False
            size += t.size_bytes[c]
            ready, need = max(ready, t.ready_slot[c]), min(need, t.need_slot[c], t.launch_last[c])
            low, high = min(low, t.start_rank[c]), max(high, t.start_rank[c])
        if ready > need or size > bucket_cap or high - low > span_cap:
            return False
    return True


@compiled
def members_of(labels: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (bucket_of, member_begin, member_list) of collectives with one label for each bucket;
    buckets by their lowest member.
    """
    index = np.full(len(labels), -1, np.int64)
    bucket_of = np.empty(len(labels), np.int64)
    size = np.zeros(len(labels), np.int64)
    num_buckets = 0
    for c in range(len(labels)):
        if index[labels[c]] < 0:
            index[labels[c]] = num_buckets
            num_buckets += 1
        bucket_of[c] = index[labels[c]]
        size[bucket_of[c]] += 1
    begin = np.zeros(num_buckets + 1, np.int64)
    for b in range(num_buckets):
        begin[b + 1] = begin[b] + size[b]
    place = begin[:num_buckets].copy()
    member_list = np.empty(len(labels), np.int64)
    for c in range(len(labels)):
        member_list[place[bucket_of[c]]] = c
        place[bucket_of[c]] += 1
    return bucket_of, begin, member_list
