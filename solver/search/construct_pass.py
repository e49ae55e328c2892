"""The forward pass over the compute order, compiled: rows of buckets in, a program out.

A gather is launched as soon as its want slot is reached and memory allows it all the way to its
need; otherwise at its need. A reduction is launched when its inputs are ready and waited for when
it is done, or earlier where the bytes it holds, or its result, are needed. Behind the last compute
node all launches come first; only a collective that holds one up is waited for before that.

Thousands of passes make a search, so a slot where nothing happens costs next to nothing, and so
does a gather that memory holds back: bytes in use behind the pass only grow, so it is not looked at
again before the compute node that has no room for it.
"""

from typing import NamedTuple

import numpy as np

from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.program.program import COPY_OUT, LAUNCH, NODE, WAIT
from apsched.solver.search.launch_policy import UNLIMITED

NUM_COLUMNS = 20
(
    STREAM, FIRST, PAST, GATHERED, COPIED, WANT, READY, NEED, TRANSFER, LAUNCH_WORK, WAIT_WORK,
    AHEAD, HELD, FREED, FLYING, LATEST, STAYS, FOLLOWS, FINISH, STATUS,
) = range(NUM_COLUMNS)  # fmt: skip
"""Columns of a bucket's row:

====================
===============================================================================
STREAM                its stream
FIRST, PAST           its members among those of all buckets
GATHERED              1 for a gather that can move
COPIED                1 where its members are copied out
WANT                  slot where a gather wants to be launched
READY                 slot where a gather can, and anything else will, be launched
NEED                  slot where it must have been waited for
TRANSFER              ticks on its stream
LAUNCH_WORK           ticks of a launch on the compute stream, copy-in and prologues included
WAIT_WORK             ticks of the epilogues that stand right behind its wait
AHEAD                 bytes alive between an early launch of a gather and its need
HELD                  bytes alive between the launch and the wait of a reduction, beyond its output
FREED                 bytes that are in use until a reduction is launched when it is ready: its
                      inputs, and the buffer that they fill
FLYING                bytes that count against the cap on bytes in flight
LATEST                slot where the user's plan wants it launched; the number of compute nodes
                      where it says nothing
STAYS                 1 where its wait keeps its place: by the plan, or as compute waits for it
FOLLOWS               1 where a member depends on another collective
FINISH                tick at which its transfer ends; the pass fills it
STATUS                0, launched or waited for; the pass fills it
====================
===============================================================================
"""
_NUM_SCALARS = 6
_CLOCK, _BYTES_HELD, _BYTES_FLYING, _LENGTH, _OUTSTANDING, _FIRST_END = range(_NUM_SCALARS)
"""Places in the clock; behind them stands for each stream the tick at which it is free."""
_LAUNCHED, _WAITED = 1, 2
BLOCK = 64
"""Compute nodes of a block: sums and maxima over long ranges go block by block."""


class Units(NamedTuple):
    """Arrays of buckets (B), collectives (C) and the compute order (m), which the pass reads."""

    rows: Ints
    """(B, NUM_COLUMNS)"""
    compute_ticks: Ints
    member_list: Ints
    bucket_of: Ints
    after_begin: Ints
    after_list: Ints
    need_of: Ints
    """(C,) need slot."""
    by_need_of: Ints
    """(C,) collectives by need slot."""
    copy_out_work: Ints
    """(C,) copy-out and epilogue."""
    gathers: Ints
    """Buckets of gathers that can move, in order of need; those that the plan launches are left
    out.
    """
    planned: Ints
    """Buckets that the plan launches, in order of their slots."""
    used: Ints
    """(m+1,) bytes in use around each compute node, with everything just in time."""
    memory_cap: int
    """Bytes, without those that the caller keeps."""
    in_flight_cap: int
    num_streams: int


