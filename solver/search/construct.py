"""Place the units of a partition around the compute order as a policy says, under caps: a partition
becomes a program.

Every gather's just-in-time bytes are reserved beforehand, so that a far prefetch cannot starve a
reduction. The pass over the compute order (``apsched.solver.search.construct_pass``) is a
heuristic: ``apsched.solver.program.evaluate`` computes the cost of its program.
"""

import numpy as np

from apsched.config import Caps
from apsched.solver.arrays.bucket_prices import (
    COPY_IN_TICKS,
    FLAT,
    LAUNCH_TICKS,
    NEED_SLOT,
    READY_SLOT,
    TRANSFER_TICKS,
    Tables,
    bucket_figures,
)
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.partition import Partition, Pricer
from apsched.solver.arrays.problem_arrays import ALL_GATHER, ALL_REDUCE, Ints
from apsched.solver.program.program import Program, WalkInput, fixed
from apsched.solver.search.construct_pass import (
    AHEAD,
    COPIED,
    FIRST,
    FLYING,
    FOLLOWS,
    FREED,
    GATHERED,
    HELD,
    LATEST,
    LAUNCH_WORK,
    NEED,
    NUM_COLUMNS,
    PAST,
    READY,
    STAYS,
    STREAM,
    TRANSFER,
    WAIT_WORK,
    WANT,
    Units,
    by_slot,
    place,
)
from apsched.solver.search.launch_policy import (
    BaseTimes,
    Policy,
    Rules,
    base_times,
    launch_slot,
    rules,
    want_slots,
)


def construct(
    pricer: Pricer,
    partition: Partition,
    policy: Policy,
    caps: Caps,
) -> Program:
    """Return the program that ``policy`` makes of ``partition``, steered by the cap on memory of
    ``caps``.
    """
    arrays = pricer.arrays
    p = partition
    operation, argument = lay_out(
        pricer.tables,
        fixed(arrays),
        base_times(arrays),
        rules(arrays, policy, caps, caps.memory_cap_bytes),
        p.bucket_of,
        p.member_begin,
        p.member_list,
        bucket_figures(pricer.tables, p.member_begin, p.member_list, p.coalesced[p.bucket_of]),
    )
    return Program(partition=partition, operation=operation, argument=argument)


@compiled
def lay_out(
    t: Tables,
    f: WalkInput,
    clock: BaseTimes,
    r: Rules,
    bucket_of: Ints,
    member_begin: Ints,
    member_list: Ints,
    figures: Ints,
) -> tuple[Ints, Ints]:
    """Return the operations of the program of a partition, and their arguments."""
    num_compute = len(f.compute_ticks)
    rows = _rows(t, clock, r, member_begin, member_list, figures, num_compute)
    queue, num_queued = np.empty(len(rows), np.int64), 0
    for b in by_slot(figures[:, NEED_SLOT], num_compute):
        if rows[b, GATHERED] and rows[b, LATEST] == num_compute:
            queue[num_queued] = b
            num_queued += 1
    queue = queue[:num_queued]
    planned, num_planned = np.empty(len(rows), np.int64), 0
    for b in by_slot(rows[:, LATEST], num_compute):
        if rows[b, LATEST] < num_compute:
            planned[num_planned] = b
            num_planned += 1
    wanted = want_slots(clock, r, figures, rows[:, STREAM], queue, f.num_streams)
    for b in range(len(rows)):  # numba takes three seconds to compile an assignment of slices
        rows[b, WANT] = wanted[b]
    used = _reserve(t, f, r.early, bucket_of, figures, rows)
    units = Units(
        rows,
        f.compute_ticks,
        member_list,
        bucket_of,
        t.after_begin,
        t.after_list,
        t.need_slot,
        t.by_need,
        t.copy_out_ticks + t.epilogue_ticks,
        queue,
        planned[:num_planned],
        used,
        r.memory_cap,
        r.in_flight_cap,
        f.num_streams,
    )
    return place(units, r.early, r.at_once, r.in_stalls)


