"""Keep the order of the compute; defer work without a consumer; where the stream would stall,
run ready blocks.

One pass over a program (launches, waits and copies around the compute order in some order) on the
clock. Blocks that no launch on the path depends on (weight gradients) may be put off. At a wait
that would stall, blocks that were put off, or come later, run until the stall is filled: weight
gradients of one layer while activations of the next are on the wire. Blocks that cannot be put off
any further run first. Reductions and on-path collectives are launched as soon as their inputs are
there.

Memory is counted along: the bytes of the program at each operation, and the difference of the new
order, storage by storage. Where it would not fit, nothing is put off, nothing runs ahead, and
blocks that free memory run. Launches move along, which is left out here; so the order is evaluated
again afterwards.
"""

from typing import NamedTuple

import numpy as np

from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.arrays.reordered import Precedence
from apsched.solver.program.program import COPY_OUT, LAUNCH, NODE, WAIT

_NEVER = 2**62


class Units(NamedTuple):
    """Arrays of buckets (B) and collectives (C), which the pass reads."""

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
    placed: Bools
    """(B,) a gather that can move: launched where the program has it, not as soon as it can be."""
    after_begin: Ints
    after_list: Ints
    num_streams: int


class Pass(NamedTuple):
    """A program to go over."""

    order: Ints
    """(K,) blocks."""
    operation: Ints
    argument: Ints
    """The block of a NODE, at its first node; other nodes of a block have no operation."""
    live_bytes: Ints
    """Most that is alive at each operation."""


class FillLimits(NamedTuple):
    """How far to go."""

    max_delay: int
    """Places among the compute nodes by which patient blocks are put off at most."""
    max_overrun: float
    """How far a block may reach beyond the end of a stall, as a share of its own length."""


class _Course(NamedTuple):
    """The constant input of the pass."""

    program: Pass
    place: Ints
    """(K,) of each block in the order of the program."""
    at: Ints
    """(K,) operation of the program that a block is."""
    usual_bytes: Ints
    """(K+1,) bytes that blocks hold behind so many places of the program."""
    needed: Bools
    """(B,) the stream stalls for it; a bucket that only outputs need has its wait at the end."""
    room_bytes: int
    max_move: int
    limits: FillLimits


class _State(NamedTuple):
    """How far the pass has come."""

    scalars: Ints
    done: Bools
    result: Ints
    blocks_left: Ints
    inputs_left: Ints
    launched: Bools
    waited: Bools
    copied: Bools
    finish: Ints
    stream_free: Ints
    uses_left: Ints


_NUM_SCALARS = 7
_CLOCK, _NUM_BLOCKS, _NUM_NODES, _LIVE, _OLDEST, _CURSOR, _PASSED = range(_NUM_SCALARS)
"""The clock; blocks and nodes that have run; bytes beyond those at the beginning; the first block
as captured that has not run; the first place in the program that has not run; places of the program
that are behind.
"""


@compiled
def refill(
    p: Precedence, u: Units, program: Pass, room_bytes: int, max_move: int, limits: FillLimits
) -> Ints:
    """Return the blocks in a new order, none of them more than ``max_move`` nodes from where it was
    captured if ``program`` has none.
    """
    c = _Course(
        program,
        *_places(p, program),
        _live_along(p, program.order),
        _needed(p, u),
        room_bytes,
        max_move,
        limits,
    )
    state = _begun(p, u)
    scalars, operation, argument = state.scalars, program.operation, program.argument
    for i in range(len(operation)):
        a = argument[i]
        if operation[i] == LAUNCH:
            if not state.launched[a]:
                _launch(u, a, state)
        elif operation[i] == COPY_OUT:
            if not state.copied[a]:
                state.copied[a] = True
                scalars[_CLOCK] += u.copy_out_work[a]
        elif operation[i] == NODE:
            scalars[_PASSED] = c.place[a] + 1
            if not state.done[a]:
                _run_up_to(p, u, c, state, i)
        elif operation[i] == WAIT and c.needed[a] and not state.waited[a]:
            _fill_stall(p, u, c, state, i)
    _run_rest(p, u, state, max_move)
    return state.result


