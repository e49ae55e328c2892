"""Exact figures of a program, compiled: the semantics of ``apsched.schedule.simulate`` on the
compact form.

A property test holds ``evaluate`` equal to ``simulate`` on the schedule that
``apsched.solver.program.to_schedule`` makes of the program.
"""

import numpy as np

from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import ALL_GATHER, ALL_REDUCE, Ints, ProblemArrays
from apsched.solver.program.contended_clock import with_shared_clock
from apsched.solver.program.program import (
    COPY_IN,
    LAUNCH,
    NODE,
    NOT_MADE,
    START,
    WAIT,
    Buckets,
    Figures,
    MemoryUse,
    Program,
    Timing,
    Trace,
    WalkInput,
    fixed,
)


def evaluate(arrays: ProblemArrays, program: Program) -> Figures:
    """Return the exact figures of ``program``."""
    walked, lived = _figure(arrays, program)
    return Figures(
        step_time_ticks=int(walked.step_time),
        peak_memory_bytes=int(lived.peak) + arrays.kept_bytes,
        peak_in_flight_bytes=int(walked.peak_in_flight),
        num_launches=len(program.partition.buckets),
    )


def trace(arrays: ProblemArrays, program: Program) -> Trace:
    """Return the position, time and memory of every operation in ``program``."""
    walked, lived = _figure(arrays, program)
    return Trace(
        first_position=walked.first_position,
        begin_ticks=walked.begin_ticks,
        transfer_end_ticks=walked.transfer_end,
        attached_position=walked.attached_position,
        live_bytes=lived.live_bytes,
        storage_first=lived.first,
        storage_last=lived.last,
        storage_in_buffer=lived.inside,
        buffer_lives=lived.buffer_lives,
    )


def _figure(arrays: ProblemArrays, program: Program) -> tuple[Timing, MemoryUse]:
    p = program.partition
    buckets = Buckets(
        bucket_of=p.bucket_of,
        member_begin=p.member_begin,
        member_list=p.member_list,
        flat=p.flat,
        launch_ticks=p.launch_ticks,
        transfer_ticks=p.transfer_ticks,
        copy_in_ticks=p.copy_in_ticks,
        in_buffer_bytes=p.in_buffer_bytes,
        out_buffer_bytes=p.out_buffer_bytes,
    )
    ground = fixed(arrays)
    walked = walk(program.operation, program.argument, buckets, ground)
    if arrays.shares is not None:
        walked = with_shared_clock(
            walked, program.operation, program.argument, buckets, ground, arrays.shares
        )
    return walked, live(walked, buckets, ground)


@compiled
def walk(operation: Ints, argument: Ints, p: Buckets, f: WalkInput) -> Timing:
    """Run the program: step time, most bytes in flight, and the position of every operation,
    compute node, attached node and bucket step.
    """
    num_buckets = len(p.launch_ticks)
    num_compute = len(f.compute_ticks)
    compute_position = np.full(num_compute + 1, -1, np.int64)
    attached_position = np.zeros(len(f.attached_ticks), np.int64)
    first_position = np.zeros(len(operation), np.int64)
    at = np.zeros((num_buckets, 4), np.int64)  # of each bucket: copy-in, start, wait, last copy-out
    begin_ticks = np.zeros(len(operation), np.int64)
    transfer_end = np.zeros(num_buckets, np.int64)
    stream_free = np.zeros(f.num_streams, np.int64)
    position = 1  # position 0: the inputs
    t = 0
    in_flight = 0
    peak_in_flight = 0
    for i in range(len(operation)):
        a = argument[i]
        first_position[i] = position
        begin_ticks[i] = t
        if operation[i] == NODE:
            compute_position[a] = position
            t += f.compute_ticks[a]
            position += 1
        elif operation[i] == LAUNCH or operation[i] == COPY_IN or operation[i] == START:
            begin, end = p.member_begin[a], p.member_begin[a + 1]
            flying = 0
            if operation[i] != START:
                for j in range(begin, end):
                    c = p.member_list[j]
                    for q in range(f.prologue_begin[c], f.prologue_begin[c + 1]):
                        if p.flat[a] and f.prologue_list[q] == f.cast_attached[c]:
                            continue
                        attached_position[f.prologue_list[q]] = position
                        t += f.attached_ticks[f.prologue_list[q]]
                        position += 1
                if p.flat[a]:
                    at[a, 0] = position
                    for j in range(begin, end):
                        if f.cast_attached[p.member_list[j]] >= 0:
                            attached_position[f.cast_attached[p.member_list[j]]] = position
                    t += p.copy_in_ticks[a]
                    position += 1
            if operation[i] == COPY_IN:
                continue
            for j in range(begin, end):
                flying += f.output_bytes[p.member_list[j]]
                attached_position[f.attached_of_start[p.member_list[j]]] = (
                    at[a, 0] if p.flat[a] else position
                )
            at[a, 1] = position
            t += p.launch_ticks[a]
            s = f.stream[p.member_list[begin]]
            transfer_end[a] = max(t, stream_free[s]) + p.transfer_ticks[a]
            stream_free[s] = transfer_end[a]
            position += 1
            in_flight += flying
            peak_in_flight = max(peak_in_flight, in_flight)
        elif operation[i] == WAIT:
            begin, end = p.member_begin[a], p.member_begin[a + 1]
            t = max(t, transfer_end[a])
            at[a, 2] = position
            copies = p.flat[a] and f.kind[p.member_list[begin]] == ALL_GATHER
            if not copies:
                for j in range(begin, end):
                    attached_position[f.attached_of_wait[p.member_list[j]]] = position
            for j in range(begin, end):
                in_flight -= f.output_bytes[p.member_list[j]]
            position += 1
            if not copies:
                for j in range(begin, end):
                    c = p.member_list[j]
                    for q in range(f.epilogue_begin[c], f.epilogue_begin[c + 1]):
                        attached_position[f.epilogue_list[q]] = position
                        t += f.attached_ticks[f.epilogue_list[q]]
                        position += 1
        else:
            b = p.bucket_of[a]
            attached_position[f.attached_of_wait[a]] = position
            at[b, 3] = position
            t += f.copy_out_ticks[a]
            position += 1
            for q in range(f.epilogue_begin[a], f.epilogue_begin[a + 1]):
                attached_position[f.epilogue_list[q]] = position
                t += f.attached_ticks[f.epilogue_list[q]]
                position += 1
    compute_position[num_compute] = position
    step_time = t
    for s in range(f.num_streams):
        step_time = max(step_time, stream_free[s])
    return Timing(
        step_time,
        peak_in_flight,
        first_position,
        compute_position,
        attached_position,
        at,
        begin_ticks,
        transfer_end,
    )


