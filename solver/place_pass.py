"""The forward pass over the spine, compiled. Structures are named tuples of arrays, which numba takes.

A gather is launched as soon as its want gap is reached and memory allows it all the way to its need; otherwise at its need. A
reduction is launched when its inputs are ready and waited for when it is done, or earlier where the bytes it holds are needed.
"""

from typing import NamedTuple

import numpy as np

from apsched.solver.compact import Bools, Ints
from apsched.solver.compiled import compiled
from apsched.solver.evaluate import COPY_OUT, LAUNCH, SPINE, WAIT
from apsched.solver.policies import UNLIMITED

TIME, HELD, FLYING, LENGTH, OUTSTANDING, FIRST_END = 0, 1, 2, 3, 4, 5
BLOCK = 64
"""Spine nodes of a block: sums and maxima over long ranges go block by block."""


class Units(NamedTuple):
    """What the pass knows of buckets (B), collectives (C) and the spine."""

    spine_ticks: Ints
    bucket_of: Ints
    member_begin: Ints
    member_list: Ints
    after_begin: Ints
    after_list: Ints
    need_of: Ints
    """(C,) need gap."""
    copy_out_work: Ints
    """(C,) copy-out and epilogue."""
    stream: Ints
    """(B,)"""
    gathered: Bools
    """(B,) a gather that can move."""
    copied: Bools
    """(B,) its members are copied out."""
    want: Ints
    """(B,) gap where a gather wants to be launched."""
    ready: Ints
    """(B,) gap where a gather can, and anything else will, be launched."""
    need: Ints
    transfer_ticks: Ints
    launch_work: Ints
    wait_work: Ints
    ahead_bytes: Ints
    """(B,) alive between an early launch of a gather and its need."""
    held_bytes: Ints
    """(B,) alive between the launch and the wait of a reduction, beyond its output."""
    flying_bytes: Ints
    caps: Ints
    """Memory cap beside what the caller keeps, in-flight cap."""


class State(NamedTuple):
    """Where the pass is."""

    clock: Ints
    """TIME, HELD bytes, FLYING bytes, LENGTH of the program, number of OUTSTANDING reductions, FIRST_END among them."""
    operation: Ints
    argument: Ints
    used: Ints
    """(m+1,) bytes in use around each spine node, with everything yet to come just in time; beside what its block adds."""
    block_added: Ints
    """(m // BLOCK + 1,) bytes to add to every node of a block."""
    block_most: Ints
    """The most bytes in use in a block, its added bytes included."""
    transfer_end: Ints
    stream_free: Ints
    launched: Bools
    waited: Bools
    out: Bools
    """(C,) copied out."""
    outstanding: Ints
    """Reductions launched and not waited for, oldest first."""


