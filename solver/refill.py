"""Keep the order of the compute; where the stream would stand still, run what is ready and comes later.

One pass over a program (launches, waits and copies around the spine in some order) on the clock. At a wait that would stall, it takes
blocks that come later, may run now, and lie within the cap on moves, until the stall is filled. What goes early makes what it passed
late: weight gradients of one layer run while the gradients of activations of the next are on the wire. What must not be put off any
further, runs first. Reductions and on-path collectives are launched as soon as their inputs are there.

The bytes of what goes early are added to those that the program has at each operation until its old place; that leaves launches out
that move along, so the order is evaluated anew afterwards.
"""

from typing import NamedTuple

import numpy as np

from apsched.solver.compact import Ints
from apsched.solver.compiled import compiled
from apsched.solver.evaluate import COPY_OUT, LAUNCH, SPINE, WAIT
from apsched.solver.orders import Precedence

_NEVER = np.int64(2**62)


class Units(NamedTuple):
    """What the pass knows of buckets (B) and collectives (C)."""

    bucket_of: Ints
    member_begin: Ints
    member_list: Ints
    launch_work: Ints
    """(B,) ticks on the compute stream, with prologues and copy-in."""
    wait_work: Ints
    """(B,) ticks of the epilogues behind its wait."""
    copy_out_work: Ints
    """(C,) copy-out and epilogue; 0 where there is none."""
    transfer_ticks: Ints
    stream: Ints
    waits_for_use: Ints
    """(B,) 1 for a gather that can move: launched where the program has it, not as soon as it can be."""
    after_begin: Ints
    after_list: Ints
    num_streams: int


class Taste(NamedTuple):
    """Which block fills a stall."""

    overrun: float
    """How far a block may reach beyond the end of the stall, as a share of its own length."""
    longest: bool
    """Of those that may run, the longest that fits; otherwise the first in order."""


@compiled
def refill(
    p: Precedence, u: Units, order: Ints, operation: Ints, argument: Ints, added_bytes: Ints, live_bytes: Ints, room_bytes: int,
    max_move: int, taste: Taste,
) -> Ints:  # fmt: skip
    """Return the blocks in a new order.

    ``order`` (K,) are the blocks as the program has them; ``operation`` and ``argument`` the program, with the block's place in
    ``order`` as argument of SPINE for its first spine node, and none for the others. ``added_bytes`` (K,) are the bytes that a block
    adds when it runs (births less deaths); ``live_bytes`` (operations,) what is alive; ``room_bytes`` what may be.
    """
    num_blocks, num_buckets = len(p.block_ticks), len(u.launch_work)
    blocks_left = p.before_begin[1:] - p.before_begin[:-1]
    inputs_left = p.ready_begin[1:] - p.ready_begin[:-1]
    launched, waited = np.zeros(num_buckets, np.bool_), np.zeros(num_buckets, np.bool_)
    copied = np.zeros(len(u.bucket_of), np.bool_)
    finish = np.full(num_buckets, _NEVER)
    stream_free = np.zeros(u.num_streams, np.int64)
    done = np.zeros(num_blocks, np.bool_)
    at = np.zeros(num_blocks, np.int64)  # where in the program a block stands
    for i in range(len(operation)):
        if operation[i] == SPINE:
            at[order[argument[i]]] = i
    live = live_bytes.copy()
    result = np.empty(num_blocks, np.int64)
    state = np.zeros(3, np.int64)  # clock, number of blocks run, spine nodes run
    oldest = 0  # first block as captured that has not run
    cursor = 0  # first place in ``order`` that has not run
    for i in range(len(operation)):
        a = argument[i]
        if operation[i] == SPINE:
            block = order[a]
            if done[block]:
                continue
            while True:
                while oldest < num_blocks and done[oldest]:
                    oldest += 1
                size = p.first[block + 1] - p.first[block]
                if oldest == block or state[2] + size <= p.first[oldest] + max_move:
                    break
                _run(p, u, oldest, state, done, result, blocks_left, inputs_left, launched, waited, copied, finish, stream_free)
            if not done[block]:
                _run(p, u, block, state, done, result, blocks_left, inputs_left, launched, waited, copied, finish, stream_free)
        elif operation[i] == LAUNCH:
            if not launched[a]:
                _launch(u, a, state, launched, finish, stream_free)
        elif operation[i] == COPY_OUT:
            if not copied[a]:
                copied[a] = True
                state[0] += u.copy_out_work[a]
        elif operation[i] == WAIT and not waited[a]:
            if not launched[a]:
                _launch(u, a, state, launched, finish, stream_free)
            while state[0] < finish[a]:
                while oldest < num_blocks and done[oldest]:
                    oldest += 1
                while cursor < num_blocks and done[order[cursor]]:
                    cursor += 1
                if oldest == num_blocks:
                    break
                chosen = -1
                stall = finish[a] - state[0]
                for place in range(cursor, num_blocks):
                    block = order[place]
                    if p.first[block] - state[2] > max_move:
                        if place - cursor > 2 * max_move:
                            break
                        continue
                    if done[block] or blocks_left[block] > 0:
                        continue
                    size = p.first[block + 1] - p.first[block]
                    if block != oldest and state[2] + size > p.first[oldest] + max_move:
                        continue
                    ticks = p.block_ticks[block]
                    if ticks - stall > taste.overrun * ticks:
                        continue
                    if taste.longest and chosen >= 0 and ticks <= p.block_ticks[chosen]:
                        continue
                    possible = True
                    for q in range(p.needs_begin[block], p.needs_begin[block + 1]):
                        b = u.bucket_of[p.needs_list[q]]
                        if not waited[b] and finish[b] > state[0]:
                            possible = False
                    if not possible:
                        continue
                    if added_bytes[block] > 0:
                        for j in range(i, at[block]):
                            if live[j] + added_bytes[block] > room_bytes:
                                possible = False
                                break
                    if not possible:
                        continue
                    chosen = block
                    if not taste.longest:
                        break
                if chosen < 0:
                    break
                for j in range(i, at[chosen]):
                    live[j] += added_bytes[chosen]
                _run(p, u, chosen, state, done, result, blocks_left, inputs_left, launched, waited, copied, finish, stream_free)
            state[0] = max(state[0], finish[a]) + u.wait_work[a]
            waited[a] = True
    return result


