"""Place the units of a partition around the spine as a policy says, under caps: a partition becomes a program.

Every gather's just-in-time bytes are reserved beforehand, so that a far prefetch cannot starve a reduction. The pass over the spine
(``apsched.solver.place_pass``) is a heuristic: ``apsched.solver.evaluate`` says what its program costs.
"""

import numpy as np

from apsched.config import Caps
from apsched.solver.compact import ALL_GATHER, ALL_REDUCE, Bools, Compact, Ints
from apsched.solver.compiled import compiled
from apsched.solver.evaluate import Program
from apsched.solver.partition import Partition
from apsched.solver.place_pass import BLOCK, LENGTH, State, Units, place
from apsched.solver.policies import UNLIMITED, Policy, launch_gaps, queue, want_gaps


def construct(compact: Compact, partition: Partition, policy: Policy, caps: Caps, memory_cap_bytes: int | None = None) -> Program:
    """Return the program that ``policy`` makes of ``partition``; ``memory_cap_bytes`` overrides the cap to steer by."""
    cap = caps.memory_cap_bytes if memory_cap_bytes is None else memory_cap_bytes
    units = _units(compact, partition, policy, caps, int(UNLIMITED) if cap is None else max(cap - compact.kept_bytes, 0))
    p, c = partition, compact
    used = _reserve(
        policy.copy_out_early, p.bucket_of, p.member_begin, units.ready, p.need_gap, c.base_gap_bytes, c.base_spine_bytes,
        c.kind, c.input_bytes, c.output_bytes, c.on_path, c.need_gap, c.storage_bytes, c.storage_birth_spine, c.storage_last_spine,
        c.input_storage, c.output_storage,
    )  # fmt: skip
    num_buckets, num_collectives, num_spine = len(p.buckets), len(c.kind), len(c.spine_ticks)
    length = num_spine + 2 * num_buckets + num_collectives
    state = State(
        clock=np.array([0, 0, 0, 0, 0, UNLIMITED], dtype=np.int64),
        operation=np.empty(length, dtype=np.int64),
        argument=np.empty(length, dtype=np.int64),
        used=used,
        block_added=np.zeros(num_spine // BLOCK + 1, dtype=np.int64),
        block_most=np.maximum.reduceat(used, np.arange(0, num_spine + 1, BLOCK)),
        transfer_end=np.zeros(num_buckets, dtype=np.int64),
        stream_free=np.zeros(c.num_streams, dtype=np.int64),
        launched=np.zeros(num_buckets, dtype=np.bool_),
        waited=np.zeros(num_buckets, dtype=np.bool_),
        out=np.zeros(num_collectives, dtype=np.bool_),
        outstanding=np.empty(num_buckets, dtype=np.int64),
    )
    place(units, state, queue(compact, partition), policy.copy_out_early, policy.wait_reductions_at_once, policy.in_stalls)
    done = int(state.clock[LENGTH])
    return Program(partition=partition, operation=state.operation[:done], argument=state.argument[:done])


def _units(compact: Compact, partition: Partition, policy: Policy, caps: Caps, cap_bytes: int) -> Units:
    p, c = partition, compact
    first = p.member_list[p.member_begin[:-1]]
    several = np.diff(p.member_begin) > 1
    gathered = (c.kind[first] == ALL_GATHER) & ~c.on_path[first]
    copied = several & (c.kind[first] == ALL_GATHER)
    prologue, epilogue = (_sums(c.float_ticks, *csr) for csr in ((c.prologue_begin, c.prologue_list), (c.epilogue_begin, c.epilogue_list)))

    def per_bucket(values: Ints) -> Ints:
        return np.add.reduceat(values[p.member_list], p.member_begin[:-1]) if len(first) else np.zeros(0, dtype=np.int64)

    casts = np.where(c.cast_float >= 0, c.float_ticks[c.cast_float], 0)
    inputs, outputs = per_bucket(c.input_bytes), per_bucket(c.output_bytes)
    return Units(
        spine_ticks=c.spine_ticks,
        bucket_of=p.bucket_of,
        member_begin=p.member_begin,
        member_list=p.member_list,
        after_begin=c.after_begin,
        after_list=c.after_list,
        need_of=c.need_gap,
        copy_out_work=c.copy_out_ticks + epilogue,
        stream=c.stream[first],
        gathered=gathered,
        copied=copied,
        want=want_gaps(c, p, policy, caps),
        ready=np.where(gathered, p.ready_gap, launch_gaps(c, p, policy)),
        need=p.need_gap,
        transfer_ticks=p.transfer_ticks,
        launch_work=p.launch_ticks + p.copy_in_ticks + per_bucket(prologue) - np.where(several, per_bucket(casts), 0),
        wait_work=np.where(copied, 0, per_bucket(epilogue)),
        ahead_bytes=outputs + np.where(several, 0, inputs),
        held_bytes=np.where(c.kind[first] == ALL_REDUCE, 0, inputs),
        flying_bytes=per_bucket(np.where(c.on_path, 0, c.output_bytes)),
        caps=np.array([cap_bytes, UNLIMITED if caps.in_flight_cap_bytes is None else caps.in_flight_cap_bytes], dtype=np.int64),
    )


def _sums(values: Ints, begin: Ints, entries: Ints) -> Ints:
    """Return for each row of a CSR pair the sum of the values that it lists."""
    total = np.concatenate(([0], np.cumsum(values[entries])))
    sums: Ints = total[begin[1:]] - total[begin[:-1]]
    return sums


@compiled
def _reserve(
    early: bool, bucket_of: Ints, member_begin: Ints, ready_gap: Ints, need_gap: Ints, base_gap: Ints, base_spine: Ints, kind: Ints,
    input_bytes: Ints, output_bytes: Ints, on_path: Bools, need_of: Ints, storage_bytes: Ints, birth_spine: Ints, last_spine: Ints,
    input_storage: Ints, output_storage: Ints,
) -> Ints:  # fmt: skip
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
