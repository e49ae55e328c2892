"""Lower bounds on step time and on peak memory that no schedule can beat, in milliseconds of work;
proofs in ``docs/formulation.md``. :mod:`apsched.solver.bounds.best` takes the best of all bounds.

Every bound allows any partition into buckets and any position of every unit; compute keeps its
order. In ticks:

    d_k    duration of compute node k;  m of them
    o_c    least work that collective c puts on the compute stream: its launch where it is alone,
           its share of the copies where it is not, its prologue and epilogue
    L(S)   least time that a stream is busy with the collectives S in any buckets: for each key,
           bytes times the least price per byte of any bucket that the byte cap allows, and never
           less than the largest of them alone
    W(S)   least work of the collectives S on the compute stream: for each key either all are
           launched alone, or at least one bucket is:
           sum over keys of min(sum of launches, launch of a bucket + least copy beyond its rate +
           sum of o_c)
    E_k    lower bound on the begin of compute node k;  R_k on when slot k, the place before it,
           is reached: R_0 = 0, R_{k+1} = E_k + d_k

    (B1)  E_k >= R_k;  E_k >= sum_{i<k} d_i + sum_{c needed at or before k} (o_c without epilogue,
          which may run later)
    (B2)  E_k >= L(gathers of a stream needed at or before k)
          all must have been transferred
    (B3)  E_k >= R_ready(c) + launch of c + T_c,  k = need(c)
          and along chains of collectives that wait for each other
    (B4)  step time >= E_k + sum_{i>=k} d_i + W(reductions ready after k)
    (B5)  step time >= R_k + L(S),  S = reductions of a stream ready at or after slot k: they are
          launched behind it;  step time >= sum_{i<k} d_i + sum_{c needed before k} (o_c without
          epilogue) + max_{c in S} T_c + sum_{other reductions c of the stream} min(o_c without
          epilogue, least slope of the price * bytes_c): each is launched before the largest of S,
          or transferred with or after it
    (B6)  step time >= sum_i d_i + W(all collectives)                     the compute stream
    (B7)  step time >= L(all collectives of a stream) + the compute order before the first can start
         + the compute order after the last must have ended

Memory. At compute node k everything with a fixed life is alive, and so is every gathered weight
needed at or before k and read at or after k, every gradient from its birth to its last reader on
the compute order, and, at the end, every output of the graph.
"""

from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.costs.price_curve import PriceCurve
from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import ALL_GATHER, ALL_REDUCE, Ints, ProblemArrays
from apsched.units import ALLOCATION_BYTES