@compiled
def _places(p: Precedence, program: Pass) -> tuple[Ints, Ints]:
    """Return the place of each block in the order of ``program``, and the operation that it is."""
    place = np.empty(len(p.block_ticks), np.int64)
    for k in range(len(program.order)):
        place[program.order[k]] = k
    at = np.zeros(len(p.block_ticks), np.int64)
    for i in range(len(program.operation)):
        if program.operation[i] == NODE:
            at[program.argument[i]] = i
    return place, at


@compiled
def _needed(p: Precedence, u: Units) -> Bools:
    """(B,) Return which buckets blocks or other collectives need."""
    needed = np.zeros(len(u.launch_work), np.bool_)
    for c in p.needs_list:
        needed[u.bucket_of[c]] = True
    for c in u.after_list:
        needed[u.bucket_of[c]] = True
    return needed


@compiled
def _begun(p: Precedence, u: Units) -> _State:
    num_blocks, num_buckets = len(p.block_ticks), len(u.launch_work)
    return _State(
        np.zeros(_NUM_SCALARS, np.int64),
        np.zeros(num_blocks, np.bool_),
        np.empty(num_blocks, np.int64),
        p.before_begin[1:] - p.before_begin[:-1],
        p.ready_begin[1:] - p.ready_begin[:-1],
        np.zeros(num_buckets, np.bool_),
        np.zeros(num_buckets, np.bool_),
        np.zeros(len(u.bucket_of), np.bool_),
        np.full(num_buckets, _NEVER),
        np.zeros(u.num_streams, np.int64),
        _uses(p),
    )


@compiled
def _run_up_to(p: Precedence, u: Units, c: _Course, state: _State, i: int) -> None:
    """Run the block of operation ``i``, after those before it; put off blocks that may wait."""
    scalars, done, order, a = state.scalars, state.done, c.program.order, c.program.argument[i]
    while not done[a]:
        while done[order[scalars[_CURSOR]]]:
            scalars[_CURSOR] += 1
        due = order[scalars[_CURSOR]]
        beyond = scalars[_LIVE] - c.usual_bytes[scalars[_PASSED]]
        if (
            c.program.live_bytes[i] + beyond <= c.room_bytes
            and p.deferrable[due]
            and scalars[_NUM_NODES] - p.first[due] < c.limits.max_delay
        ):
            break
        _run_in_time(p, u, due, state, c.max_move)
    if not (done[a] or p.deferrable[a]):
        _run_with_all_before(p, u, a, state, c.max_move)


@compiled
def _fill_stall(p: Precedence, u: Units, c: _Course, state: _State, i: int) -> None:
    """Wait as operation ``i`` does, and run blocks while the stream would stall."""
    scalars, awaited = state.scalars, c.program.argument[i]
    if not state.launched[awaited]:
        _launch(u, awaited, state)
    while scalars[_CLOCK] < state.finish[awaited]:
        while (
            scalars[_CURSOR] < len(p.block_ticks)
            and (state.done[c.program.order[scalars[_CURSOR]]])
        ):
            scalars[_CURSOR] += 1
        chosen = _filling(p, u, c, state, i)
        if chosen < 0:
            break
        _run(p, u, chosen, state)
    scalars[_CLOCK] = max(scalars[_CLOCK], state.finish[awaited]) + u.wait_work[awaited]
    state.waited[awaited] = True


@compiled
def _run_rest(p: Precedence, u: Units, state: _State, max_move: int) -> None:
    """Run blocks that were put off to the end: longest tail first (Jackson's rule)."""
    num_blocks, tails = len(p.block_ticks), _tails(p, u)
    while state.scalars[_NUM_BLOCKS] < num_blocks:
        chosen = int(np.int64(-1))  # as -1 alone numba would compile what follows twice
        for block in range(state.scalars[_OLDEST], num_blocks):
            if (
                not state.done[block]
                and not state.blocks_left[block]
                and (chosen < 0 or tails[block] > tails[chosen])
            ):
                chosen = block
        _run_in_time(p, u, chosen, state, max_move)


@compiled
def _tails(p: Precedence, u: Units) -> Ints:
    """(K,) ticks that follow a block at least, as long as nothing else is in the way: blocks behind
    it, and transfers.
    """
    tails = np.zeros(len(p.block_ticks), np.int64)
    for block in range(len(tails) - 1, -1, -1):
        for q in range(p.feeds_begin[block], p.feeds_begin[block + 1]):
            b = u.bucket_of[p.feeds_list[q]]
            tails[block] = max(tails[block], u.launch_work[b] + u.transfer_ticks[b])
        for q in range(p.behind_begin[block], p.behind_begin[block + 1]):
            after = p.behind_list[q]
            tails[block] = max(tails[block], p.block_ticks[after] + tails[after])
    return tails