@compiled
def place(u: Units, s: State, gathers: Ints, early: bool, at_once: bool, in_stalls: bool) -> None:
    """Walk the gaps: launch what is ready, prefetch, wait for what the spine node needs, run it."""
    num_spine, num_buckets = len(u.spine_ticks), len(u.need)
    by_ready = np.argsort(u.ready, kind="mergesort")
    by_need = np.argsort(u.need, kind="mergesort")
    copies = np.argsort(u.need_of, kind="mergesort")
    pending = np.empty(num_buckets, np.int64)  # ready, but another wait must come first
    num_pending, next_ready, next_need, next_copy, next_gather, next_wait = 0, 0, 0, 0, 0, 0
    for g in range(num_spine + 1):
        last = g == num_spine
        while next_ready < num_buckets and u.ready[by_ready[next_ready]] <= g:
            if not u.gathered[by_ready[next_ready]]:
                pending[num_pending] = by_ready[next_ready]
                num_pending += 1
            next_ready += 1
        # calls hand over many arrays, so most gaps, where nothing happens, make none
        live = s.used[g] + s.block_added[g // BLOCK] + s.clock[HELD]
        moved = num_pending > 0 or at_once or last or s.clock[FIRST_END] <= s.clock[TIME] or live > u.caps[0]
        while moved:
            moved = _drain(u, s, g, at_once or last)
            kept = 0
            for i in range(num_pending):
                b = pending[i]
                if not s.launched[b] and _blocked(u, s, b):
                    pending[kept] = b
                    kept += 1
                elif not s.launched[b]:
                    _make_way(u, s, b)
                    _launch(u, s, b)
                    moved = True
            num_pending = kept
        if next_gather < len(gathers) and u.want[gathers[next_gather]] <= g:
            next_gather = _prefetch(u, s, gathers, next_gather, g)
        before = s.clock[LENGTH]
        while next_need < num_buckets and (u.need[by_need[next_need]] <= g or last):
            if in_stalls:
                next_wait = _fill_stall(u, s, gathers, next_wait, by_need[next_need])
            _await(u, s, by_need[next_need], g, early)
            next_need += 1
        while next_copy < len(copies) and u.need_of[copies[next_copy]] <= g:
            c = copies[next_copy]
            if u.copied[u.bucket_of[c]] and s.waited[u.bucket_of[c]] and not s.out[c]:
                _copy_out(u, s, c)
            next_copy += 1
        if s.clock[LENGTH] > before and next_gather < len(gathers) and u.want[gathers[next_gather]] <= g:
            next_gather = _prefetch(u, s, gathers, next_gather, g)
        if not last:
            s.operation[s.clock[LENGTH]], s.argument[s.clock[LENGTH]] = SPINE, g
            s.clock[LENGTH] += 1
            s.clock[TIME] += u.spine_ticks[g]


@compiled
def _emit(s: State, operation: int, argument: int) -> None:
    s.operation[s.clock[LENGTH]] = operation
    s.argument[s.clock[LENGTH]] = argument
    s.clock[LENGTH] += 1


@compiled
def _launch(u: Units, s: State, b: int) -> None:
    _emit(s, LAUNCH, b)
    s.clock[TIME] += u.launch_work[b]
    stream = u.stream[b]
    s.transfer_end[b] = max(s.clock[TIME], s.stream_free[stream]) + u.transfer_ticks[b]
    s.stream_free[stream] = s.transfer_end[b]
    s.launched[b] = True
    s.clock[FLYING] += u.flying_bytes[b]
    if u.need[b] >= len(u.spine_ticks) and not u.gathered[b]:
        s.outstanding[s.clock[OUTSTANDING]] = b
        s.clock[OUTSTANDING] += 1
        s.clock[HELD] += u.held_bytes[b]
        s.clock[FIRST_END] = min(s.clock[FIRST_END], s.transfer_end[b])


@compiled
def _wait(u: Units, s: State, b: int) -> None:
    _emit(s, WAIT, b)
    s.clock[TIME] = max(s.clock[TIME], s.transfer_end[b]) + u.wait_work[b]
    s.waited[b] = True
    s.clock[FLYING] -= u.flying_bytes[b]
    kept = 0
    s.clock[FIRST_END] = UNLIMITED
    for i in range(s.clock[OUTSTANDING]):
        other = s.outstanding[i]
        if other == b:
            s.clock[HELD] -= u.held_bytes[b]
        else:
            s.outstanding[kept] = other
            s.clock[FIRST_END] = min(s.clock[FIRST_END], s.transfer_end[other])
            kept += 1
    s.clock[OUTSTANDING] = kept


@compiled
def _copy_out(u: Units, s: State, c: int) -> None:
    _emit(s, COPY_OUT, c)
    s.clock[TIME] += u.copy_out_work[c]
    s.out[c] = True


@compiled
def _blocked(u: Units, s: State, b: int) -> bool:
    """Whether a member of ``b`` depends on a collective whose result is not there yet."""
    for j in range(u.member_begin[b], u.member_begin[b + 1]):
        for q in range(u.after_begin[u.member_list[j]], u.after_begin[u.member_list[j] + 1]):
            d = u.after_list[q]
            if not s.waited[u.bucket_of[d]] or (u.copied[u.bucket_of[d]] and not s.out[d]):
                return True
    return False


@compiled
def _drain(u: Units, s: State, g: int, all_of_them: bool) -> bool:
    """Wait for reductions that are done, or whose bytes are needed now; return whether there was one."""
    found = False
    while s.clock[OUTSTANDING] > 0:
        short = all_of_them or _most(s, g, g + 1) + s.clock[HELD] > u.caps[0]
        if not short and s.clock[FIRST_END] > s.clock[TIME]:
            break
        for i in range(s.clock[OUTSTANDING]):
            if short or s.transfer_end[s.outstanding[i]] <= s.clock[TIME]:
                _wait(u, s, s.outstanding[i])
                found = True
                break
    return found


@compiled
def _make_way(u: Units, s: State, b: int) -> None:
    """Wait for the oldest reductions until ``b`` fits under the in-flight cap."""
    while s.clock[FLYING] + u.flying_bytes[b] > u.caps[1] and s.clock[OUTSTANDING] > 0:
        _wait(u, s, s.outstanding[0])


@compiled
def _prefetch(u: Units, s: State, gathers: Ints, following: int, g: int) -> int:
    """Launch gathers in order of need while they want to, may, and fit; return the place of the next one in the queue."""
    num_spine = len(u.spine_ticks)
    while following < len(gathers):
        b = gathers[following]
        if s.launched[b]:
            following += 1
            continue
        if u.want[b] > g or u.ready[b] > g or s.clock[FLYING] + u.flying_bytes[b] > u.caps[1] or _blocked(u, s, b):
            break
        most = max(_most(s, g, g + 1) + s.clock[HELD], _most(s, g + 1, min(u.need[b], num_spine)))
        if most + u.ahead_bytes[b] > u.caps[0] and u.need[b] > g:
            break
        _add(s, g, u.need[b], u.ahead_bytes[b])
        _launch(u, s, b)
        following += 1
    return following


@compiled
def _most(s: State, first: int, past: int) -> int:
    """Return the most bytes in use around spine nodes [first, past)."""
    most = 0
    k = first
    while k < past:
        if k % BLOCK == 0 and k + BLOCK <= past:
            most = max(most, s.block_most[k // BLOCK])
            k += BLOCK
        else:
            most = max(most, s.used[k] + s.block_added[k // BLOCK])
            k += 1
    return most


@compiled
def _add(s: State, first: int, past: int, size_bytes: int) -> None:
    """Add bytes to spine nodes [first, past)."""
    k = first
    while k < past:
        block = k // BLOCK
        if k % BLOCK == 0 and k + BLOCK <= past:
            s.block_added[block] += size_bytes
            s.block_most[block] += size_bytes
            k += BLOCK
        else:
            end = min(past, (block + 1) * BLOCK)
            while k < end:
                s.used[k] += size_bytes
                s.block_most[block] = max(s.block_most[block], s.used[k] + s.block_added[block])
                k += 1


@compiled
def _fill_stall(u: Units, s: State, gathers: Ints, following: int, b: int) -> int:
    """Copy buckets out that have arrived, while the stream stands still for ``b`` anyway; return the next gather to look at."""
    while following < len(gathers):
        d = gathers[following]
        if not s.waited[d]:
            work = 0
            for j in range(u.member_begin[d], u.member_begin[d + 1]):
                work += u.copy_out_work[u.member_list[j]]
            arrived = s.launched[d] and s.transfer_end[d] <= s.clock[TIME]
            if not s.launched[b] or not arrived or s.clock[TIME] + work > s.transfer_end[b]:
                break
            _wait(u, s, d)
            if u.copied[d]:
                for j in range(u.member_begin[d], u.member_begin[d + 1]):
                    _copy_out(u, s, u.member_list[j])
        following += 1
    return following


@compiled
def _await(u: Units, s: State, needed: int, g: int, early: bool) -> None:
    """Wait for ``needed``, after launching it and waiting for what it depends on, where that is yet to be done."""
    stack = [needed]
    while len(stack) > 0:
        b = stack[-1]
        if s.waited[b]:
            stack.pop()
            continue
        if not s.launched[b]:
            deeper = -1
            for j in range(u.member_begin[b], u.member_begin[b + 1]):
                for q in range(u.after_begin[u.member_list[j]], u.after_begin[u.member_list[j] + 1]):
                    if not s.waited[u.bucket_of[u.after_list[q]]]:
                        deeper = u.bucket_of[u.after_list[q]]
            if deeper >= 0:
                stack.append(deeper)
                continue
            _make_way(u, s, b)
            _launch(u, s, b)
        stack.pop()
        _wait(u, s, b)
        if u.copied[b]:
            for j in range(u.member_begin[b], u.member_begin[b + 1]):
                c = u.member_list[j]
                if early or u.need_of[c] <= g or u.need_of[c] >= len(u.spine_ticks) or len(stack) > 0:
                    _copy_out(u, s, c)
