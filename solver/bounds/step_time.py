"""Lower bounds on step time and on peak memory that no schedule can beat, in milliseconds of work; proofs in ``docs/formulation.md``.

Every bound allows any partition into buckets and any position of every unit; compute keeps its order. In ticks:

    d_k    duration of spine node k;  m of them
    o_c    least work that collective c puts on the compute stream: its launch where it is alone, its share of the copies where it is not,
           its prologue and epilogue
    L(S)   least time that a stream is busy with the collectives S in any buckets: for each key, bytes times the least price per byte of
           any bucket that the byte cap allows, and never less than the largest of them alone
    W(S)   least work of the collectives S on the compute stream: for each key either all are launched alone, or at least one bucket is:
           sum over keys of min(sum of launches, launch of a bucket + least copy beyond its rate + sum of o_c)
    E_k    lower bound on the begin of spine node k;  R_k on when gap k, the place before it, is reached: R_0 = 0, R_{k+1} = E_k + d_k

    (B1)  E_k >= R_k;  E_k >= sum_{i<k} d_i + sum_{c needed at or before k} o_c
    (B2)  E_k >= L(gathers of a stream needed at or before k)             all must have been transferred
    (B3)  E_k >= R_ready(c) + launch of c + T_c,  k = need(c)             and along chains of collectives that wait for each other
    (B4)  step time >= E_k + sum_{i>=k} d_i + W(reductions ready after k)
    (B5)  step time >= R_k + L(S),  S = reductions of a stream ready at or after gap k: they are launched behind it
          step time >= sum_{i<k} d_i + sum_{c needed before k} o_c + max_{c in S} T_c + sum_{other reductions c of the stream} min(o_c
          without epilogue, least slope of the price * bytes_c): each is launched before the largest of S, or transferred with or after it
    (B6)  step time >= sum_i d_i + W(all collectives)                     the compute stream
    (B7)  step time >= L(all collectives of a stream) + the spine before the first can start + the spine after the last must have ended

Memory. At spine node k everything with a fixed life is alive, and so is every gathered weight needed at or before k and read at or after
k, every gradient from its birth to its last reader on the spine, and, at the end, every output of the graph.
"""

from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.costs.price_curve import PriceCurve
from apsched.problem.problem import Problem
from apsched.solver.arrays.problem_arrays import ALL_GATHER, ALL_REDUCE, Compact, Ints
from apsched.units import ALLOCATION_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBound:
    """A proven lower limit of step time, and what it rests on."""

    ticks: int
    source: str


def step_time_bound(problem: Problem, compact: Compact, caps: Caps) -> TimeBound:
    """Return the best of all bounds on time."""
    if not len(compact.kind):
        return TimeBound(ticks=int(compact.spine_ticks.sum()), source="compute")
    work = least_work(problem, compact)
    begin, reached, begin_source = _begins(problem, compact, caps, work)
    spine_after = np.concatenate((np.cumsum(compact.spine_ticks[::-1])[::-1], [0]))
    everything = np.arange(len(compact.kind))
    candidates = [TimeBound(ticks=int(compact.spine_ticks.sum()) + work_bound(problem, compact, work, everything), source="compute")]
    k, total = _followed_by_compute(problem, compact, work, begin, spine_after)
    candidates.append(TimeBound(ticks=total, source=f"{begin_source[k]} + compute" if begin_source[k] != "compute" else "compute"))
    candidates += _tails(problem, compact, caps, reached, begin_source, work)
    candidates += _streams(problem, compact, caps, work, spine_after)
    return max(candidates, key=lambda bound: bound.ticks)