@compiled
def _is_late(p: Precedence, block: int, state: _State, max_move: int) -> bool:
    """Whether the oldest block would be more than ``max_move`` nodes late if ``block`` ran before
    it.

    Others are not: those that follow it as captured have more time, by as many nodes as lie
    between.
    """
    oldest = state.scalars[_OLDEST]
    after = state.scalars[_NUM_NODES] + p.first[block + 1] - p.first[block]
    return bool(block != oldest and after > p.first[oldest] + max_move)


@compiled
def _is_early(p: Precedence, block: int, state: _State, max_move: int) -> bool:
    """Whether ``block`` would be more than ``max_move`` nodes early now."""
    return bool(p.first[block] - state.scalars[_NUM_NODES] > max_move)


@compiled
def _run_in_time(p: Precedence, u: Units, block: int, state: _State, max_move: int) -> None:
    """Run ``block``, and before it the blocks that cannot wait for it."""
    while not state.done[block] and (
        _is_late(p, block, state, max_move) or _is_early(p, block, state, max_move)
    ):
        _run(p, u, state.scalars[_OLDEST], state)
    if not state.done[block]:
        _run(p, u, block, state)


@compiled
def _filling(p: Precedence, u: Units, c: _Course, state: _State, i: int) -> int:
    """Return the first block in order that may run in the stall before operation ``i``; -1 for
    none.
    """
    order, done, blocks_left, ticks = c.program.order, state.done, state.blocks_left, p.block_ticks
    cursor, max_move, max_overrun = state.scalars[_CURSOR], c.max_move, c.limits.max_overrun
    stall = state.finish[c.program.argument[i]] - state.scalars[_CLOCK]
    for place in range(cursor, len(ticks)):
        block = order[place]
        if _is_early(p, block, state, max_move):
            if place - cursor > 2 * max_move:
                return -1
            continue
        if done[block] or blocks_left[block] > 0:
            continue
        if _is_late(p, block, state, max_move):
            continue
        if ticks[block] - stall > max_overrun * ticks[block]:
            continue
        if _has_results(p, u, block, state) and _has_room(p, c, block, state, i):
            return int(block)
    return -1


@compiled
def _has_results(p: Precedence, u: Units, block: int, state: _State) -> bool:
    """Whether all that ``block`` needs has been transferred."""
    transferred = True
    for q in range(p.needs_begin[block], p.needs_begin[block + 1]):
        b = u.bucket_of[p.needs_list[q]]
        if not state.waited[b] and state.finish[b] > state.scalars[_CLOCK]:
            transferred = False
    return transferred


@compiled
def _has_room(p: Precedence, c: _Course, block: int, state: _State, i: int) -> bool:
    """Whether there is memory for ``block`` before operation ``i`` and as long as it is ahead."""
    births, deaths = _bytes_of(p, block, state)
    if births <= 0:
        return True
    live_bytes, added = c.program.live_bytes, births - deaths
    drift = state.scalars[_LIVE] - c.usual_bytes[state.scalars[_PASSED]]
    room_bytes = c.room_bytes - drift
    if live_bytes[i] + births > room_bytes:
        return False
    if added > 0:
        for j in range(i, c.at[block]):
            if live_bytes[j] + added > room_bytes:
                return False
    return True


@compiled
def _uses(p: Precedence) -> Ints:
    uses = np.zeros(len(p.storage_bytes), np.int64)
    for s in p.touch_list:
        uses[s] += 1
    return uses


@compiled
def _live_along(p: Precedence, order: Ints) -> Ints:
    """(K+1,) bytes of the storages that only blocks touch, behind so many places of ``order``,
    beyond those at the beginning.
    """
    uses = _uses(p)
    live = np.zeros(len(order) + 1, np.int64)
    for place in range(len(order)):
        change = 0
        for q in range(p.touch_begin[order[place]], p.touch_begin[order[place] + 1]):
            s = p.touch_list[q]
            change += p.storage_bytes[s] if p.storage_birth[s] == order[place] else 0
            uses[s] -= 1
            change -= p.storage_bytes[s] if not uses[s] and not p.storage_stays[s] else 0
        live[place + 1] = live[place] + change
    return live