@compiled
def place(u: Units, early: bool, at_once: bool, in_stalls: bool) -> tuple[Ints, Ints]:
    """Walk the slots: launch the ready buckets, prefetch, wait for the buckets that the compute
    node needs, run it; return operations and arguments.
    """
    rows, compute_ticks, bucket_of, member_list = (
        u.rows,
        u.compute_ticks,
        u.bucket_of,
        u.member_list,
    )
    after_begin, after_list, need_of, by_need_of = (
        u.after_begin,
        u.after_list,
        u.need_of,
        u.by_need_of,
    )
    copy_out_work, gathers, planned = u.copy_out_work, u.gathers, u.planned
    memory_cap, in_flight_cap = u.memory_cap, u.in_flight_cap
    num_compute, num_buckets, num_collectives = len(compute_ticks), len(rows), len(need_of)
    used = u.used.copy()
    block_added = np.zeros(num_compute // BLOCK + 1, np.int64)
    block_most = np.zeros(num_compute // BLOCK + 1, np.int64)
    for k in range(num_compute + 1):
        block_most[k // BLOCK] = max(block_most[k // BLOCK], used[k])
    program = np.empty((2, num_compute + 2 * num_buckets + num_collectives), np.int64)
    clock = np.zeros(_NUM_SCALARS + u.num_streams, np.int64)
    clock[_FIRST_END] = UNLIMITED
    out = np.zeros(num_collectives, np.bool_)
    outstanding = np.empty(num_buckets, np.int64)
    by_ready, by_need = by_slot(rows[:, READY], num_compute), by_slot(rows[:, NEED], num_compute)
    pending = np.empty(num_buckets, np.int64)  # ready, but another wait must come first
    stack = np.empty(num_buckets + 1, np.int64)
    num_pending = next_ready = next_need = next_copy = next_gather = next_wait = next_planned = 0
    room_from = 0  # no room for the next gather before this slot
    for g in range(num_compute + 1):
        last = g == num_compute
        while next_ready < num_buckets and rows[by_ready[next_ready], READY] <= g:
            if not rows[by_ready[next_ready], GATHERED]:
                pending[num_pending] = by_ready[next_ready]
                num_pending += 1
            next_ready += 1
        in_use = used[g] + block_added[g // BLOCK]
        moved = (
            num_pending > 0
            or at_once
            or last
            or clock[_FIRST_END] <= clock[_CLOCK]
            or in_use + clock[_BYTES_HELD] > memory_cap
        )
        while moved:
            every = at_once or (last and num_pending == 0)
            moved = _wait_for_done(rows, program, clock, outstanding, every, memory_cap - in_use)
            for turn in range(2):  # first what the compute order needs
                kept = 0
                for i in range(num_pending):
                    b = pending[i]
                    if rows[b, STATUS]:
                        continue
                    if (turn == 0 and rows[b, NEED] >= num_compute) or _blocked(
                        rows, member_list, after_begin, after_list, bucket_of, out, b
                    ):
                        pending[kept] = b
                        kept += 1
                        continue
                    while (
                        clock[_BYTES_FLYING] + rows[b, FLYING] > in_flight_cap
                        and clock[_OUTSTANDING] > 0
                    ):
                        _wait(rows, program, clock, outstanding, outstanding[0])
                    _launch(rows, program, clock, outstanding, b)
                    if g == rows[b, READY]:  # from here on they are held, until the wait
                        used[g] -= rows[b, FREED]
                        in_use -= rows[b, FREED]
                    moved = True
                num_pending = kept
            if last and not moved:  # wait for what holds a launch up, for the others later
                awaited = _holding_up(
                    rows, member_list, after_begin, after_list, bucket_of, pending[:num_pending]
                )
                if awaited >= 0:
                    _wait(rows, program, clock, outstanding, awaited)
                    moved = True
        for again in range(2):
            # launch gathers in order of need while they want to, may, and fit
            while g >= room_from and next_gather < len(gathers):
                b = gathers[next_gather]
                if rows[b, STATUS]:
                    next_gather += 1
                    continue
                if (
                    rows[b, WANT] > g
                    or rows[b, READY] > g
                    or clock[_BYTES_FLYING] + rows[b, FLYING] > in_flight_cap
                ):
                    break
                if _blocked(rows, member_list, after_begin, after_list, bucket_of, out, b):
                    break
                if next_planned < len(planned):  # launched here, too, and needed before b
                    p = planned[next_planned]
                    if rows[p, LATEST] <= g and rows[p, NEED] <= rows[b, NEED]:
                        flying = clock[_BYTES_FLYING] + rows[p, FLYING]
                        if flying > in_flight_cap or rows[p, FOLLOWS]:
                            break
                        if not rows[p, STATUS]:
                            _launch(rows, program, clock, outstanding, p)
                        next_planned += 1
                        continue
                if rows[b, NEED] > g:
                    room = memory_cap - rows[b, AHEAD]
                    if used[g] + block_added[g // BLOCK] + clock[_BYTES_HELD] > room:
                        break
                    room_from = 1 + _last_above(
                        used, block_added, block_most, g + 1, min(rows[b, NEED], num_compute), room
                    )
                    if room_from > g:
                        break
                _add(used, block_added, block_most, g, rows[b, NEED], rows[b, AHEAD])
                _launch(rows, program, clock, outstanding, b)
                next_gather += 1
            if again:
                break
            before = clock[_LENGTH]
            while True:
                launch_only = (
                    next_planned < len(planned) and rows[planned[next_planned], LATEST] <= g
                )
                if launch_only:
                    needed = planned[next_planned]
                    next_planned += 1
                elif next_need < num_buckets and (rows[by_need[next_need], NEED] <= g or last):
                    needed = by_need[next_need]
                    next_need += 1
                else:
                    break
                if in_stalls and not launch_only:
                    # copy buckets out that have arrived, while the stream stalls for
                    # ``needed`` anyway
                    while next_wait < len(gathers):
                        d = gathers[next_wait]
                        if rows[d, STATUS] != _WAITED:
                            work = 0
                            for j in range(rows[d, FIRST], rows[d, PAST]):
                                work += copy_out_work[member_list[j]]
                            arrived = (
                                rows[d, STATUS] == _LAUNCHED and rows[d, FINISH] <= clock[_CLOCK]
                            )
                            if (
                                not rows[needed, STATUS]
                                or not arrived
                                or clock[_CLOCK] + work > rows[needed, FINISH]
                            ):
                                break
                            _wait(rows, program, clock, outstanding, d)
                            if rows[d, COPIED]:
                                for j in range(rows[d, FIRST], rows[d, PAST]):
                                    _copy_out(program, clock, copy_out_work, out, member_list[j])
                        next_wait += 1
                # wait for it, after launching it and waiting for what it depends on, where that is
                # yet to be done
                stack[0] = needed
                depth = 1
                while depth > 0:
                    b = stack[depth - 1]
                    if rows[b, STATUS] == _WAITED or (
                        launch_only and depth == 1 and rows[b, STATUS]
                    ):
                        depth -= 1
                        continue
                    if not rows[b, STATUS]:
                        deeper = _first_blocking(
                            rows, member_list, after_begin, after_list, bucket_of, b
                        )
                        if deeper >= 0:
                            stack[depth] = deeper
                            depth += 1
                            continue
                        for j in range(rows[b, FIRST], rows[b, PAST]):
                            for q in range(
                                after_begin[member_list[j]], after_begin[member_list[j] + 1]
                            ):
                                if (
                                    rows[bucket_of[after_list[q]], COPIED]
                                    and not out[after_list[q]]
                                ):
                                    _copy_out(program, clock, copy_out_work, out, after_list[q])
                        while (
                            clock[_BYTES_FLYING] + rows[b, FLYING] > in_flight_cap
                            and clock[_OUTSTANDING] > 0
                        ):
                            _wait(rows, program, clock, outstanding, outstanding[0])
                        _launch(rows, program, clock, outstanding, b)
                        if launch_only and depth == 1:
                            break
                    depth -= 1
                    _wait(rows, program, clock, outstanding, b)
                    if rows[b, COPIED]:
                        for j in range(rows[b, FIRST], rows[b, PAST]):
                            c = member_list[j]
                            if early or need_of[c] <= g or need_of[c] >= num_compute or depth > 0:
                                _copy_out(program, clock, copy_out_work, out, c)
            while next_copy < num_collectives and need_of[by_need_of[next_copy]] <= g:
                c = by_need_of[next_copy]
                next_copy += 1
                b = bucket_of[c]
                if rows[b, COPIED] and rows[b, STATUS] == _WAITED and not out[c]:
                    _copy_out(program, clock, copy_out_work, out, c)
            if clock[_LENGTH] == before:
                break
        if not last:
            _emit(program, clock, NODE, g)
            clock[_CLOCK] += compute_ticks[g]
    return program[0, : clock[_LENGTH]].copy(), program[1, : clock[_LENGTH]].copy()


@compiled
def by_slot(slots: Ints, num_compute: int) -> Ints:
    """Return the indices of ``slots``, which are at most ``num_compute``, in ascending order of
    slot, ties as they come.
    """
    begin = np.zeros(num_compute + 2, np.int64)
    for g in slots:
        begin[g + 1] += 1
    for g in range(num_compute + 1):
        begin[g + 1] += begin[g]
    order = np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        order[begin[slots[i]]] = i
        begin[slots[i]] += 1
    return order


@compiled
def _emit(program: Ints, clock: Ints, operation: int, argument: int) -> None:
    program[0, clock[_LENGTH]] = operation
    program[1, clock[_LENGTH]] = argument
    clock[_LENGTH] += 1


@compiled
def _launch(rows: Ints, program: Ints, clock: Ints, outstanding: Ints, b: int) -> None:
    _emit(program, clock, LAUNCH, b)
    clock[_CLOCK] += rows[b, LAUNCH_WORK]
    free = _NUM_SCALARS + rows[b, STREAM]
    clock[free] = max(clock[_CLOCK], clock[free]) + rows[b, TRANSFER]
    rows[b, FINISH], rows[b, STATUS] = clock[free], _LAUNCHED
    clock[_BYTES_FLYING] += rows[b, FLYING]
    if not rows[b, GATHERED] and not rows[b, STAYS]:
        outstanding[clock[_OUTSTANDING]] = b
        clock[_OUTSTANDING] += 1
        clock[_BYTES_HELD] += rows[b, HELD]
        clock[_FIRST_END] = min(clock[_FIRST_END], rows[b, FINISH])


@compiled
def _wait(rows: Ints, program: Ints, clock: Ints, outstanding: Ints, awaited: int) -> None:
    _emit(program, clock, WAIT, awaited)
    clock[_CLOCK] = max(clock[_CLOCK], rows[awaited, FINISH]) + rows[awaited, WAIT_WORK]
    rows[awaited, STATUS] = _WAITED
    clock[_BYTES_FLYING] -= rows[awaited, FLYING]
    kept_ones = 0
    clock[_FIRST_END] = UNLIMITED
    for q in range(clock[_OUTSTANDING]):
        other = outstanding[q]
        if other == awaited:
            clock[_BYTES_HELD] -= rows[awaited, HELD]
        else:
            outstanding[kept_ones] = other
            clock[_FIRST_END] = min(clock[_FIRST_END], rows[other, FINISH])
            kept_ones += 1
    clock[_OUTSTANDING] = kept_ones


@compiled
def _copy_out(program: Ints, clock: Ints, copy_out_work: Ints, out: Bools, member: int) -> None:
    _emit(program, clock, COPY_OUT, member)
    clock[_CLOCK] += copy_out_work[member]
    out[member] = True


@compiled
def _first_blocking(
    rows: Ints,
    member_list: Ints,
    after_begin: Ints,
    after_list: Ints,
    bucket_of: Ints,
    waiting: int,
) -> int:
    """Return the last bucket that a member of ``waiting`` depends on and that has not been waited
    for; -1 for none.
    """
    found = -1
    if not rows[waiting, FOLLOWS]:
        return found
    for m in range(rows[waiting, FIRST], rows[waiting, PAST]):
        for q in range(after_begin[member_list[m]], after_begin[member_list[m] + 1]):
            if rows[bucket_of[after_list[q]], STATUS] != _WAITED:
                found = bucket_of[after_list[q]]
    return found


@compiled
def _wait_for_done(
    rows: Ints, program: Ints, clock: Ints, outstanding: Ints, every: bool, room_bytes: int
) -> bool:
    """Wait for reductions that are done, or for ``every`` one, or until those left hold no more
    than ``room_bytes``; return whether it waited.
    """
    moved = False
    while clock[_OUTSTANDING] > 0:
        short = every or clock[_BYTES_HELD] > room_bytes
        if not short and clock[_FIRST_END] > clock[_CLOCK]:
            break
        for i in range(clock[_OUTSTANDING]):
            if short or rows[outstanding[i], FINISH] <= clock[_CLOCK]:
                _wait(rows, program, clock, outstanding, outstanding[i])
                moved = True
                break
    return moved


@compiled
def _holding_up(
    rows: Ints,
    member_list: Ints,
    after_begin: Ints,
    after_list: Ints,
    bucket_of: Ints,
    pending: Ints,
) -> int:
    """Return a launched bucket that one of ``pending`` depends on; -1 for none."""
    for b in pending:
        found = _first_blocking(rows, member_list, after_begin, after_list, bucket_of, b)
        if found >= 0 and rows[found, STATUS] == _LAUNCHED:
            return found
    return -1


@compiled
def _blocked(
    rows: Ints,
    member_list: Ints,
    after_begin: Ints,
    after_list: Ints,
    bucket_of: Ints,
    out: Bools,
    waiting: int,
) -> bool:
    """Whether a member of ``waiting`` depends on a collective whose result is not there yet."""
    if not rows[waiting, FOLLOWS]:
        return False
    for m in range(rows[waiting, FIRST], rows[waiting, PAST]):
        for q in range(after_begin[member_list[m]], after_begin[member_list[m] + 1]):
            awaited = bucket_of[after_list[q]]
            if rows[awaited, STATUS] != _WAITED or (
                rows[awaited, COPIED] and not out[after_list[q]]
            ):
                return True
    return False


@compiled
def _last_above(
    used: Ints, block_added: Ints, block_most: Ints, first: int, past: int, limit: int
) -> int:
    """Return the last of the compute nodes [first, past) around which more than ``limit`` bytes are
    in use; -1 for none.
    """
    k = past - 1
    while k >= first:
        if (k + 1) % BLOCK == 0 and k + 1 - BLOCK >= first and block_most[k // BLOCK] <= limit:
            k -= BLOCK
        elif used[k] + block_added[k // BLOCK] > limit:
            return k
        else:
            k -= 1
    return -1


@compiled
def _add(
    used: Ints, block_added: Ints, block_most: Ints, first: int, past: int, size_bytes: int
) -> None:
    """Add bytes to compute nodes [first, past)."""
    k = first
    while k < past:
        block = k // BLOCK
        if k % BLOCK == 0 and k + BLOCK <= past:
            block_added[block] += size_bytes
            block_most[block] += size_bytes
            k += BLOCK
        else:
            end = min(past, (block + 1) * BLOCK)
            while k < end:
                used[k] += size_bytes
                block_most[block] = max(block_most[block], used[k] + block_added[block])
                k += 1