def least_work(problem: Problem, compact: Compact) -> Ints:
    """Return for each collective the least time that it takes on the compute stream, alone or in a bucket."""
    least = np.zeros(len(compact.kind), dtype=np.int64)
    copy_rate = least_rate(problem.copy_price, None)
    for c, collective in enumerate(problem.collectives):
        own = sum(problem.duration_ticks[n] for n in (*collective.prologue, *collective.epilogue))
        least[c] = own + int(compact.launch_ticks[c])
        if compact.bucketable[c]:
            copies = int(collective.copied_bytes * copy_rate)
            if compact.kind[c] == ALL_GATHER:
                copies += int(compact.copy_out_ticks[c])
            cast = problem.duration_ticks[collective.cast[0]] if collective.cast else 0
            least[c] = min(least[c], own - cast + copies)
    return least


def work_bound(problem: Problem, compact: Compact, work: Ints, collectives: Ints) -> int:
    """Return W(S): the least time that ``collectives`` take on the compute stream; of all of them, beside the spine, it is (B6)."""
    total = 0
    for key in np.unique(compact.key[collectives]):
        mine = collectives[compact.key[collectives] == key]
        total += _work_of_key(problem, compact, int(work[mine].sum()), int(_alone(problem, compact, mine).sum()), mine)
    return total


def copy_rest(problem: Problem) -> int:
    """Return the least that any copy costs beyond its bytes at the least rate: its latency, where the price is a line."""
    price = problem.copy_price
    rate = least_rate(price, None)
    return int(max(min(p - rate * s for s, p in zip(price.size_bytes, price.price_ticks, strict=True)), 0))


def _work_of_key(problem: Problem, compact: Compact, shared: int, alone: int, mine: Ints) -> int:
    if not compact.bucketable[mine].any():
        return alone
    return min(alone, shared + int(compact.bucket_launch_ticks[mine[0]]) + copy_rest(problem))


def _alone(problem: Problem, compact: Compact, collectives: Ints) -> Ints:
    """Return the work of each of ``collectives`` launched alone."""
    own = [
        sum(problem.duration_ticks[n] for n in (*problem.collectives[c].prologue, *problem.collectives[c].epilogue)) for c in collectives
    ]
    return compact.launch_ticks[collectives] + np.array(own, dtype=np.int64)


def transfer_bound(problem: Problem, compact: Compact, caps: Caps, collectives: Ints) -> int:
    """Return L(S) of ``collectives``, which share a stream: the least time that their transfers take in any buckets."""
    total = 0
    for key in np.unique(compact.key[collectives]):
        mine = collectives[compact.key[collectives] == key]
        together = mine[compact.bucketable[mine]]
        total += int(compact.transfer_ticks[mine[~compact.bucketable[mine]]].sum())
        if len(together):
            total += _shared(problem.keys[key].price, caps, compact.size_bytes[together], compact.transfer_ticks[together])
    return total


def _shared(price: PriceCurve, caps: Caps, sizes: Ints, alone: Ints) -> int:
    largest = int(sizes.sum())
    if caps.bucket_cap_bytes is not None:
        largest = min(largest, max(caps.bucket_cap_bytes, int(sizes.max())))
    return max(int(alone.max()), int(int(sizes.sum()) * least_rate(price, largest)))


def least_rate(price: PriceCurve, largest_bytes: int | None) -> float:
    """Return the least price per byte of any size up to ``largest_bytes``; on a linear piece it is at one of the ends."""
    sizes = [s for s in price.size_bytes if s > 0 and (largest_bytes is None or s <= largest_bytes)]
    if largest_bytes:
        sizes.append(largest_bytes)
    if largest_bytes is None:  # beyond the last point the rate tends to the last slope
        run = price.size_bytes[-1] - price.size_bytes[-2]
        tail = (price.price_ticks[-1] - price.price_ticks[-2]) / run
        return min([tail, *(price.price_ticks[price.size_bytes.index(s)] / s for s in sizes)]) * (1 - 1e-12)
    return max(min((max(price(s) - 1, 0) / s for s in sizes), default=0.0) * (1 - 1e-12), 0.0)