@compiled
def live(walked: Timing, p: Buckets, f: WalkInput) -> MemoryUse:
    """Lives of all storages and buffers, and the bytes alive at every position (see
    ``apsched.schedule.memory``).
    """
    compute_position, attached_position, at = (
        walked.compute_position,
        walked.attached_position,
        walked.bucket_position,
    )
    num_buckets = len(p.in_buffer_bytes)
    position = compute_position[-1]
    delta = np.zeros(position + 2, np.int64)
    num_storages = len(f.storage_bytes)
    inside = np.full(
        num_storages, -1, np.int64
    )  # the bucket whose buffer it lives in; NOT_MADE: of a cast that a bucket has not
    first = np.zeros(num_storages, np.int64)
    last = np.zeros(num_storages, np.int64)
    for s in range(num_storages):
        if f.birth_attached[s] >= 0:
            first[s] = attached_position[f.birth_attached[s]]
        elif f.birth_compute[s] >= 0:
            first[s] = compute_position[f.birth_compute[s]]
    for b in range(num_buckets):
        begin, end = p.member_begin[b], p.member_begin[b + 1]
        if p.flat[b]:
            for j in range(begin, end):
                c = p.member_list[j]
                if f.cast_attached[c] >= 0:
                    inside[f.input_storage[c]] = NOT_MADE
                if f.output_storage[c] >= 0:
                    if f.kind[c] == ALL_GATHER:
                        first[f.output_storage[c]] = attached_position[f.attached_of_wait[c]]
                    else:
                        inside[f.output_storage[c]] = b
    buffer_last = np.zeros(num_buckets, np.int64)
    for s in range(num_storages):
        end_position = first[s]
        if f.last_compute[s] >= 0:
            end_position = max(end_position, compute_position[f.last_compute[s]])
        for q in range(f.touch_begin[s], f.touch_begin[s + 1]):
            node = f.touch_list[q]
            c = f.collective_of_wait[node]
            if c >= 0 and f.input_storage[c] == s and p.flat[p.bucket_of[c]]:
                continue  # the copy-in frees a bucket from holding its members' inputs
            end_position = max(end_position, attached_position[node])
        last[s] = end_position
    for s in range(num_storages):
        if inside[s] >= 0:
            buffer_last[inside[s]] = max(buffer_last[inside[s]], last[s])
        elif inside[s] != NOT_MADE:
            delta[first[s]] += f.storage_bytes[s]
            delta[last[s] + 1] -= f.storage_bytes[s]
    buffer_lives = np.full((num_buckets, 2, 2), -1, np.int64)
    for b in range(num_buckets):
        if p.flat[b]:
            k = f.kind[p.member_list[p.member_begin[b]]]
            buffer_lives[b, 0, 0] = at[b, 0]
            if k == ALL_GATHER:
                buffer_lives[b, 0, 1] = at[b, 3]
            else:
                buffer_lives[b, 0, 1] = max(buffer_last[b], at[b, 2])
            if k != ALL_GATHER and k != ALL_REDUCE:
                buffer_lives[b, 0, 0] = at[b, 1]
                buffer_lives[b, 1, 0] = at[b, 0]
                buffer_lives[b, 1, 1] = at[b, 2]
                delta[at[b, 0]] += p.in_buffer_bytes[b]
                delta[at[b, 2] + 1] -= p.in_buffer_bytes[b]
            delta[buffer_lives[b, 0, 0]] += p.out_buffer_bytes[b]
            delta[buffer_lives[b, 0, 1] + 1] -= p.out_buffer_bytes[b]
    live_bytes = np.zeros(position + 1, np.int64)
    live_bytes[0] = f.base_slot[0] + delta[0]
    live = delta[0]
    k = 0
    for i in range(1, position + 1):
        live += delta[i]
        if compute_position[k] == i:
            live_bytes[i] = f.base_compute[k] + live
            k += 1
        else:
            live_bytes[i] = f.base_slot[k] + live
    peak = live_bytes[0]
    for i in range(position + 1):
        peak = max(peak, live_bytes[i])
    return MemoryUse(peak, live_bytes, first, last, inside, buffer_lives)


@compiled
def most_prefetch(operation: Ints, argument: Ints, need_slot: Ints, num_compute: int) -> int:
    """Return the most compute nodes between a launch and the first of them that needs its result;
    ``need_slot`` (B,) is of buckets.
    """
    most, slot = 0, 0
    for i in range(len(operation)):
        if operation[i] == NODE:
            slot = argument[i] + 1
        elif operation[i] == LAUNCH and need_slot[argument[i]] < num_compute:
            most = max(most, need_slot[argument[i]] - slot)
    return most
