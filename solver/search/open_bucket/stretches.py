"""The cost of stretches of a line, from the head of one bucket to the next:
``docs/formulation.md``, (D1).
"""

from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.costs.price_curve import PriceCurve
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.search.open_bucket.line import Line

NEVER = np.int64(2**60)
"""A time that no label has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """The addition of each stretch to both times: entry (x, q, i) begins at member i, has
    ``lengths[x]`` members, and its bucket takes riders of at most ``rider_bytes[q]``.
    """

    lengths: Ints
    rider_bytes: Ints
    stream_ticks: Ints
    """To the time of the stream; NEVER where that bucket cannot be."""
    through_ticks: Ints
    """From the time of the stream to the clock."""
    clock_ticks: Ints
    """From the clock to the clock."""


def stretches(
    pricer: Pricer,
    line: Line,
    caps: Caps,
    lengths: Ints,
    rider_bytes: Ints,
    *,
    share: float = 0.0,
    copies: bool = True,
) -> Stretches:
    """Return all stretches of ``line`` with these ``lengths`` and sizes of riders, within the
    ``caps`` on bytes and span.

    ``share`` is that of the transfers of the other direction that goes before later needs;
    ``copies`` states whether copies take time on the compute stream.
    """
    other = (share * line.other_ticks).astype(np.int64)
    added = np.full((3, len(lengths), len(rider_bytes), len(line.members)), NEVER, np.int64)
    for q, most_bytes in enumerate(rider_bytes):
        effects(added[:, :, q], pricer, line, caps, lengths, int(most_bytes), other, copies)
    return Stretches(
        lengths=lengths,
        rider_bytes=rider_bytes,
        stream_ticks=added[0],
        through_ticks=added[1],
        clock_ticks=added[2],
    )


def effects(
    added: Ints,
    pricer: Pricer,
    line: Line,
    caps: Caps,
    lengths: Ints,
    rider_bytes: int,
    other: Ints,
    copies: bool,
) -> None:
    """(D1) Fill ``added`` (3, lengths, members) for one size of riders."""
    t, c = pricer.tables, line.members
    ride: Bools = t.size_bytes[c] <= rider_bytes
    prologue, epilogue = t.prologue_ticks[c], t.epilogue_ticks[c] * line.gathers
    alone = np.where(ride, 0, t.launch_ticks[c] + prologue)
    transfer_alone = np.where(ride, 0, t.transfer_ticks[c])
    stream, clock = _sums(transfer_alone + other), _sums(alone + line.gap_ticks + epilogue)
    num, size, copied, work, copy_out = (
        _sums(np.where(ride, values, 0))
        for values in (
            np.ones(len(c), dtype=np.int64),
            t.size_bytes[c],
            t.copied_bytes[c] * copies,
            prologue - t.cast_ticks[c],
            t.copy_out_ticks[c] * (copies and line.gathers),
        )
    )
    behind = np.where(ride, -NEVER, stream[:-1] + transfer_alone - clock[:-1])
    behind = np.where(ride, -NEVER, behind - alone * line.gathers)
    legal = _Legal(pricer, c, ride, caps)
    longest, latest = np.full(len(c), -NEVER), np.arange(len(c))
    for length in range(1, int(lengths[-1]) + 1):
        i = latest[: len(c) - length + 1]
        longest = np.maximum(longest[: len(i)], behind[length - 1 :])
        fine = legal.longer(length)
        x = int(np.searchsorted(lengths, length))
        if lengths[x] != length:
            continue
        several = num[i + length] - num[i] > 1
        total = size[i + length] - size[i]
        transfer = np.where(
            several,
            _price(pricer.problem.keys[int(t.key[c[0]])].price, total),
            t.transfer_ticks[c[i]],
        )
        copy_in = _price(pricer.problem.copy_price, copied[i + length] - copied[i]) * copies
        launch = t.key_launch[t.key[c[0]]] + work[i + length] - work[i] + copy_in
        before = np.where(several, launch, t.launch_ticks[c[i]] + prologue[i])
        after = np.where(several, copy_out[i + length] - copy_out[i], 0)
        compute = clock[i + length] - clock[i]
        direct = transfer + (after if line.gathers else before) + compute
        by_another = transfer - stream[i] + longest + clock[i + length]
        added[0, x, : len(i)] = np.where(
            ride[i] & fine & (~several | (total <= legal.most_bytes)),
            transfer + stream[i + length] - stream[i],
            NEVER,
        )
        added[1, x, : len(i)] = np.maximum(direct, by_another)
        added[2, x, : len(i)] = before + after + compute


class _Legal:
    """Which members may share a bucket with those that ride behind them, as stretches grow."""

    def __init__(self, pricer: Pricer, members: Ints, ride: Bools, caps: Caps) -> None:
        t = pricer.tables
        need = np.minimum(t.need_slot[members], t.launch_last[members])
        rank, most = t.start_rank[members], caps.max_topo_span
        self.most_bytes = int(NEVER) if caps.bucket_cap_bytes is None else caps.bucket_cap_bytes
        self.span = int(NEVER) if most is None else most
        # the largest of each so far: ready slot, need slot and rank with either sign
        self.rows = np.where(ride, np.stack((t.ready_slot[members], -need, rank, -rank)), -NEVER)
        self.most = self.rows.copy()
        self.single = ride & ~t.bucketable[members]
        self.riders, self.has_single = ride.astype(np.int64), self.single.copy()
        self.ride = ride

    def longer(self, length: int) -> Bools:
        """Return for each first member whether its stretch of ``length`` has a legal bucket; called
        with every length from 1 on.
        """
        num = len(self.ride) - length + 1
        if length > 1:
            self.most = np.maximum(self.most[:, :num], self.rows[:, length - 1 :])
            self.has_single = self.has_single[:num] | self.single[length - 1 :]
            self.riders = self.riders[:num] + self.ride[length - 1 :]
        ready, need, high, low = self.most
        together = ~self.has_single & (ready <= -need) & (high + low <= self.span)
        legal: Bools = (self.riders <= 1) | together
        return legal


def _sums(values: Ints) -> Ints:
    """Return (n + 1,) the sum of all values before each place."""
    return np.concatenate(([0], np.cumsum(values)))


def _price(curve: PriceCurve, size_bytes: Ints) -> Ints:
    """Return the price of each number of bytes, to a tick."""
    sizes, prices = np.array(curve.size_bytes), np.array(curve.price_ticks)
    k = np.clip(np.searchsorted(sizes, size_bytes, side="right") - 1, 0, len(sizes) - 2)
    slope = np.diff(prices) / np.diff(sizes)
    price: Ints = prices[k] + np.ceil((size_bytes - sizes[k]) * slope[k]).astype(np.int64)
    return price