def _begins(problem: Problem, compact: Compact, caps: Caps, work: Ints) -> tuple[Ints, Ints, list[str]]:
    """Return E_k and R_k for each spine node (and the end), with what E_k rests on: (B1), (B2), (B3)."""
    num_spine = len(compact.spine_ticks)
    floor, why = np.zeros(num_spine + 1, dtype=np.int64), ["compute"] * (num_spine + 1)
    moving = np.nonzero((compact.kind == ALL_GATHER) & ~compact.on_path & (compact.need_gap < num_spine))[0]
    for stream in range(compact.num_streams):
        mine = moving[compact.stream[moving] == stream]
        mine = mine[np.argsort(compact.need_gap[mine], kind="stable")]
        for gap, load in _prefix_loads(problem, compact, caps, mine):
            if load > floor[gap]:
                floor[gap], why[gap] = load, f"gathers of group {problem.streams[stream]}"
    by_need: dict[int, list[int]] = {}
    for c in range(len(compact.kind)):
        by_need.setdefault(int(compact.need_gap[c]), []).append(c)
    begin = np.zeros(num_spine + 1, dtype=np.int64)
    source = ["compute"] * (num_spine + 1)
    reached = np.zeros(num_spine + 1, dtype=np.int64)
    done = 0  # work of spine nodes before k and of collectives needed by k
    takes = least_launch(problem, compact) + compact.transfer_ticks
    finish: dict[int, int] = {}
    for k in range(num_spine + 1):
        if k:
            reached[k] = begin[k] = begin[k - 1] + compact.spine_ticks[k - 1]
            source[k] = source[k - 1]
            done += int(compact.spine_ticks[k - 1])
        if floor[k] > begin[k]:
            begin[k], source[k] = floor[k], why[k]
        for c in by_need.get(k, ()) if k < num_spine else ():
            done += int(work[c])
            end = _earliest_end(compact, c, reached, takes, finish)
            if end > begin[k]:
                begin[k], source[k] = end, f"chain through {problem.node_names[problem.collectives[c].start]}"
        if done > begin[k]:
            begin[k], source[k] = done, "compute"
    return begin, reached, source


def earliest(problem: Problem, compact: Compact, caps: Caps) -> tuple[Ints, Ints]:
    """Return E_k and R_k for each spine node, and the end."""
    return _begins(problem, compact, caps, least_work(problem, compact))[:2]


def _prefix_loads(problem: Problem, compact: Compact, caps: Caps, mine: Ints) -> list[tuple[int, int]]:
    """Return (gap, L of the gathers needed at or before it) for each gap where one is needed; linear in the gathers."""
    loads = []
    size: dict[int, int] = {}
    alone: dict[int, int] = {}
    fixed = 0
    for i, c in enumerate(mine):
        key = int(compact.key[c])
        if compact.bucketable[c]:
            size[key] = size.get(key, 0) + int(compact.size_bytes[c])
            alone[key] = max(alone.get(key, 0), int(compact.transfer_ticks[c]))
        else:
            fixed += int(compact.transfer_ticks[c])
        gap = int(compact.need_gap[c])
        if i + 1 == len(mine) or compact.need_gap[mine[i + 1]] != gap:
            load = fixed
            for k, total in size.items():
                price = problem.keys[k].price
                largest = total if caps.bucket_cap_bytes is None else min(total, max(caps.bucket_cap_bytes, _largest(compact, mine, k)))
                load += max(alone[k], int(total * least_rate(price, largest)))
            loads.append((gap, load))
    return loads


def _largest(compact: Compact, mine: Ints, key: int) -> int:
    return int(compact.size_bytes[mine[compact.key[mine] == key]].max())


def least_launch(problem: Problem, compact: Compact) -> Ints:
    """Return for each collective the least time on the compute stream that its launch takes, in a bucket with the copy-in."""
    copies = (compact.copied_bytes * least_rate(problem.copy_price, None)).astype(np.int64)
    shared = compact.bucket_launch_ticks + copy_rest(problem) + copies
    launch: Ints = np.where(compact.bucketable, np.minimum(compact.launch_ticks, shared), compact.launch_ticks)
    return launch