_TAIL_TERMS = 64
"""Tails of at most this many reductions are tried, and the whole stream: keeps (B5) linear in their
number.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBound:
    """A proven lower limit of step time, and the source of the proof."""

    ticks: int
    source: str
    monotone_ticks: int | None = None
    """The best of the bounds that never rise where a memory cap is looser, where that differs."""


def step_time_bound(instance: Instance) -> TimeBound:
    """Return the best of all bounds on time."""
    arrays = instance.arrays
    if not len(arrays.kind):
        return TimeBound(ticks=int(arrays.compute_ticks.sum()), source=BoundSource.COMPUTE)
    work = least_work(instance)
    begin, reached, begin_source = _begins(instance, work)
    compute_after = arrays.time_after
    everything = np.arange(len(arrays.kind))
    candidates = [
        TimeBound(
            ticks=int(arrays.compute_ticks.sum()) + work_bound(instance, work, everything),
            source=BoundSource.COMPUTE,
        )
    ]
    k, total = _followed_by_compute(instance, work, begin, compute_after)
    candidates.append(
        TimeBound(
            ticks=total,
            source=(
                f"{begin_source[k]} + compute"
                if begin_source[k] != BoundSource.COMPUTE
                else BoundSource.COMPUTE
            ),
        )
    )
    candidates += _tails(instance, reached, begin_source, work)
    candidates += _streams(instance, work, compute_after)
    return max(candidates, key=lambda bound: bound.ticks)


def least_work(instance: Instance) -> Ints:
    """Return for each collective the least time that it takes on the compute stream, alone or in a
    bucket.
    """
    arrays = instance.arrays
    alone = arrays.own_work + arrays.launch_ticks
    copy_rate = least_rate(instance.problem.copy_price, None)
    copies = (arrays.copied_bytes * copy_rate).astype(np.int64)
    copies += np.where(arrays.kind == ALL_GATHER, arrays.copy_out_ticks, 0)
    shared = arrays.own_work - arrays.cast_ticks + copies
    least: Ints = np.where(arrays.bucketable, np.minimum(alone, shared), alone)
    return least


def work_bound(instance: Instance, work: Ints, collectives: Ints) -> int:
    """Return W(S): the least time that ``collectives`` take on the compute stream; of all of them,
    beside the compute order, it is (B6).
    """
    total = 0
    for key in np.unique(instance.arrays.key[collectives]):
        of_key = collectives[instance.arrays.key[collectives] == key]
        total += _work_of_key(
            instance, int(work[of_key].sum()), int(_alone(instance, of_key).sum()), of_key
        )
    return total


def copy_rest(problem: Problem) -> int:
    """Return the least that any copy costs beyond its bytes at the least rate: its latency, where
    the price is a line.
    """
    price = problem.copy_price
    rate = least_rate(price, None)
    return int(
        max(min(p - rate * s for s, p in zip(price.size_bytes, price.price_ticks, strict=True)), 0)
    )


def _work_of_key(instance: Instance, shared: int, alone: int, collectives: Ints) -> int:
    if not instance.arrays.bucketable[collectives].any():
        return alone
    return min(
        alone,
        shared
        + int(instance.arrays.bucket_launch_ticks[collectives[0]])
        + copy_rest(instance.problem),
    )


def _alone(instance: Instance, collectives: Ints) -> Ints:
    """Return the work of each of ``collectives`` launched alone."""
    arrays = instance.arrays
    alone: Ints = arrays.launch_ticks[collectives] + arrays.own_work[collectives]
    return alone


def transfer_bound(instance: Instance, collectives: Ints) -> int:
    """Return L(S) of ``collectives``, which share a stream: the least time that their transfers
    take in any buckets.
    """
    arrays = instance.arrays
    total = 0
    for key in np.unique(arrays.key[collectives]):
        of_key = collectives[arrays.key[collectives] == key]
        together = of_key[arrays.bucketable[of_key]]
        total += int(arrays.transfer_ticks[of_key[~arrays.bucketable[of_key]]].sum())
        if len(together):
            total += _shared(
                instance.problem.keys[key].price,
                instance.caps,
                arrays.size_bytes[together],
                arrays.transfer_ticks[together],
            )
    return total


def _shared(price: PriceCurve, caps: Caps, sizes: Ints, alone: Ints) -> int:
    largest = int(sizes.sum())
    if caps.bucket_cap_bytes is not None:
        largest = min(largest, max(caps.bucket_cap_bytes, int(sizes.max())))
    return max(int(alone.max()), int(int(sizes.sum()) * least_rate(price, largest)))


def least_rate(price: PriceCurve, largest_bytes: int | None) -> float:
    """Return the least price per byte of any size up to ``largest_bytes``; on a linear piece it is
    at one of the ends.
    """
    sizes = [s for s in price.size_bytes if s > 0 and (largest_bytes is None or s <= largest_bytes)]
    if largest_bytes:
        sizes.append(largest_bytes)
    if largest_bytes is None:  # beyond the last point the rate tends to the last slope
        run = price.size_bytes[-1] - price.size_bytes[-2]
        tail = (price.price_ticks[-1] - price.price_ticks[-2]) / run
        return min([tail, *(price.price_ticks[price.size_bytes.index(s)] / s for s in sizes)]) * (
            1 - 1e-12
        )
    return max(min((max(price(s) - 1, 0) / s for s in sizes), default=0.0) * (1 - 1e-12), 0.0)


def _begins(instance: Instance, work: Ints) -> tuple[Ints, Ints, list[str]]:
    """Return E_k and R_k for each compute node (and the end), with the source of E_k: (B1), (B2),
    (B3).
    """
    problem, arrays = instance.problem, instance.arrays
    num_compute = len(arrays.compute_ticks)
    floor = np.zeros(num_compute + 1, dtype=np.int64)
    why: list[str] = [BoundSource.COMPUTE] * (num_compute + 1)
    moving = np.nonzero(arrays.gathers)[0]
    for stream in range(arrays.num_streams):
        on_stream = moving[arrays.stream[moving] == stream]
        on_stream = on_stream[np.argsort(arrays.need_slot[on_stream], kind="stable")]
        for slot, load in _prefix_loads(instance, on_stream):
            if load > floor[slot]:
                floor[slot], why[slot] = load, f"gathers of group {problem.streams[stream]}"
    by_need: dict[int, list[int]] = {}
    for c in range(len(arrays.kind)):
        by_need.setdefault(int(arrays.need_slot[c]), []).append(c)
    begin = np.zeros(num_compute + 1, dtype=np.int64)
    source: list[str] = [BoundSource.COMPUTE] * (num_compute + 1)
    reached = np.zeros(num_compute + 1, dtype=np.int64)
    done = 0  # work of compute nodes before k and of collectives needed by k
    takes = least_launch(instance) + arrays.transfer_ticks
    finish: dict[int, int] = {}
    for k in range(num_compute + 1):
        if k:
            reached[k] = begin[k] = begin[k - 1] + arrays.compute_ticks[k - 1]
            source[k] = source[k - 1]
            done += int(arrays.compute_ticks[k - 1])
        if floor[k] > begin[k]:
            begin[k], source[k] = floor[k], why[k]
        for c in by_need.get(k, ()) if k < num_compute else ():
            done += int(work[c] - arrays.epilogue_ticks[c])
            end = _earliest_end(arrays, c, reached, takes, finish)
            if end > begin[k]:
                begin[k], source[k] = (
                    end,
                    f"chain through {problem.node_names[problem.collectives[c].start]}",
                )
        if done > begin[k]:
            begin[k], source[k] = done, BoundSource.COMPUTE
    return begin, reached, source


def earliest(instance: Instance) -> tuple[Ints, Ints]:
    """Return E_k and R_k for each compute node, and the end."""
    return _begins(instance, least_work(instance))[:2]


def _prefix_loads(instance: Instance, collectives: Ints) -> list[tuple[int, int]]:
    """Return (slot, L of the gathers needed at or before it) for each slot where one is needed;
    linear in the gathers.
    """
    arrays = instance.arrays
    loads = []
    size: dict[int, int] = {}
    alone: dict[int, int] = {}
    fixed = 0
    for i, c in enumerate(collectives):
        key = int(arrays.key[c])
        if arrays.bucketable[c]:
            size[key] = size.get(key, 0) + int(arrays.size_bytes[c])
            alone[key] = max(alone.get(key, 0), int(arrays.transfer_ticks[c]))
        else:
            fixed += int(arrays.transfer_ticks[c])
        slot = int(arrays.need_slot[c])
        if i + 1 == len(collectives) or arrays.need_slot[collectives[i + 1]] != slot:
            load = fixed
            for k, total in size.items():
                price = instance.problem.keys[k].price
                largest = (
                    total
                    if instance.caps.bucket_cap_bytes is None
                    else min(
                        total, max(instance.caps.bucket_cap_bytes, _largest(arrays, collectives, k))
                    )
                )
                load += max(alone[k], int(total * least_rate(price, largest)))
            loads.append((slot, load))
    return loads


def _largest(arrays: ProblemArrays, collectives: Ints, key: int) -> int:
    return int(arrays.size_bytes[collectives[arrays.key[collectives] == key]].max())


def least_launch(instance: Instance) -> Ints:
    """Return for each collective the least time on the compute stream that its launch takes, in a
    bucket with the copy-in.
    """
    arrays = instance.arrays
    copies = (arrays.copied_bytes * least_rate(instance.problem.copy_price, None)).astype(np.int64)
    shared = arrays.bucket_launch_ticks + copy_rest(instance.problem) + copies
    launch: Ints = np.where(
        arrays.bucketable, np.minimum(arrays.launch_ticks, shared), arrays.launch_ticks
    )
    return launch


def _earliest_end(
    arrays: ProblemArrays, c: int, reached: Ints, takes: Ints, finish: dict[int, int]
) -> int:
    """Return a lower bound on the end of collective ``c``: its readiness, the chain before it, its
    launch and its transfer.
    """
    if c not in finish:
        ready = int(reached[arrays.ready_slot[c]])
        before = arrays.awaited_by(c)
        chain = max(
            (_earliest_end(arrays, int(d), reached, takes, finish) for d in before), default=0
        )
        finish[c] = max(ready, chain) + int(takes[c])
    return finish[c]


def _followed_by_compute(
    instance: Instance, work: Ints, begin: Ints, compute_after: Ints
) -> tuple[int, int]:
    """Return the k that gives most, and the bound: (B4)."""
    arrays = instance.arrays
    num_compute = len(arrays.compute_ticks)
    later = np.zeros(num_compute + 1, dtype=np.int64)
    reductions = np.nonzero(
        (arrays.need_slot >= num_compute) & ((arrays.kind != ALL_GATHER) | arrays.on_path)
    )[0]
    for key in np.unique(arrays.key[reductions]):
        of_key = reductions[arrays.key[reductions] == key]
        shared = _ready_after(arrays, of_key, work[of_key])
        alone = _ready_after(arrays, of_key, _alone(instance, of_key))
        fixed = (
            int(arrays.bucket_launch_ticks[of_key[0]]) + copy_rest(instance.problem)
            if arrays.bucketable[of_key].any()
            else 0
        )
        later += np.where(alone > 0, np.minimum(alone, shared + fixed), 0)
    totals = begin + compute_after + later
    k = int(np.argmax(totals))
    return k, int(totals[k])


def _ready_after(arrays: ProblemArrays, collectives: Ints, ticks: Ints) -> Ints:
    """Return for each k the sum of ``ticks`` of collectives ready at slot k+1 or later: launched
    after compute node k.
    """
    at = np.zeros(len(arrays.compute_ticks) + 2, dtype=np.int64)
    np.add.at(at, arrays.ready_slot[collectives], ticks)
    after: Ints = np.cumsum(at[::-1])[::-1][1:]
    return after


def _tails(
    instance: Instance,
    reached: Ints,
    source: list[str],
    work: Ints,
) -> list[TimeBound]:
    """Return the best of both forms over all streams: (B5)."""
    problem, arrays = instance.problem, instance.arrays
    num_compute = len(arrays.compute_ticks)
    bounds = []
    moving = np.nonzero((arrays.need_slot >= num_compute) & ~arrays.on_path)[0]
    needed = np.nonzero(arrays.need_slot < num_compute)[0]
    steps = np.concatenate(([0], arrays.compute_ticks))
    np.add.at(steps, arrays.need_slot[needed] + 1, (work - arrays.epilogue_ticks)[needed])
    done = np.cumsum(steps)  # done[k]: work that is behind when slot k is reached
    for stream in range(arrays.num_streams):
        on_stream = moving[arrays.stream[moving] == stream]
        on_stream = on_stream[np.argsort(-arrays.ready_slot[on_stream], kind="stable")]
        bytes_ticks = np.array(
            [
                arrays.size_bytes[c] * least_slope(problem.keys[int(arrays.key[c])].price)
                for c in on_stream
            ]
        ).astype(np.int64)
        copies = np.where(
            arrays.kind[on_stream] == ALL_GATHER, arrays.copy_out_ticks[on_stream], 0
        )  # may run during the last transfer
        either = np.minimum(
            np.maximum(work[on_stream] - arrays.epilogue_ticks[on_stream] - copies, 0), bytes_ticks
        )
        for i in range(len(on_stream)):
            slot = arrays.ready_slot[on_stream[i]]
            if (i + 1 < len(on_stream) and arrays.ready_slot[on_stream[i + 1]] == slot) or (
                i >= _TAIL_TERMS and i + 1 < len(on_stream)
            ):
                continue
            load = transfer_bound(instance, on_stream[: i + 1])
            where = f"tail of group {problem.streams[stream]}"
            bounds.append(
                TimeBound(
                    ticks=int(reached[slot]) + load, source=f"{source[max(slot - 1, 0)]} + {where}"
                )
            )
            largest = int(arrays.transfer_ticks[on_stream[: i + 1]].max())
            bounds.append(
                TimeBound(
                    ticks=int(done[slot]) + largest - 1 + int(either[i + 1 :].sum()),
                    source=f"compute + {where}",
                )
            )
    return sorted(bounds, key=lambda bound: -bound.ticks)[:1]


def least_slope(price: PriceCurve) -> float:
    """Return the least price of one more byte anywhere on the curve."""
    pieces = zip(
        price.size_bytes,
        price.size_bytes[1:],
        price.price_ticks,
        price.price_ticks[1:],
        strict=False,
    )
    return min((q - p) / (b - a) for a, b, p, q in pieces) * (1 - 1e-12)


def _streams(instance: Instance, work: Ints, compute_after: Ints) -> list[TimeBound]:
    """Return for each stream all of its transfers, the least that comes before any and the least
    that comes after all: (B7).
    """
    arrays = instance.arrays
    bounds = []
    num_compute = len(arrays.compute_ticks)
    reached = arrays.time_before
    for stream in range(arrays.num_streams):
        on_stream = np.nonzero(arrays.stream == stream)[0]
        head = int(reached[np.minimum(arrays.ready_slot[on_stream], num_compute)].min())
        tail = int(compute_after[np.minimum(arrays.need_slot[on_stream], num_compute)].min())
        load = transfer_bound(instance, on_stream)
        bounds.append(
            TimeBound(
                ticks=head + load + tail,
                source=f"stream of group {instance.problem.streams[stream]}",
            )
        )
    return bounds


def memory_bound(arrays: ProblemArrays) -> int:
    """Return a lower bound on the peak of any schedule, in bytes, with the bytes that the caller
    keeps.
    """
    return max(
        int(least_live_bytes(arrays).max()),
        arrays.kept_bytes + int(arrays.base_slot_bytes.max()),
        bytes_at_first(arrays),
    )


def bytes_at_first(arrays: ProblemArrays) -> int:
    """Return the bytes of all inputs, which are there before anything else."""
    given = (arrays.storage_birth_compute < 0) & (arrays.storage_birth_attached < 0)
    return (
        arrays.kept_bytes + int(arrays.base_slot_bytes[0]) + int(arrays.storage_bytes[given].sum())
    )


def least_live_bytes(arrays: ProblemArrays) -> Ints:
    """Return the bytes that are alive at each compute node, and at the output, in every schedule,
    with the bytes that the caller keeps.
    """
    num_compute = len(arrays.compute_ticks)
    delta = np.zeros(num_compute + 3, dtype=np.int64)
    for s in range(len(arrays.storage_bytes)):
        first, last = int(arrays.storage_birth_compute[s]), int(arrays.storage_last_compute[s])
        size = int(arrays.storage_bytes[s])
        if first < 0:
            first = _needed_from(arrays, s)
            if (
                first == num_compute
            ):  # an output may lie inside a bucket's buffer, which is rounded up once
                size = max(size - ALLOCATION_BYTES + 1, 0)
        if first <= last:
            delta[first] += size
            delta[last + 1] -= size
    live: Ints = arrays.kept_bytes + arrays.base_compute_bytes + np.cumsum(delta)[: num_compute + 1]
    return live


def _needed_from(arrays: ProblemArrays, s: int) -> int:
    """Return the first compute node at which storage ``s``, born at an attached node, must be
    alive; past the end if at none.
    """
    f = int(arrays.storage_birth_attached[s])
    if f < 0:
        return 0  # alive from the beginning
    owners = np.nonzero(arrays.attached_of_start == f)[0]
    if (
        len(owners)
        and arrays.output_storage[owners[0]] == s
        and arrays.kind[owners[0]] != ALL_REDUCE
    ):
        return int(arrays.need_slot[owners[0]])
    return len(arrays.compute_ticks) + 1