@compiled
def _run(
    p: Precedence, u: Units, block: int, state: Ints, done: Ints, result: Ints, blocks_left: Ints, inputs_left: Ints, launched: Ints,
    waited: Ints, copied: Ints, finish: Ints, stream_free: Ints,
) -> None:  # fmt: skip
    """Run ``block`` after the waits and copies that it needs; launch what becomes ready."""
    for q in range(p.needs_begin[block], p.needs_begin[block + 1]):
        c = p.needs_list[q]
        b = u.bucket_of[c]
        if not launched[b]:
            _launch(u, b, state, launched, finish, stream_free)
        if not waited[b]:
            state[0] = max(state[0], finish[b]) + u.wait_work[b]
            waited[b] = True
        if not copied[c]:
            copied[c] = True
            state[0] += u.copy_out_work[c]
    state[0] += p.block_ticks[block]
    done[block] = True
    result[state[1]] = block
    state[1] += 1
    state[2] += p.first[block + 1] - p.first[block]
    for q in range(p.behind_begin[block], p.behind_begin[block + 1]):
        blocks_left[p.behind_list[q]] -= 1
    for q in range(p.feeds_begin[block], p.feeds_begin[block + 1]):
        c = p.feeds_list[q]
        for r in range(p.ready_begin[c], p.ready_begin[c + 1]):
            if p.block_of[p.ready_list[r]] == block:
                inputs_left[c] -= 1
        b = u.bucket_of[c]
        if launched[b] or u.waits_for_use[b]:
            continue
        ready = True
        for j in range(u.member_begin[b], u.member_begin[b + 1]):
            d = u.member_list[j]
            if inputs_left[d] > 0:
                ready = False
            for r in range(u.after_begin[d], u.after_begin[d + 1]):
                if not waited[u.bucket_of[u.after_list[r]]]:
                    ready = False
        if ready:
            _launch(u, b, state, launched, finish, stream_free)


@compiled
def _launch(u: Units, b: int, state: Ints, launched: Ints, finish: Ints, stream_free: Ints) -> None:
    state[0] += u.launch_work[b]
    finish[b] = max(state[0], stream_free[u.stream[b]]) + u.transfer_ticks[b]
    stream_free[u.stream[b]] = finish[b]
    launched[b] = True