def _earliest_end(compact: Compact, c: int, reached: Ints, takes: Ints, finish: dict[int, int]) -> int:
    """Return a lower bound on the end of collective ``c``: its readiness, the chain before it, its launch and its transfer."""
    if c not in finish:
        ready = int(reached[compact.ready_gap[c]])
        before = compact.after_list[compact.after_begin[c] : compact.after_begin[c + 1]]
        chain = max((_earliest_end(compact, int(d), reached, takes, finish) for d in before), default=0)
        finish[c] = max(ready, chain) + int(takes[c])
    return finish[c]


def _followed_by_compute(problem: Problem, compact: Compact, work: Ints, begin: Ints, spine_after: Ints) -> tuple[int, int]:
    """Return the k that gives most, and the bound: (B4)."""
    num_spine = len(compact.spine_ticks)
    later = np.zeros(num_spine + 1, dtype=np.int64)
    reductions = np.nonzero((compact.need_gap >= num_spine) & ((compact.kind != ALL_GATHER) | compact.on_path))[0]
    for key in np.unique(compact.key[reductions]):
        mine = reductions[compact.key[reductions] == key]
        shared = _ready_after(compact, mine, work[mine])
        alone = _ready_after(compact, mine, _alone(problem, compact, mine))
        fixed = int(compact.bucket_launch_ticks[mine[0]]) + copy_rest(problem) if compact.bucketable[mine].any() else 0
        later += np.where(alone > 0, np.minimum(alone, shared + fixed), 0)
    totals = begin + spine_after + later
    k = int(np.argmax(totals))
    return k, int(totals[k])


def _ready_after(compact: Compact, mine: Ints, ticks: Ints) -> Ints:
    """Return for each k the sum of ``ticks`` of collectives ready at gap k+1 or later: launched after spine node k."""
    at = np.zeros(len(compact.spine_ticks) + 2, dtype=np.int64)
    np.add.at(at, compact.ready_gap[mine], ticks)
    after: Ints = np.cumsum(at[::-1])[::-1][1:]
    return after


def _tails(problem: Problem, compact: Compact, caps: Caps, reached: Ints, source: list[str], work: Ints) -> list[TimeBound]:
    """Return the best of both forms over all streams: (B5)."""
    num_spine = len(compact.spine_ticks)
    bounds = []
    moving = np.nonzero((compact.need_gap >= num_spine) & ~compact.on_path)[0]
    needed = np.nonzero(compact.need_gap < num_spine)[0]
    steps = np.concatenate(([0], compact.spine_ticks))
    np.add.at(steps, compact.need_gap[needed] + 1, work[needed])
    done = np.cumsum(steps)  # done[k]: work that is behind when gap k is reached
    for stream in range(compact.num_streams):
        mine = moving[compact.stream[moving] == stream]
        mine = mine[np.argsort(-compact.ready_gap[mine], kind="stable")]
        bytes_ticks = np.array([compact.size_bytes[c] * least_slope(problem.keys[int(compact.key[c])].price) for c in mine]).astype(
            np.int64
        )
        epilogues = np.array([sum(problem.duration_ticks[n] for n in problem.collectives[c].epilogue) for c in mine], dtype=np.int64)
        copies = np.where(compact.kind[mine] == ALL_GATHER, compact.copy_out_ticks[mine], 0)  # may run during the last transfer
        either = np.minimum(np.maximum(work[mine] - epilogues - copies, 0), bytes_ticks)
        for i in range(len(mine)):
            gap = compact.ready_gap[mine[i]]
            if (i + 1 < len(mine) and compact.ready_gap[mine[i + 1]] == gap) or (i >= _TAIL_TERMS and i + 1 < len(mine)):
                continue
            load = transfer_bound(problem, compact, caps, mine[: i + 1])
            where = f"tail of group {problem.streams[stream]}"
            bounds.append(TimeBound(ticks=int(reached[gap]) + load, source=f"{source[max(gap - 1, 0)]} + {where}"))
            largest = int(compact.transfer_ticks[mine[: i + 1]].max())
            bounds.append(TimeBound(ticks=int(done[gap]) + largest - 1 + int(either[i + 1 :].sum()), source=f"compute + {where}"))
    return sorted(bounds, key=lambda bound: -bound.ticks)[:1]


