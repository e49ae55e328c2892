"""Exact figures of a program, compiled: the semantics of ``apsched.simulate`` on the compact form.

A program is a list of (operation, argument): SPINE k, LAUNCH b, WAIT b, COPY_OUT c; PREPARE b and FIRE b are the two halves
of a LAUNCH of several members (prologues and copy-in; start). A property test holds ``evaluate`` equal to ``simulate`` on the
schedule that ``apsched.solver.expand`` makes of the program.
"""

from dataclasses import dataclass

import numba as nb
import numpy as np

from apsched.solver.compact import ALL_GATHER, ALL_REDUCE, Compact, Ints
from apsched.solver.partition import Partition

SPINE, LAUNCH, WAIT, COPY_OUT, PREPARE, FIRE = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A partition and the order of its units around the spine."""

    partition: Partition
    operation: Ints
    argument: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a program costs."""

    step_time_ticks: int
    peak_memory_bytes: int
    peak_in_flight_bytes: int
    num_launches: int


def evaluate(compact: Compact, program: Program) -> Figures:
    """Return the exact figures of ``program``."""
    walked, lived = _figure(compact, program)
    step_time, peak_in_flight = walked[:2]
    return Figures(
        step_time_ticks=int(step_time),
        peak_memory_bytes=int(lived[0]) + compact.kept_bytes,
        peak_in_flight_bytes=int(peak_in_flight),
        num_launches=len(program.partition.buckets),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Where everything stands in a program, position by position (position 0: the inputs; the last: the output)."""

    first_position: Ints
    """(operations,) of each operation; it reaches to the position before the next operation's."""
    begin_ticks: Ints
    """(operations,) when the compute stream comes to each operation."""
    transfer_end_ticks: Ints
    """(B,)"""
    live_bytes: Ints
    """(positions,) beside what the caller keeps."""
    float_position: Ints
    storage_first: Ints
    """(S,) first position at which the storage is alive."""
    storage_last: Ints
    storage_in_buffer: Ints
    """(S,) the bucket whose buffer holds it; -1 where it has its own memory."""
    buffer_lives: Ints
    """(B, 2, 2) first and last position of the output buffer and of the concatenated input; -1 where there is none."""


def anatomy(compact: Compact, program: Program) -> Anatomy:
    """Return where everything stands in ``program``."""
    walked, lived = _figure(compact, program)
    return Anatomy(
        first_position=walked[2],
        begin_ticks=walked[6],
        transfer_end_ticks=walked[7],
        float_position=walked[4],
        live_bytes=lived[1],
        storage_first=lived[2],
        storage_last=lived[3],
        storage_in_buffer=lived[4],
        buffer_lives=lived[5],
    )


def _figure(compact: Compact, program: Program) -> tuple[tuple[Ints, ...], tuple[Ints, ...]]:
    p, c = program.partition, compact
    walked = _walk(
        program.operation, program.argument,
        p.bucket_of, p.member_begin, p.member_list, p.launch_ticks, p.transfer_ticks, p.copy_in_ticks,
        c.spine_ticks, c.kind, c.stream, c.output_bytes, c.copy_out_ticks, c.on_path, c.float_of_start, c.float_of_wait,
        c.prologue_begin, c.prologue_list, c.epilogue_begin, c.epilogue_list, c.float_ticks, c.num_streams,
    )  # fmt: skip
    lived = _live(
        walked[3], walked[4], walked[5],
        p.bucket_of, p.member_begin, p.member_list, p.in_buffer_bytes, p.out_buffer_bytes,
        c.base_gap_bytes, c.base_spine_bytes, c.kind, c.float_of_wait, c.collective_of_wait,
        c.storage_bytes, c.storage_birth_spine, c.storage_birth_float, c.storage_last_spine, c.touch_begin, c.touch_list,
        c.input_storage, c.output_storage,
    )  # fmt: skip
    return walked, lived


@nb.njit(cache=True)  # type: ignore[untyped-decorator]
def _walk(
    operation, argument,
    bucket_of, member_begin, member_list, launch_ticks, transfer_ticks, copy_in_ticks,
    spine_ticks, kind, stream, output_bytes, copy_out_ticks, on_path, float_of_start, float_of_wait,
    prologue_begin, prologue_list, epilogue_begin, epilogue_list, float_ticks, num_streams,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Run the program: step time, most bytes in flight, and the position of every operation, spine node, float and bucket step."""
    num_buckets = len(launch_ticks)
    num_spine = len(spine_ticks)
    spine_position = np.full(num_spine + 1, -1, np.int64)
    float_position = np.zeros(len(float_ticks), np.int64)
    first_position = np.zeros(len(operation), np.int64)
    at = np.zeros((num_buckets, 4), np.int64)  # of each bucket: copy-in, start, wait, last copy-out
    begin_ticks = np.zeros(len(operation), np.int64)
    transfer_end = np.zeros(num_buckets, np.int64)
    stream_free = np.zeros(num_streams, np.int64)
    position = 1  # position 0: the inputs
    t = 0
    in_flight = 0
    peak_in_flight = 0
    for i in range(len(operation)):
        a = argument[i]
        first_position[i] = position
        begin_ticks[i] = t
        if operation[i] == 0:
            spine_position[a] = position
            t += spine_ticks[a]
            position += 1
        elif operation[i] == 1 or operation[i] >= 4:
            begin, end = member_begin[a], member_begin[a + 1]
            flying = 0
            if operation[i] != 5:
                for j in range(begin, end):
                    c = member_list[j]
                    for q in range(prologue_begin[c], prologue_begin[c + 1]):
                        float_position[prologue_list[q]] = position
                        t += float_ticks[prologue_list[q]]
                        position += 1
                if end - begin > 1:
                    at[a, 0] = position
                    t += copy_in_ticks[a]
                    position += 1
            if operation[i] == 4:
                continue
            for j in range(begin, end):
                if not on_path[member_list[j]]:
                    flying += output_bytes[member_list[j]]
                float_position[float_of_start[member_list[j]]] = at[a, 0] if end - begin > 1 else position
            at[a, 1] = position
            t += launch_ticks[a]
            s = stream[member_list[begin]]
            transfer_end[a] = max(t, stream_free[s]) + transfer_ticks[a]
            stream_free[s] = transfer_end[a]
            position += 1
            in_flight += flying
            peak_in_flight = max(peak_in_flight, in_flight)
        elif operation[i] == 2:
            begin, end = member_begin[a], member_begin[a + 1]
            t = max(t, transfer_end[a])
            at[a, 2] = position
            copies = end - begin > 1 and kind[member_list[begin]] == ALL_GATHER
            if not copies:
                for j in range(begin, end):
                    float_position[float_of_wait[member_list[j]]] = position
            for j in range(begin, end):
                if not on_path[member_list[j]]:
                    in_flight -= output_bytes[member_list[j]]
            position += 1
            if not copies:
                for j in range(begin, end):
                    c = member_list[j]
                    for q in range(epilogue_begin[c], epilogue_begin[c + 1]):
                        float_position[epilogue_list[q]] = position
                        t += float_ticks[epilogue_list[q]]
                        position += 1
        else:
            b = bucket_of[a]
            float_position[float_of_wait[a]] = position
            at[b, 3] = position
            t += copy_out_ticks[a]
            position += 1
            for q in range(epilogue_begin[a], epilogue_begin[a + 1]):
                float_position[epilogue_list[q]] = position
                t += float_ticks[epilogue_list[q]]
                position += 1
    spine_position[num_spine] = position
    step_time = t
    for s in range(num_streams):
        step_time = max(step_time, stream_free[s])
    return step_time, peak_in_flight, first_position, spine_position, float_position, at, begin_ticks, transfer_end


@nb.njit(cache=True)  # type: ignore[untyped-decorator]
def _live(
    spine_position, float_position, at,
    bucket_of, member_begin, member_list, in_buffer_bytes, out_buffer_bytes,
    base_gap, base_spine, kind, float_of_wait, collective_of_wait,
    storage_bytes, birth_spine, birth_float, last_spine, touch_begin, touch_list,
    input_storage, output_storage,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Lives of all storages and buffers, and the bytes alive at every position (see ``apsched.memory``)."""
    num_buckets = len(in_buffer_bytes)
    position = spine_position[-1]
    delta = np.zeros(position + 2, np.int64)
    num_storages = len(storage_bytes)
    inside = np.full(num_storages, -1, np.int64)  # 1: lives inside a bucket's buffer
    first = np.zeros(num_storages, np.int64)
    last = np.zeros(num_storages, np.int64)
    for s in range(num_storages):
        if birth_float[s] >= 0:
            first[s] = float_position[birth_float[s]]
        elif birth_spine[s] >= 0:
            first[s] = spine_position[birth_spine[s]]
    for b in range(num_buckets):
        begin, end = member_begin[b], member_begin[b + 1]
        if end - begin > 1:
            for j in range(begin, end):
                c = member_list[j]
                if output_storage[c] >= 0:
                    if kind[c] == ALL_GATHER:
                        first[output_storage[c]] = float_position[float_of_wait[c]]
                    else:
                        inside[output_storage[c]] = b
    buffer_last = np.zeros(num_buckets, np.int64)
    for s in range(num_storages):
        end_position = first[s]
        if last_spine[s] >= 0:
            end_position = max(end_position, spine_position[last_spine[s]])
        for q in range(touch_begin[s], touch_begin[s + 1]):
            f = touch_list[q]
            c = collective_of_wait[f]
            if c >= 0 and input_storage[c] == s and member_begin[bucket_of[c] + 1] - member_begin[bucket_of[c]] > 1:
                continue  # the copy-in frees a bucket from holding its members' inputs
            end_position = max(end_position, float_position[f])
        last[s] = end_position
    for s in range(num_storages):
        if inside[s] >= 0:
            buffer_last[inside[s]] = max(buffer_last[inside[s]], last[s])
        else:
            delta[first[s]] += storage_bytes[s]
            delta[last[s] + 1] -= storage_bytes[s]
    buffer_lives = np.full((num_buckets, 2, 2), -1, np.int64)
    for b in range(num_buckets):
        if member_begin[b + 1] - member_begin[b] > 1:
            k = kind[member_list[member_begin[b]]]
            buffer_lives[b, 0, 0] = at[b, 0]
            if k == ALL_GATHER:
                buffer_lives[b, 0, 1] = at[b, 3]
            else:
                buffer_lives[b, 0, 1] = max(buffer_last[b], at[b, 2])
            if k != ALL_GATHER and k != ALL_REDUCE:
                buffer_lives[b, 0, 0] = at[b, 1]
                buffer_lives[b, 1, 0] = at[b, 0]
                buffer_lives[b, 1, 1] = at[b, 2]
                delta[at[b, 0]] += in_buffer_bytes[b]
                delta[at[b, 2] + 1] -= in_buffer_bytes[b]
            delta[buffer_lives[b, 0, 0]] += out_buffer_bytes[b]
            delta[buffer_lives[b, 0, 1] + 1] -= out_buffer_bytes[b]
    live_bytes = np.zeros(position + 1, np.int64)
    live_bytes[0] = base_gap[0] + delta[0]
    live = delta[0]
    k = 0
    for i in range(1, position + 1):
        live += delta[i]
        if spine_position[k] == i:
            live_bytes[i] = base_spine[k] + live
            k += 1
        else:
            live_bytes[i] = base_gap[k] + live
    return live_bytes.max(), live_bytes, first, last, inside, buffer_lives