@compiled
def _bytes_of(p: Precedence, block: int, state: _State) -> tuple[int, int]:
    """Return the bytes that ``block`` allocates, and those that it frees if it runs now."""
    births, deaths = 0, 0
    for q in range(p.touch_begin[block], p.touch_begin[block + 1]):
        s = p.touch_list[q]
        births += p.storage_bytes[s] if p.storage_birth[s] == block else 0
        deaths += p.storage_bytes[s] if state.uses_left[s] == 1 and not p.storage_stays[s] else 0
    return births, deaths


@compiled
def _run_with_all_before(p: Precedence, u: Units, block: int, state: _State, max_move: int) -> None:
    """Run the blocks that were put off and that ``block`` depends on, then ``block``."""
    stack = np.empty(len(p.block_ticks), np.int64)
    stack[0] = block
    depth = 1
    while depth > 0:
        top = stack[depth - 1]
        deeper = -1
        if not state.done[top]:
            for q in range(p.before_begin[top], p.before_begin[top + 1]):
                if not state.done[p.before_list[q]]:
                    deeper = p.before_list[q]
                    break
            if deeper < 0:
                _run_in_time(p, u, top, state, max_move)
        if deeper >= 0:
            stack[depth] = deeper
            depth += 1
        else:
            depth -= 1


@compiled
def _run(p: Precedence, u: Units, block: int, state: _State) -> None:
    """Run ``block`` after the waits and copies that it needs; launch ready collectives."""
    scalars = state.scalars
    for q in range(p.needs_begin[block], p.needs_begin[block + 1]):
        c = p.needs_list[q]
        b = u.bucket_of[c]
        if not state.launched[b]:
            _launch(u, b, state)
        if not state.waited[b]:
            scalars[_CLOCK] = max(scalars[_CLOCK], state.finish[b]) + u.wait_work[b]
            state.waited[b] = True
        if not state.copied[c]:
            state.copied[c] = True
            scalars[_CLOCK] += u.copy_out_work[c]
    births, deaths = _bytes_of(p, block, state)
    for q in range(p.touch_begin[block], p.touch_begin[block + 1]):
        state.uses_left[p.touch_list[q]] -= 1
    scalars[_LIVE] += births - deaths
    scalars[_CLOCK] += p.block_ticks[block]
    state.done[block] = True
    state.result[scalars[_NUM_BLOCKS]] = block
    scalars[_NUM_BLOCKS] += 1
    scalars[_NUM_NODES] += p.first[block + 1] - p.first[block]
    while scalars[_OLDEST] < len(p.block_ticks) and state.done[scalars[_OLDEST]]:
        scalars[_OLDEST] += 1
    for q in range(p.behind_begin[block], p.behind_begin[block + 1]):
        state.blocks_left[p.behind_list[q]] -= 1
    for q in range(p.feeds_begin[block], p.feeds_begin[block + 1]):
        c = p.feeds_list[q]
        for r in range(p.ready_begin[c], p.ready_begin[c + 1]):
            if p.block_of[p.ready_list[r]] == block:
                state.inputs_left[c] -= 1
        b = u.bucket_of[c]
        if not state.launched[b] and not u.placed[b] and _is_ready(u, b, state):
            _launch(u, b, state)


@compiled
def _is_ready(u: Units, b: int, state: _State) -> bool:
    ready = True
    for j in range(u.member_begin[b], u.member_begin[b + 1]):
        d = u.member_list[j]
        if state.inputs_left[d] > 0:
            ready = False
        for r in range(u.after_begin[d], u.after_begin[d + 1]):
            if not state.waited[u.bucket_of[u.after_list[r]]]:
                ready = False
    return ready


@compiled
def _launch(u: Units, b: int, state: _State) -> None:
    state.scalars[_CLOCK] += u.launch_work[b]
    state.finish[b] = (
        max(state.scalars[_CLOCK], state.stream_free[u.stream[b]]) + u.transfer_ticks[b]
    )
    state.stream_free[u.stream[b]] = state.finish[b]
    state.launched[b] = True
