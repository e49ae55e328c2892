"""The clock of a program under contention, compiled: the counterpart of
``apsched.schedule.clocks.SharedClock`` in ``simulate``, with which it shares no code.

Everything is a whole number. A transfer moves ``parts`` of its bytes in a tick when alone and
``parts / n`` when n share a link; while the compute stream works, its rate is
``slow_move / full_move`` of that. A tick of latency is ``full_latency`` units, of which
``slow_latency`` pass in a tick while the compute stream works. A tick of compute is ``full_speed``
units of work, of which ``slow_speed`` are done in a tick while something is transferred. A transfer
or compute node ends with the first whole tick by which its work is done, so the next change is
always at a whole tick.
"""

from typing import NamedTuple

import numpy as np

from apsched.solver.arrays.contention import ContentionArrays
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Ints
from apsched.solver.program.program import (
    COPY_IN,
    LAUNCH,
    NODE,
    START,
    WAIT,
    Buckets,
    Timing,
    WalkInput,
)

_NEVER = 2**62


class _State(NamedTuple):
    """Transfers under way."""

    queue: Ints
    """(S, B) buckets launched on each stream, in order."""
    first: Ints
    """(S,) the one under way."""
    past: Ints
    latency: Ints
    """(S,) units left of the latency of the one under way."""
    moving: Ints
    """(S,) parts left of its bytes."""
    speed: Ints
    """(S,) parts in a tick."""
    on_link: Ints
    end: Ints
    """(B,) -1 until the transfer has ended."""


@compiled
def with_shared_clock(
    walked: Timing, operation: Ints, argument: Ints, p: Buckets, f: WalkInput, s: ContentionArrays
) -> Timing:
    """Return ``walked``, whose clock knows no contention, with the times that hold under it."""
    num_buckets = len(p.launch_ticks)
    state = _State(
        np.zeros((f.num_streams, num_buckets), np.int64),
        np.zeros(f.num_streams, np.int64),
        np.zeros(f.num_streams, np.int64),
        np.zeros(f.num_streams, np.int64),
        np.zeros(f.num_streams, np.int64),
        np.zeros(f.num_streams, np.int64),
        np.zeros(s.num_links, np.int64),
        np.full(num_buckets, -1, np.int64),
    )
    begin_ticks = np.zeros(len(operation), np.int64)
    t = 0
    for i in range(len(operation)):
        a = argument[i]
        begin_ticks[i] = t
        if operation[i] == NODE:
            t = _run(state, p, s, t, f.compute_ticks[a])
        elif operation[i] == LAUNCH or operation[i] == COPY_IN or operation[i] == START:
            begin, past = p.member_begin[a], p.member_begin[a + 1]
            if operation[i] != START:
                for j in range(begin, past):
                    c = p.member_list[j]
                    for q in range(f.prologue_begin[c], f.prologue_begin[c + 1]):
                        if not p.flat[a] or f.prologue_list[q] != f.cast_attached[c]:
                            t = _run(state, p, s, t, f.attached_ticks[f.prologue_list[q]])
                if p.flat[a]:
                    t = _run(state, p, s, t, p.copy_in_ticks[a])
            if operation[i] != COPY_IN:
                t = _run(state, p, s, t, p.launch_ticks[a])
                stream = f.stream[p.member_list[begin]]
                state.queue[stream, state.past[stream]] = a
                state.past[stream] += 1
                if state.past[stream] - state.first[stream] == 1:
                    _begin(state, p, s, stream)
        elif operation[i] == WAIT:
            while state.end[a] < 0:
                t = _go(state, p, s, t, _NEVER, False)
            begin, past = p.member_begin[a], p.member_begin[a + 1]
            if not p.flat[a] or f.kind[p.member_list[begin]] != ALL_GATHER:
                for j in range(begin, past):
                    t = _finish(state, p, f, s, t, p.member_list[j])
        else:
            t = _run(state, p, s, t, f.copy_out_ticks[a])
            t = _finish(state, p, f, s, t, a)
    step_time = t
    while _busy(state):
        step_time = _go(state, p, s, step_time, _NEVER, False)
    return Timing(
        step_time,
        walked.peak_in_flight,
        walked.first_position,
        walked.compute_position,
        walked.attached_position,
        walked.bucket_position,
        begin_ticks,
        state.end,
    )


@compiled
def _finish(state: _State, p: Buckets, f: WalkInput, s: ContentionArrays, t: int, c: int) -> int:
    """Run the epilogue of collective ``c``."""
    for q in range(f.epilogue_begin[c], f.epilogue_begin[c + 1]):
        t = _run(state, p, s, t, f.attached_ticks[f.epilogue_list[q]])
    return t


@compiled
def _busy(state: _State) -> bool:
    """Whether anything is transferred."""
    return bool((state.first < state.past).any())


@compiled
def _begin(state: _State, p: Buckets, s: ContentionArrays, stream: int) -> None:
    """Begin with the transfer that is first on ``stream``."""
    b = state.queue[stream, state.first[stream]]
    first, num_members = p.member_list[p.member_begin[b]], p.member_begin[b + 1] - p.member_begin[b]
    latency = s.latency_ticks[first] + (
        num_members * s.member_ticks[first] if num_members > 1 and not p.flat[b] else 0
    )
    latency = min(latency, p.transfer_ticks[b])
    state.latency[stream] = latency * s.full_latency
    state.moving[stream] = (p.transfer_ticks[b] - latency) * s.parts


@compiled
def _run(state: _State, p: Buckets, s: ContentionArrays, t: int, ticks: int) -> int:
    """Do ``ticks`` of work on the compute stream from ``t`` on, and return when it is done."""
    left = ticks * s.full_speed
    while left > 0:
        if not _busy(state):
            return int(t - (-left // s.full_speed))
        until = _go(state, p, s, t, t - (-left // s.slow_speed), True)
        left -= (until - t) * s.slow_speed
        t = until
    return t


@compiled
def _go(state: _State, p: Buckets, s: ContentionArrays, t: int, limit: int, computing: bool) -> int:
    """Let time pass from ``t`` to ``limit`` or to the next change of a transfer, whichever is
    first; return when that is.
    """
    num_streams = len(state.first)
    state.on_link[:] = 0
    for stream in range(num_streams):
        if state.first[stream] < state.past[stream] and state.latency[stream] == 0:
            for q in range(s.link_begin[stream], s.link_begin[stream + 1]):
                state.on_link[s.link_list[q]] += 1
    passed = limit - t
    of_latency = s.slow_latency if computing else s.full_latency
    for stream in range(num_streams):
        if state.first[stream] == state.past[stream]:
            continue
        if state.latency[stream] > 0:
            passed = min(passed, -(-state.latency[stream] // of_latency))
            continue
        sharing = 1
        for q in range(s.link_begin[stream], s.link_begin[stream + 1]):
            sharing = max(sharing, state.on_link[s.link_list[q]])
        state.speed[stream] = (
            s.parts // sharing // s.full_move * (s.slow_move if computing else s.full_move)
        )
        passed = min(passed, -(-state.moving[stream] // state.speed[stream]))
    for stream in range(num_streams):
        if state.first[stream] == state.past[stream]:
            continue
        if state.latency[stream] > 0:
            state.latency[stream] = max(state.latency[stream] - passed * of_latency, 0)
        else:
            state.moving[stream] -= passed * state.speed[stream]
        if state.latency[stream] == 0 and state.moving[stream] <= 0:
            state.end[state.queue[stream, state.first[stream]]] = t + passed
            state.first[stream] += 1
            if state.first[stream] < state.past[stream]:
                _begin(state, p, s, stream)
    return int(t + passed)