@compiled
def _rows(
    t: Tables,
    clock: BaseTimes,
    r: Rules,
    member_begin: Ints,
    member_list: Ints,
    figures: Ints,
    num_compute: int,
) -> Ints:
    rows = np.zeros((len(figures), NUM_COLUMNS), np.int64)
    stalls = clock.stalls
    for b in range(len(figures)):
        begin, past = member_begin[b], member_begin[b + 1]
        first = member_list[begin]
        flat, kind = figures[b, FLAT] == 1, t.kind[first]
        prologue, epilogue, inputs, outputs, latest, follows = 0, 0, 0, 0, num_compute, False
        for j in range(begin, past):
            c = member_list[j]
            prologue += t.prologue_ticks[c] - (t.cast_ticks[c] if flat else 0)
            epilogue += t.epilogue_ticks[c]
            inputs += t.input_bytes[c]
            outputs += t.output_bytes[c]
            latest = min(latest, t.launch_last[c])
            follows |= t.after_begin[c] < t.after_begin[c + 1]
        gathered = kind == ALL_GATHER and not t.on_path[first]
        copied = flat and kind == ALL_GATHER
        rows[b, STREAM], rows[b, FIRST], rows[b, PAST] = t.stream[first], begin, past
        rows[b, GATHERED], rows[b, COPIED] = gathered, copied
        planned = t.wait_first[first] > 0 or t.wait_last[first] < num_compute
        awaited = t.on_path[first] and figures[b, NEED_SLOT] < num_compute
        rows[b, LATEST], rows[b, STAYS] = latest, planned or awaited
        ready = figures[b, READY_SLOT]
        if not gathered:
            need = figures[b, NEED_SLOT]
            ready = launch_slot(stalls, r.in_stalls, r.max_prefetch, ready, need, num_compute)
            ready = min(ready, latest)
        rows[b, READY] = ready
        rows[b, NEED], rows[b, TRANSFER] = (
            min(figures[b, NEED_SLOT], t.wait_last[first]),
            figures[b, TRANSFER_TICKS],
        )
        rows[b, LAUNCH_WORK] = figures[b, LAUNCH_TICKS] + figures[b, COPY_IN_TICKS] + prologue
        rows[b, WAIT_WORK] = 0 if copied else epilogue
        rows[b, AHEAD] = outputs if flat else outputs + inputs
        rows[b, HELD] = 0 if kind == ALL_REDUCE else inputs
        rows[b, FLYING], rows[b, FOLLOWS] = outputs, follows
    return rows


@compiled
def _reserve(
    t: Tables, f: WalkInput, early: bool, bucket_of: Ints, figures: Ints, rows: Ints
) -> Ints:
    """Bytes in use around each compute node when every collective is launched and waited for at the
    last moment; fills column FREED.
    """
    num_compute = len(f.compute_ticks)
    delta = np.zeros(num_compute + 3, np.int64)
    for c in range(len(t.kind)):
        b = bucket_of[c]
        ready, need = rows[b, READY], rows[b, NEED]
        flat = figures[b, FLAT] == 1
        out = f.output_storage[c]
        last = f.last_compute[out] if out >= 0 else -1
        if t.kind[c] == ALL_GATHER or t.on_path[c]:
            begin = min(need if early or not flat else t.need_slot[c], rows[b, LATEST])
            delta[begin] += t.output_bytes[c]
            delta[max(begin, last) + 1] -= t.output_bytes[c]
            if flat:
                until = need if early else t.need_slot[c]
                delta[need] += t.output_bytes[c]
                delta[until + 1] -= t.output_bytes[c]
            elif not t.on_path[c]:
                delta[begin] += t.input_bytes[c]
                delta[begin + 1] -= t.input_bytes[c]
        else:
            delta[ready] += t.output_bytes[c]
            delta[max(ready, last) + 1] -= t.output_bytes[c]
        s = f.input_storage[c]
        if s >= 0 and f.birth_compute[s] >= 0:
            until = max(f.last_compute[s], ready)
            delta[f.birth_compute[s]] += f.storage_bytes[s]
            delta[until + 1] -= f.storage_bytes[s]
            if flat and not t.on_path[c]:
                delta[ready] += t.input_bytes[c]
                delta[ready + 1] -= t.input_bytes[c]
            if rows[b, HELD] > 0 and not t.on_path[c]:
                rows[b, FREED] += (f.storage_bytes[s] if until == ready else 0) + (
                    t.input_bytes[c] if flat else 0
                )
    used = np.zeros(num_compute + 1, np.int64)
    live = 0
    for k in range(num_compute + 1):
        live += delta[k]
        used[k] = live + max(f.base_slot[k], f.base_compute[k])
    return used