def least_slope(price: PriceCurve) -> float:
    """Return the least price of one more byte anywhere on the curve."""
    pieces = zip(price.size_bytes, price.size_bytes[1:], price.price_ticks, price.price_ticks[1:], strict=False)
    return min((q - p) / (b - a) for a, b, p, q in pieces) * (1 - 1e-12)


_TAIL_TERMS = 64
"""Tails of at most this many reductions are tried, and the whole stream: keeps (B5) linear in their number."""


def _streams(problem: Problem, compact: Compact, caps: Caps, work: Ints, spine_after: Ints) -> list[TimeBound]:
    """Return for each stream all of its transfers, the least that comes before any and the least that comes after all: (B7)."""
    bounds = []
    num_spine = len(compact.spine_ticks)
    reached = np.concatenate(([0], np.cumsum(compact.spine_ticks)))
    for stream in range(compact.num_streams):
        mine = np.nonzero(compact.stream == stream)[0]
        head = int(reached[np.minimum(compact.ready_gap[mine], num_spine)].min())
        tail = int(spine_after[np.minimum(compact.need_gap[mine], num_spine)].min())
        load = transfer_bound(problem, compact, caps, mine)
        bounds.append(TimeBound(ticks=head + load + tail, source=f"stream of group {problem.streams[stream]}"))
    return bounds


def memory_bound(compact: Compact) -> int:
    """Return a lower bound on the peak of any schedule, in bytes, what the caller keeps included."""
    return max(int(least_live_bytes(compact).max()), compact.kept_bytes + int(compact.base_gap_bytes.max()), bytes_at_first(compact))


def bytes_at_first(compact: Compact) -> int:
    """Return the bytes of all inputs, which are there before anything else."""
    given = (compact.storage_birth_spine < 0) & (compact.storage_birth_float < 0)
    return compact.kept_bytes + int(compact.base_gap_bytes[0]) + int(compact.storage_bytes[given].sum())


def least_live_bytes(compact: Compact) -> Ints:
    """Return the bytes that are alive at each spine node, and at the output, in every schedule; what the caller keeps included."""
    num_spine = len(compact.spine_ticks)
    delta = np.zeros(num_spine + 3, dtype=np.int64)
    for s in range(len(compact.storage_bytes)):
        first, last = int(compact.storage_birth_spine[s]), int(compact.storage_last_spine[s])
        size = int(compact.storage_bytes[s])
        if first < 0:
            first = _needed_from(compact, s)
            if first == num_spine:  # an output may lie inside a bucket's buffer, which is rounded up once
                size = max(size - ALLOCATION_BYTES + 1, 0)
        if first <= last:
            delta[first] += size
            delta[last + 1] -= size
    live: Ints = compact.kept_bytes + compact.base_spine_bytes + np.cumsum(delta)[: num_spine + 1]
    return live


def _needed_from(compact: Compact, s: int) -> int:
    """Return the first spine node at which storage ``s``, born at a float, must be alive; past the end if at none."""
    f = int(compact.storage_birth_float[s])
    if f < 0:
        return 0  # alive from the beginning
    owners = np.nonzero(compact.float_of_start == f)[0]
    if len(owners) and compact.output_storage[owners[0]] == s and compact.kind[owners[0]] != ALL_REDUCE:
        return int(compact.need_gap[owners[0]])
    return len(compact.spine_ticks) + 1
