"""The best partitions of a line with one bucket open at a time: ``docs/formulation.md``, (D2).

A bucket is open from its head to the next head. Of the members between, those of at most some size
ride in it, and the others are launched alone. Two times count: when the stream is free, and when
the compute stream comes to the next member. Neither has a price in terms of the other, so all pairs
stay of which no other is better in both.
"""

from dataclasses import dataclass

import numpy as np

from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.search.open_bucket.stretches import NEVER, Stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Pairs of times at one member, ascending in that of the stream, and where they come from."""

    stream_ticks: Ints
    clock_ticks: Ints
    stretch: Ints
    """The stretch behind which they stand, by its length and size of riders: x * sizes + q."""
    before: Ints
    """The label where that stretch begins."""


def front(found: Stretches, first_ticks: int, launch_ticks: int, most: int) -> list[Labels]:
    """(D2) Return the labels of each member, and of the end of the line.

    Where there are more than ``most`` at one, so many stay, at equal distances in their order.
    """
    _, num_sizes, num_members = found.stream_ticks.shape
    none = np.zeros(1, dtype=np.int64)
    times = np.full((2, num_members + 1, most), NEVER)
    times[:, 0, 0] = launch_ticks, first_ticks
    labels = [
        Labels(stream_ticks=times[0, 0, :1], clock_ticks=times[1, 0, :1], stretch=none, before=none)
    ]
    for j in range(1, num_members + 1):
        x = np.arange(np.searchsorted(found.lengths, j, side="right"))
        i = j - found.lengths[x]
        stream_added, through_added, clock_added = (
            ticks[x, :, i][:, :, None]
            for ticks in (found.stream_ticks, found.through_ticks, found.clock_ticks)
        )
        stream, clock = times[0, i][:, None], times[1, i][:, None]
        may_be = np.broadcast_to(
            (stream_added < NEVER) & (stream < NEVER), (len(x), num_sizes, most)
        )
        which = np.nonzero(may_be.ravel())[0]
        stream, clock = (
            np.broadcast_to(ticks, may_be.shape).ravel()[which]
            for ticks in (
                stream + stream_added,
                np.maximum(stream + through_added, clock + clock_added),
            )
        )
        kept = _not_beaten(stream, clock)
        kept = kept[spread(len(kept), most)]
        times[0, j, : len(kept)], times[1, j, : len(kept)] = stream[kept], clock[kept]
        labels.append(
            Labels(
                stream_ticks=stream[kept],
                clock_ticks=clock[kept],
                stretch=which[kept] // most,
                before=which[kept] % most,
            )
        )
    return labels


def _not_beaten(stream: Ints, clock: Ints) -> Ints:
    """Return the indices of the pairs that no other is at most as late as in both, the earliest
    streams first; of equal pairs the first.
    """
    order = np.lexsort((clock, stream))
    least = np.minimum.accumulate(clock[order])
    kept = np.ones(len(order), dtype=np.bool_)
    kept[1:] = clock[order][1:] < least[:-1]
    return order[kept]


def spread(num: int, most: int) -> Ints:
    """Return at most ``most`` indices below ``num``, at equal distances, both ends among them."""
    return np.unique(np.linspace(0, num - 1, min(most, num)).astype(np.int64))
