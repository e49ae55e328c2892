"""The best partitions of a line with one bucket open at a time; ``docs/formulation.md`` has the
formulas:

    (D1) stretches of a line, from one head to the next
    (D2) the front of what they add up to

A bucket is open from its head to the next head. Of the members between, those of at most some size
ride in it, and the others are launched alone. Two times count: when the stream is free, and when
the compute stream comes to the next member. Neither has a price in terms of the other, so all pairs
stay of which no other is better in both.
"""

import numpy as np

from apsched.solver.arrays.bucket_prices import Tables, curve_price
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Ints

NOWHERE = -1
STREAM, CLOCK_BY_STREAM, CLOCK = range(3)
"""Columns of an effect: what a stretch adds to the time of the stream, to the clock where it waits
for the stream, and to the clock where it does not.
"""


@compiled
def effects(
    t: Tables,
    members: Ints,
    gap_ticks: Ints,
    other_ticks: Ints,
    rider_bytes: Ints,
    lengths: Ints,
    gathers: bool,
    copies: bool,
    bucket_cap: int,
    span_cap: int,
) -> Ints:
    """(D1) Return what each stretch of a line adds: (n, lengths, sizes, 3), from a head over so
    many members, where those of at most ``rider_bytes`` ride; ``NOWHERE`` where that bucket cannot be.

    ``copies`` tells whether copies take time on the compute stream.
    """
    n = len(members)
    result = np.full((n, len(lengths), len(rider_bytes), 3), NOWHERE, np.int64)
    for i in range(n):
        head = members[i]
        for q in range(len(rider_bytes)):
            if t.size_bytes[head] > rider_bytes[q]:
                continue
            size, copied, riders, before, after, x = 0, 0, 0, 0, 0, 0
            ready, need = t.ready_slot[head], min(t.need_slot[head], t.launch_last[head])
            low, high = t.start_rank[head], t.start_rank[head]
            for j in range(i, min(n, i + lengths[-1])):
                c = members[j]
                if t.size_bytes[c] <= rider_bytes[q]:
                    riders += 1
                    size, copied = size + t.size_bytes[c], copied + t.copied_bytes[c]
                    before += t.prologue_ticks[c] - t.cast_ticks[c]
                    after += t.copy_out_ticks[c] if copies and gathers else 0
                    ready = max(ready, t.ready_slot[c])
                    need = min(need, t.need_slot[c], t.launch_last[c])
                    low, high = min(low, t.start_rank[c]), max(high, t.start_rank[c])
                    both = t.bucketable[head] and t.bucketable[c]
                    within = both and size <= bucket_cap and high - low <= span_cap
                    if riders > 1 and not (within and ready <= need):
                        break
                if j + 1 - i < lengths[x]:
                    continue
                if riders == 1:
                    first = t.transfer_ticks[head], t.launch_ticks[head] + t.prologue_ticks[head], 0
                else:
                    work = t.key_launch[t.key[head]] + before
                    work += curve_price(t, len(t.key_launch), copied) if copies else 0
                    first = curve_price(t, t.key[head], size), work, after
                stretch = members[i : j + 1], gap_ticks[i : j + 1], other_ticks[i : j + 1]
                result[i, x, q] = _walked(t, stretch, first, rider_bytes[q], gathers)
                x += 1
    return result


@compiled
def _walked(
    t: Tables,
    stretch: tuple[Ints, Ints, Ints],
    first: tuple[int, int, int],
    rider_bytes: int,
    gathers: bool,
) -> Ints:
    """Return the effect of one stretch: its members, and what stands between them on the compute
    stream and on their own; ``first`` are transfer, work before and work after it of the bucket.
    """
    transfer, work, after = first
    stream, through, clock = transfer, transfer + after, work + after
    if not gathers:  # seen from the end, the work before a transfer comes after it
        through, clock = transfer + work, work
    for k in range(len(stretch[0])):
        c = stretch[0][k]
        if t.size_bytes[c] > rider_bytes:
            alone = t.launch_ticks[c] + t.prologue_ticks[c]
            stream, clock = stream + t.transfer_ticks[c], clock + alone
            through = max(through + alone, stream) if gathers else max(through, stream) + alone
        done = stretch[1][k] + (t.epilogue_ticks[c] if gathers else 0)
        stream, through, clock = stream + stretch[2][k], through + done, clock + done
    effect = np.empty(3, np.int64)
    effect[STREAM], effect[CLOCK_BY_STREAM], effect[CLOCK] = stream, through, clock
    return effect


@compiled
def front(
    effect: Ints, lengths: Ints, first_ticks: int, launch_ticks: int, most: int
) -> tuple[Ints, Ints]:
    """(D2) Return the labels of each member, (n + 1, most, 5), and how many there are, (n + 1,).

    A label is the time of the stream, the clock, and where both come from: a stretch, by the member
    where it begins and its size of riders, and the label there. Labels ascend in the time of the
    stream; where there are more than ``most``, so many stay, at equal distances in that order.
    """
    n, room = effect.shape[0], 8 * most
    labels = np.full((n + 1, most, 5), -1, np.int64)
    count = np.zeros(n + 1, np.int64)
    labels[0, 0, 0], labels[0, 0, 1], count[0] = launch_ticks, first_ticks, 1
    here = np.empty((room + 1, 5), np.int64)
    for j in range(1, n + 1):
        size = 0
        for x in range(len(lengths)):
            i = j - lengths[x]
            for q in range(effect.shape[2] if i >= 0 else 0):
                stretch = effect[i, x, q]
                for k in range(count[i] if stretch[STREAM] != NOWHERE else 0):
                    stream = labels[i, k, 0] + stretch[STREAM]
                    through = labels[i, k, 0] + stretch[CLOCK_BY_STREAM]
                    clock = max(through, labels[i, k, 1] + stretch[CLOCK])
                    low, size = _make_room(here, size, stream, clock)
                    if low >= 0:
                        here[low, 0], here[low, 1] = stream, clock
                        here[low, 2], here[low, 3], here[low, 4] = i, q, k
                    if size > room:
                        size = _thin(here, size, room // 2)
        count[j] = _thin(here, size, most)
        labels[j, : count[j]] = here[: count[j]]
    return labels, count


@compiled
def _make_room(labels: Ints, size: int, stream: int, clock: int) -> tuple[int, int]:
    """Return where a label with these times goes, and how many there are then; -1 where one is as
    good. Labels that it beats are gone.
    """
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if labels[middle, 0] < stream:
            low = middle + 1
        else:
            high = middle
    if low > 0 and labels[low - 1, 1] <= clock:
        return -1, size
    if low < size and labels[low, 0] == stream and labels[low, 1] <= clock:
        return -1, size
    past = low
    while past < size and labels[past, 1] >= clock:
        past += 1
    moved = low + 1 - past
    if moved > 0:
        for y in range(size, low, -1):
            labels[y] = labels[y - 1]
    elif moved < 0:
        for y in range(past, size):
            labels[y + moved] = labels[y]
    return low, size + moved


@compiled
def _thin(labels: Ints, size: int, most: int) -> int:
    """Keep at most ``most`` of the labels, at equal distances, both ends among them; return how
    many there are.
    """
    if size <= most:
        return size
    for x in range(most):
        labels[x] = labels[x * (size - 1) // (most - 1)]
    return most
