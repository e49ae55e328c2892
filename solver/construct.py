"""Policies: place the units of a partition around the spine in one forward pass, under caps.

A gather is launched as soon as its *want gap* is reached and memory allows it all the way to its need; otherwise at its need.
A reduction is launched when its inputs are ready and waited for when it is done, or earlier where the bytes it holds are
needed. Every gather's just-in-time bytes are reserved beforehand, so that a far prefetch cannot starve a reduction.
The pass is a heuristic: ``apsched.solver.evaluate`` says what its program costs.
"""

from dataclasses import dataclass

import numba as nb
import numpy as np

from apsched.config import Caps
from apsched.solver.compact import ALL_GATHER, ALL_REDUCE, Compact, Ints
from apsched.solver.evaluate import Program
from apsched.solver.partition import Partition

UNLIMITED = np.int64(2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How early gathers start and where their copy-outs stand."""

    lead: float
    """Extra lead of a gather in units of its own transfer time; infinite: as early as memory allows."""
    copy_out_early: bool
    """Copy out right after the wait (short life of the buffer) or just before each member's use (short life of the copy)."""
    prefetch: bool = True
    """False: every gather starts at its need."""
    one_ahead: bool = False
    """A gather starts when the one before it is needed (prefetch of one bucket, as FSDP2 does)."""
    wait_reductions_at_once: bool = False
    """Wait for a reduction right after its launch: least memory, no overlap."""


def want_gaps(compact: Compact, partition: Partition, policy: Policy, caps: Caps) -> Ints:
    """Return for each bucket the first gap where its launch is wanted (only gathers are launched ahead of need)."""
    num_spine = len(compact.spine_ticks)
    if not policy.prefetch:
        return partition.need_gap.copy()
    if policy.one_ahead:
        want = _one_ahead(compact, partition)
    elif np.isinf(policy.lead):
        want = np.zeros(len(partition.buckets), dtype=np.int64)
    else:
        want = _want_gaps(
            np.concatenate(([0], np.cumsum(compact.spine_ticks))),
            partition.need_gap,
            partition.transfer_ticks,
            compact.stream[partition.member_list[partition.member_begin[:-1]]],
            queue(compact, partition),
            compact.num_streams,
            policy.lead,
        )
    if caps.max_prefetch is not None:
        want = np.where(partition.need_gap < num_spine, np.maximum(want, partition.need_gap - caps.max_prefetch), want)
    return np.minimum(want, partition.need_gap)


def _one_ahead(compact: Compact, partition: Partition) -> Ints:
    """Return for each gather the need of the one before it on its stream."""
    want = np.zeros(len(partition.buckets), dtype=np.int64)
    latest = np.zeros(compact.num_streams, dtype=np.int64)
    for b in queue(compact, partition):
        stream = compact.stream[partition.member_list[partition.member_begin[b]]]
        want[b] = latest[stream]
        latest[stream] = partition.need_gap[b]
    return want


@nb.njit(cache=True)  # type: ignore[untyped-decorator]
def _want_gaps(reached, need_gap, transfer_ticks, stream, order, num_streams, lead):  # type: ignore[no-untyped-def]
    """Latest launches that still end before the need, one after the other on each stream, then ``lead`` transfers earlier."""
    want = np.zeros(len(need_gap), np.int64)
    latest = np.full(num_streams, UNLIMITED)
    for i in range(len(order) - 1, -1, -1):
        b = order[i]
        begin = min(reached[need_gap[b]], latest[stream[b]]) - transfer_ticks[b]
        latest[stream[b]] = begin
        at = begin - lead * transfer_ticks[b]
        want[b] = 0 if at <= 0 else np.searchsorted(reached, at, side="right") - 1
    return want


def queue(compact: Compact, partition: Partition) -> Ints:
    """Return the gather buckets in order of need: the order in which they are launched."""
    first = partition.member_list[partition.member_begin[:-1]]
    moving = (compact.kind[first] == ALL_GATHER) & ~compact.on_path[first]
    gathers = np.nonzero(moving)[0]
    order: Ints = gathers[np.lexsort((gathers, partition.need_gap[gathers]))]
    return order


def construct(compact: Compact, partition: Partition, policy: Policy, caps: Caps, memory_cap_bytes: int | None = None) -> Program:
    """Return the program that ``policy`` makes of ``partition``; ``memory_cap_bytes`` overrides the cap to steer by."""
    cap = caps.memory_cap_bytes if memory_cap_bytes is None else memory_cap_bytes
    p, c = partition, compact
    operation, argument, length = _construct(
        want_gaps(compact, partition, policy, caps), queue(compact, partition),
        UNLIMITED if cap is None else np.int64(max(cap - c.kept_bytes, 0)),
        UNLIMITED if caps.in_flight_cap_bytes is None else np.int64(caps.in_flight_cap_bytes),
        policy.copy_out_early, policy.wait_reductions_at_once,
        p.bucket_of, p.member_begin, p.member_list, p.launch_ticks, p.transfer_ticks, p.copy_in_ticks, p.in_buffer_bytes, p.out_buffer_bytes,
        p.ready_gap, p.need_gap,
        c.spine_ticks, c.base_gap_bytes, c.base_spine_bytes, c.kind, c.stream, c.input_bytes, c.output_bytes, c.copy_out_ticks, c.on_path,
        c.need_gap, c.after_begin, c.after_list, c.prologue_begin, c.prologue_list, c.epilogue_begin, c.epilogue_list, c.float_ticks,
        c.storage_bytes, c.storage_birth_spine, c.storage_last_spine, c.input_storage, c.output_storage, c.num_streams,
    )  # fmt: skip
    return Program(partition=partition, operation=operation[:length], argument=argument[:length])


@nb.njit(cache=True)  # type: ignore[untyped-decorator]
def _reserve(
    early, bucket_of, member_begin, out_buffer_bytes, ready_gap, need_gap, base_gap, base_spine, kind, input_bytes, output_bytes, on_path,
    need_of, storage_bytes, birth_spine, last_spine, input_storage, output_storage,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Bytes in use around each spine node when every collective is launched and waited for at the last moment."""
    num_spine = len(base_spine) - 1
    delta = np.zeros(num_spine + 3, np.int64)
    for c in range(len(kind)):
        b = bucket_of[c]
        several = member_begin[b + 1] - member_begin[b] > 1
        out = output_storage[c]
        last = last_spine[out] if out >= 0 else -1
        if kind[c] == ALL_GATHER or on_path[c]:
            begin = need_gap[b] if (early and several) or not several else need_of[c]
            delta[begin] += output_bytes[c]
            delta[max(begin, last) + 1] -= output_bytes[c]
            if several:
                until = need_gap[b] if early else need_of[c]
                delta[need_gap[b]] += output_bytes[c]
                delta[until + 1] -= output_bytes[c]
            elif not on_path[c]:
                delta[begin] += input_bytes[c]
                delta[begin + 1] -= input_bytes[c]
        else:
            begin = ready_gap[b]
            delta[begin] += output_bytes[c]
            delta[max(begin, last) + 1] -= output_bytes[c]
        s = input_storage[c]
        if s >= 0 and birth_spine[s] >= 0:
            until = max(last_spine[s], ready_gap[b])
            delta[birth_spine[s]] += storage_bytes[s]
            delta[until + 1] -= storage_bytes[s]
            if several and not on_path[c]:
                delta[ready_gap[b]] += input_bytes[c]
                delta[ready_gap[b] + 1] -= input_bytes[c]
    used = np.zeros(num_spine + 1, np.int64)
    live = 0
    for k in range(num_spine + 1):
        live += delta[k]
        used[k] = live + max(base_gap[k], base_spine[k])
    return used


@nb.njit(cache=True)  # type: ignore[untyped-decorator]
def _construct(
    want, gathers, cap, in_flight_cap, early, at_once,
    bucket_of, member_begin, member_list, launch_ticks, transfer_ticks, copy_in_ticks, in_buffer_bytes, out_buffer_bytes, ready_gap, need_gap,
    spine_ticks, base_gap, base_spine, kind, stream, input_bytes, output_bytes, copy_out_ticks, on_path,
    need_of, after_begin, after_list, prologue_begin, prologue_list, epilogue_begin, epilogue_list, float_ticks,
    storage_bytes, birth_spine, last_spine, input_storage, output_storage, num_streams,
):  # type: ignore[no-untyped-def]  # fmt: skip
    num_spine = len(spine_ticks)
    num_buckets = len(launch_ticks)
    num_collectives = len(kind)
    used = _reserve(
        early, bucket_of, member_begin, out_buffer_bytes, ready_gap, need_gap, base_gap, base_spine, kind, input_bytes, output_bytes, on_path,
        need_of, storage_bytes, birth_spine, last_spine, input_storage, output_storage,
    )  # fmt: skip
    operation = np.empty(num_spine + 2 * num_buckets + num_collectives, np.int64)
    argument = np.empty(num_spine + 2 * num_buckets + num_collectives, np.int64)
    n = 0
    # figures of buckets
    launch_work = np.zeros(num_buckets, np.int64)
    wait_work = np.zeros(num_buckets, np.int64)
    ahead_bytes = np.zeros(num_buckets, np.int64)  # alive between an early launch and the need
    held_bytes = np.zeros(num_buckets, np.int64)  # alive between the launch and the wait of a reduction, beyond its output
    flying_bytes = np.zeros(num_buckets, np.int64)
    gathered = np.zeros(num_buckets, np.bool_)
    for b in range(num_buckets):
        launch_work[b] = launch_ticks[b] + copy_in_ticks[b]
        several = member_begin[b + 1] - member_begin[b] > 1
        gathered[b] = kind[member_list[member_begin[b]]] == ALL_GATHER and not on_path[member_list[member_begin[b]]]
        for j in range(member_begin[b], member_begin[b + 1]):
            c = member_list[j]
            for q in range(prologue_begin[c], prologue_begin[c + 1]):
                launch_work[b] += float_ticks[prologue_list[q]]
            if not (several and gathered[b]):
                for q in range(epilogue_begin[c], epilogue_begin[c + 1]):
                    wait_work[b] += float_ticks[epilogue_list[q]]
            if not on_path[c]:
                flying_bytes[b] += output_bytes[c]
            ahead_bytes[b] += output_bytes[c] + (0 if several else input_bytes[c])
            held_bytes[b] += input_bytes[c]
        if kind[member_list[member_begin[b]]] == ALL_REDUCE:
            held_bytes[b] = 0
    # launches by readiness (all but moving gathers), waits by need, late copy-outs by need
    by_ready = np.argsort(ready_gap, kind="mergesort")
    by_need = np.argsort(need_gap, kind="mergesort")
    copies = np.argsort(need_of, kind="mergesort")
    next_ready, next_need, next_copy, next_gather = 0, 0, 0, 0
    launched = np.zeros(num_buckets, np.bool_)
    waited = np.zeros(num_buckets, np.bool_)
    copied = np.zeros(num_collectives, np.bool_)
    transfer_end = np.zeros(num_buckets, np.int64)
    stream_free = np.zeros(num_streams, np.int64)
    pending = np.empty(num_buckets, np.int64)  # ready, but another wait must come first
    num_pending = 0
    outstanding = np.empty(num_buckets, np.int64)  # reductions launched and not waited for, in order
    num_outstanding = 0
    stack = np.empty(num_buckets + 1, np.int64)
    held, in_flight, t = 0, 0, 0
    for g in range(num_spine + 1):
        last_gap = g == num_spine
        # launches that became ready
        while next_ready < num_buckets and ready_gap[by_ready[next_ready]] <= g:
            b = by_ready[next_ready]
            if not gathered[b]:
                pending[num_pending] = b
                num_pending += 1
            next_ready += 1
        moved = True
        while moved:
            moved = False
            # waits for reductions that are done, or whose bytes are needed
            i = 0
            while i < num_outstanding:
                b = outstanding[i]
                short = used[g] + held > cap
                if transfer_end[b] <= t or short or last_gap or at_once:
                    t = max(t, transfer_end[b]) + wait_work[b]
                    operation[n], argument[n] = 2, b
                    n += 1
                    waited[b] = True
                    held -= held_bytes[b]
                    in_flight -= flying_bytes[b]
                    for j in range(i, num_outstanding - 1):
                        outstanding[j] = outstanding[j + 1]
                    num_outstanding -= 1
                    moved = True
                else:
                    i += 1
            i = 0
            while i < num_pending:
                b = pending[i]
                free_to_go = True
                for j in range(member_begin[b], member_begin[b + 1]):
                    for q in range(after_begin[member_list[j]], after_begin[member_list[j] + 1]):
                        if not waited[bucket_of[after_list[q]]] or not copied_or_single(
                            after_list[q], bucket_of, member_begin, kind, copied
                        ):
                            free_to_go = False
                if launched[b]:
                    free_to_go = True
                elif free_to_go:
                    while in_flight + flying_bytes[b] > in_flight_cap and num_outstanding > 0:
                        d = outstanding[0]
                        t = max(t, transfer_end[d]) + wait_work[d]
                        operation[n], argument[n] = 2, d
                        n += 1
                        waited[d] = True
                        held -= held_bytes[d]
                        in_flight -= flying_bytes[d]
                        for j in range(num_outstanding - 1):
                            outstanding[j] = outstanding[j + 1]
                        num_outstanding -= 1
                    t += launch_work[b]
                    s = stream[member_list[member_begin[b]]]
                    transfer_end[b] = max(t, stream_free[s]) + transfer_ticks[b]
                    stream_free[s] = transfer_end[b]
                    operation[n], argument[n] = 1, b
                    n += 1
                    launched[b] = True
                    in_flight += flying_bytes[b]
                    if need_gap[b] >= num_spine:
                        outstanding[num_outstanding] = b
                        num_outstanding += 1
                        held += held_bytes[b]
                if free_to_go:
                    for j in range(i, num_pending - 1):
                        pending[j] = pending[j + 1]
                    num_pending -= 1
                    moved = True
                else:
                    i += 1
        for turn in range(2):
            # gathers ahead of need, in order of need
            while next_gather < len(gathers):
                b = gathers[next_gather]
                if launched[b]:
                    next_gather += 1
                    continue
                needed_now = need_gap[b] <= g
                if want[b] > g or ready_gap[b] > g:
                    break
                if in_flight + flying_bytes[b] > in_flight_cap:
                    break
                blocked = False
                for j in range(member_begin[b], member_begin[b + 1]):
                    for q in range(after_begin[member_list[j]], after_begin[member_list[j] + 1]):
                        if not waited[bucket_of[after_list[q]]]:
                            blocked = True
                if blocked:
                    break
                room = used[g] + held + ahead_bytes[b] <= cap
                if room:
                    for k in range(g + 1, min(need_gap[b], num_spine)):
                        if used[k] + ahead_bytes[b] > cap:
                            room = False
                            break
                if not room and not needed_now:
                    break
                for k in range(g, need_gap[b]):
                    used[k] += ahead_bytes[b]
                t += launch_work[b]
                s = stream[member_list[member_begin[b]]]
                transfer_end[b] = max(t, stream_free[s]) + transfer_ticks[b]
                stream_free[s] = transfer_end[b]
                operation[n], argument[n] = 1, b
                n += 1
                launched[b] = True
                in_flight += flying_bytes[b]
                next_gather += 1
            if turn == 1:
                break
            # waits that the spine node needs, launched now where they are not yet
            while next_need < num_buckets and (need_gap[by_need[next_need]] <= g or last_gap):
                top = 0
                stack[0] = by_need[next_need]
                next_need += 1
                while top >= 0:
                    b = stack[top]
                    if waited[b]:
                        top -= 1
                        continue
                    if not launched[b]:
                        deeper = False
                        for j in range(member_begin[b], member_begin[b + 1]):
                            for q in range(after_begin[member_list[j]], after_begin[member_list[j] + 1]):
                                d = bucket_of[after_list[q]]
                                if not waited[d]:
                                    top += 1
                                    stack[top] = d
                                    deeper = True
                                    break
                            if deeper:
                                break
                        if deeper:
                            continue
                        while in_flight + flying_bytes[b] > in_flight_cap and num_outstanding > 0:
                            d = outstanding[0]
                            t = max(t, transfer_end[d]) + wait_work[d]
                            operation[n], argument[n] = 2, d
                            n += 1
                            waited[d] = True
                            held -= held_bytes[d]
                            in_flight -= flying_bytes[d]
                            for j in range(num_outstanding - 1):
                                outstanding[j] = outstanding[j + 1]
                            num_outstanding -= 1
                        t += launch_work[b]
                        s = stream[member_list[member_begin[b]]]
                        transfer_end[b] = max(t, stream_free[s]) + transfer_ticks[b]
                        stream_free[s] = transfer_end[b]
                        operation[n], argument[n] = 1, b
                        n += 1
                        launched[b] = True
                        in_flight += flying_bytes[b]
                    else:
                        for i in range(num_outstanding):
                            if outstanding[i] == b:
                                for j in range(i, num_outstanding - 1):
                                    outstanding[j] = outstanding[j + 1]
                                num_outstanding -= 1
                                held -= held_bytes[b]
                                break
                    t = max(t, transfer_end[b]) + wait_work[b]
                    operation[n], argument[n] = 2, b
                    n += 1
                    waited[b] = True
                    in_flight -= flying_bytes[b]
                    top -= 1
                    if member_begin[b + 1] - member_begin[b] > 1 and kind[member_list[member_begin[b]]] == ALL_GATHER:
                        for j in range(member_begin[b], member_begin[b + 1]):
                            c = member_list[j]
                            if early or need_of[c] <= g or need_of[c] >= num_spine:
                                operation[n], argument[n] = 3, c
                                n += 1
                                copied[c] = True
                                t += copy_out_ticks[c]
            # copy-outs of members that are needed now
            while next_copy < num_collectives and need_of[copies[next_copy]] <= g:
                c = copies[next_copy]
                b = bucket_of[c]
                if not copied[c] and waited[b] and member_begin[b + 1] - member_begin[b] > 1 and kind[c] == ALL_GATHER:
                    operation[n], argument[n] = 3, c
                    n += 1
                    copied[c] = True
                    t += copy_out_ticks[c]
                next_copy += 1
        if not last_gap:
            operation[n], argument[n] = 0, g
            n += 1
            t += spine_ticks[g]
    return operation, argument, n


@nb.njit(cache=True)  # type: ignore[untyped-decorator]
def copied_or_single(c, bucket_of, member_begin, kind, copied):  # type: ignore[no-untyped-def]
    """Whether the result of a waited collective exists: it is alone, a view of its bucket, or copied out."""
    b = bucket_of[c]
    return copied[c] or member_begin[b + 1] - member_begin[b] == 1 or kind[c] != ALL_GATHER
