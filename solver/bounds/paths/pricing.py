"""The arc costs of the cheapest buckets of a key in the network of paths.

For given weights on the arcs (a flow), each cost of a collective has a price: its transfer counts
on all paths that begin with it among the gathers of its stream, or end with it among the
reductions; its work on the compute stream on all paths that pass where it must run.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.bounds.paths.bucket_costs import BucketCosts
from apsched.solver.bounds.paths.cheapest_buckets import cheapest_buckets
from apsched.solver.bounds.paths.launches import Prices, add_launches, with_launches
from apsched.solver.bounds.paths.network import BEGINNING, END, SHIFT, Network
from apsched.solver.bounds.paths.path_work import PathWork

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The cheapest buckets for some weights."""

    ticks: float
    """Their cost, weighed."""
    added: Floats
    """(arcs,) cost that they add to each arc."""


class _Places:
    """Places of the members of a part among the sampled slots: sums over arcs for members, and over
    members for arcs.
    """

    def __init__(self, slot: Ints, slots: Ints) -> None:
        self.after: Ints = np.searchsorted(slots, slot, side="left")
        """First sampled slot at or after."""
        self.before: Ints = np.searchsorted(slots, slot, side="right") - 1
        """Last sampled slot at or before."""
        self.exact: Bools = self.after == self.before
        self.num_slots = len(slots)

    def passing(self, flow: Floats, entering: Floats) -> Floats:
        """Return for each member the weight that passes its slot on the compute stream without
        entering behind it.
        """
        weight: Floats = flow[self.before] - np.where(self.exact, entering[self.before], 0.0)
        return weight

    def at(self, values: Floats, where: Ints) -> Floats:
        """Return for each slot the sum of the members' ``values`` that stand there."""
        return _sums(where, values, self.num_slots + 1)[: self.num_slots]

    def at_exact(self, values: Floats) -> Floats:
        """Return the same for members whose very slot is sampled."""
        return self.at(np.where(self.exact, values, 0.0), self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """One key, ready for any weights."""

    net: Network
    part: BucketCosts
    places: _Places
    edge: Floats
    """(n,) of gathers: the most that the copy-out of the last before its need counts for. Of
    reductions: the most that the first work behind its ready slot counts for.
    """
    own: Floats
    """(n,) of reductions: compute for that one alone, see ``PathWork``."""

    def price(self, flow: Floats) -> Priced:
        """Return the cheapest buckets where each arc has the weight ``flow``."""
        p, need = self.part, self.places.before
        prices = self._gather_prices(flow) if p.gathers else self._reduction_prices(flow)
        if not (p.gathers and self.net.has_rows):
            ticks, head, line = cheapest_buckets(*prices, p.bucketable)
            return Priced(ticks=ticks, added=self.added(head, line))
        prices, launches = with_launches(self.net, p, need, flow, prices)
        ticks, head, option = cheapest_buckets(*prices, p.bucketable)
        line = launches.lines(option)
        added, place = self.added(head, line), launches.of_members(head, option)
        add_launches(self.net, p, need, place, self._loads(head, line)[2], added)
        return Priced(ticks=ticks, added=added)

    def added(self, head: Ints, line: Ints) -> Floats:
        """Return the costs that buckets add to each arc: ``head`` is the head that a member rides
        with, or -1; ``line`` that of each head.
        """
        return (
            self._gathers_add(head, line) if self.part.gathers else self._reductions_add(head, line)
        )

    def _gather_prices(self, flow: Floats) -> Prices:
        """Return the rate and the fee of each head, and for each member its bytes, the cost that it
        adds as a rider, and its price alone.
        """
        net, p, at = self.net, self.part, self.places
        num_slots, whole = len(net.slots), net.offset["whole", p.stream, 0]
        enter, enter_tail, own, from_start = self._gather_blocks()
        entering, entering_tail = (
            _total(flow, enter, num_slots),
            _total(flow, enter_tail, num_slots),
        )
        begun_before = np.concatenate(([0.0], np.cumsum(entering)))[at.after]
        transferred = (
            np.append(np.cumsum((entering + entering_tail)[::-1])[::-1], 0.0)[at.after]
            + flow[whole]
        )
        first = at.passing(_total(flow, from_start, num_slots), np.zeros(num_slots))
        later = at.passing(_total(flow, own, num_slots), entering)
        tail = np.where(at.exact, entering_tail[at.before], 0.0)
        rate = transferred[:, None] * p.lines[:, 1] + (p.copy_rate * begun_before)[:, None]
        fee = (
            transferred[:, None] * p.lines[:, 0]
            + (first * p.bucket_work + tail * np.minimum(p.copy_out, self.edge))[:, None]
        )
        ride = p.copy_rate * p.size_bytes * (later - begun_before) + first * (
            p.shared_work + p.copy_out + p.epilogue
        )
        return (
            rate,
            fee,
            p.size_bytes,
            ride,
            transferred * p.transfer + first * (p.alone_work + p.epilogue),
        )

    def _gathers_add(self, head: Ints, line: Ints) -> Floats:
        """Return the costs that gathers in these buckets add to each arc: (W3)."""
        net, p, at = self.net, self.part, self.places
        rides, heads, load = self._loads(head, line)
        copied = np.where(rides, p.copy_rate * p.size_bytes, 0.0)
        begun = _sums(np.maximum(head, 0), copied, len(head)) - copied
        work = (
            np.where(rides, p.shared_work + p.copy_out, p.alone_work)
            + p.epilogue
            + np.where(heads, p.bucket_work, 0.0)
        )
        added = np.zeros(net.num_arcs)
        prefix = np.cumsum(at.at(load, at.after))
        not_yet = begun.sum() - np.cumsum(at.at(begun, at.after))
        enter, enter_tail, own, from_start = self._gather_blocks()
        for block in enter:
            added[block] += prefix + not_yet - at.at_exact(copied)
        for block in enter_tail:
            added[block] += prefix + at.at_exact(
                np.where(heads, np.minimum(p.copy_out, self.edge), 0.0)
            )
        for block in own:
            added[block] += at.at(copied, at.before)
        for block in from_start:
            added[block] += at.at(work, at.before)
        added[net.offset["whole", p.stream, 0]] += load.sum()
        return added

    def _gather_blocks(self) -> tuple[list[slice], list[slice], list[slice], list[slice]]:
        """Return the arcs that enter with the prefix, those with the last copy-out too, and those
        of the two classes that count copies.
        """
        net, s = self.net, self.part.stream
        tails = [net.block("enter_tail", s, e) for e in net.ends if e != SHIFT] + (
            [net.block("path_enter", s)] if net.has_on_path else []
        )
        own, from_start = ([net.block("flow", c, e) for e in net.ends] for c in (s, BEGINNING))
        return [net.block("enter", s, e) for e in net.ends], tails, own, from_start

    def _reduction_prices(self, flow: Floats) -> Prices:
        """Return the same for reductions."""
        net, p, at = self.net, self.part, self.places
        num_slots, whole = len(net.slots), net.offset["whole", p.stream, 0]
        leave, to_end, to_suffix = self._reduction_blocks()
        enter_end, enter_suffix = _entering(net, END), _entering(net, p.stream)
        leaving, for_all = (
            _total(flow, blocks, num_slots) for blocks in (leave, net.leaves_for_all(p.stream))
        )
        transferred = (
            np.concatenate(([0.0], np.cumsum(leaving + for_all)))[at.before + 1] + flow[whole]
        )
        finished, passing = (
            at.passing(_total(flow, blocks, num_slots), _total(flow, enter, num_slots))
            for blocks, enter in ((to_end, enter_end), (to_suffix, enter_suffix))
        )
        first = np.where(at.exact, leaving[at.before], 0.0)
        launch, bucket_work, edge_alone, edge_shared = self._reduction_work()
        copied, launched = self._work_before_suffix()
        share, short = _common_rate(copied, p.size_bytes, p.copy_rate, self.own > 0)
        rate = (
            transferred[:, None] * p.lines[:, 1]
            + (p.copy_rate * finished + share * passing)[:, None]
        )
        fee = (
            transferred[:, None] * p.lines[:, 0]
            + ((finished + passing) * bucket_work + first * edge_shared)[:, None]
        )
        ride = finished * p.epilogue
        alone = finished * launch + passing * launched + first * edge_alone
        return (
            rate,
            fee,
            p.size_bytes,
            ride - short * np.maximum.accumulate(passing),
            transferred * p.transfer + ride + alone,
        )

    def _work_before_suffix(self) -> tuple[Floats, Floats]:
        """Return of each reduction the least of the work before its launch, its own compute
        included, and of its transfer: in a bucket, and alone.
        """
        p = self.part
        return (
            np.minimum(p.copy_rate * p.size_bytes + self.own, p.lines[:, 1].min() * p.size_bytes),
            np.minimum(p.alone_work + self.own, p.transfer),
        )

    def _reductions_add(self, head: Ints, line: Ints) -> Floats:
        """Return the costs that reductions in these buckets add to each arc: (W4)."""
        net, p, at = self.net, self.part, self.places
        rides, heads, load = self._loads(head, line)
        launch, bucket_work, edge_alone, edge_shared = self._reduction_work()
        at_head, of_buckets = np.maximum(head, 0), np.where(heads, bucket_work, 0.0)
        work, before_suffix = (
            np.where(rides, 0.0, alone)
            + _sums(at_head, np.where(rides, copied, 0.0), len(head))
            + of_buckets
            for copied, alone in ((p.copy_rate * p.size_bytes, launch), self._work_before_suffix())
        )
        edge = np.where(rides, np.where(heads, edge_shared, 0.0), edge_alone)
        added = np.zeros(net.num_arcs)
        suffix = np.cumsum(at.at(load, at.before)[::-1])[::-1]
        leave, to_end, to_suffix = self._reduction_blocks()
        for block in net.leaves_for_all(p.stream):
            added[block] += suffix
        for block in leave:
            added[block] += suffix + at.at_exact(edge)
        for blocks, entering, ticks in (
            (to_end, END, work + p.epilogue),
            (to_suffix, p.stream, before_suffix),
        ):
            for block in blocks:
                added[block] += at.at(ticks, at.before)
            for block in _entering(net, entering):
                added[block] -= at.at_exact(ticks)
        added[net.offset["whole", p.stream, 0]] += load.sum()
        return added

    def _reduction_blocks(self) -> tuple[list[slice], list[slice], list[slice]]:
        """Return the arcs that leave with the suffix, and those on the compute stream that end with
        it or with the suffix.
        """
        net, s = self.net, self.part.stream
        leave = [net.block("leave", c, s) for c, e in net.classes if e == s] + (
            [net.block("path_leave", s)] if net.has_on_path else []
        )
        to_end, to_suffix = (
            [net.block("flow", c, e) for c, e in net.classes if e == end] for end in (END, s)
        )
        return leave, to_end, to_suffix

    def _reduction_work(self) -> tuple[Floats, float, Floats, Floats]:
        """Return the least of launch and transfer, alone and of a bucket, and the first work behind
        a ready slot, alone and in a bucket.
        """
        p = self.part
        edge_alone, edge_shared = (
            np.minimum(p.alone_work, self.edge),
            np.minimum(p.bucket_work + p.copy_in, self.edge),
        )
        return (
            np.minimum(p.alone_work, p.transfer),
            min(p.bucket_work, float(p.lines[:, 0].min())),
            edge_alone,
            edge_shared,
        )

    def _loads(self, head: Ints, line: Ints) -> tuple[Bools, Bools, Floats]:
        """Return the riders, the heads, and the transfers, those of a bucket at its head."""
        p = self.part
        rides: Bools = head >= 0
        heads: Bools = head == np.arange(len(head))
        at_head = np.maximum(head, 0)
        bytes_ticks = np.where(rides, p.size_bytes * p.lines[line[at_head], 1], 0.0)
        load: Floats = (
            np.where(rides, 0.0, p.transfer)
            + _sums(at_head, bytes_ticks, len(head))
            + np.where(heads, p.lines[line, 0], 0.0)
        )
        return rides, heads, load


def pricings(net: Network, work: PathWork, parts: list[BucketCosts]) -> list[Pricing]:
    """Return the pricing of each part."""
    counted = [
        p for p in parts if p.stream in (net.prefix_streams if p.gathers else net.suffix_streams)
    ]
    return [
        Pricing(
            net=net,
            part=p,
            places=_Places(p.slot, net.slots),
            edge=_edges(work, parts, p),
            own=work.own[p.index].astype(np.float64),
        )
        for p in counted
    ]


def _edges(work: PathWork, parts: list[BucketCosts], part: BucketCosts) -> Floats:
    """Return for each member the compute order to the next slot that matters to its stream; 0 where
    several share its slot.

    Gathers: back to the need before. Reductions: on to the next ready slot, and at most the least
    transfer of the stream.
    """
    same_stream = [p for p in parts if p.stream == part.stream and p.gathers == part.gathers]
    slots, counts = np.unique(np.concatenate([p.slot for p in same_stream]), return_counts=True)
    other = -np.diff(work.after[slots]) if part.gathers else np.diff(work.before[slots])
    steps = np.minimum(work.between(slots), other)
    reach = np.append(np.inf, steps) if part.gathers else np.append(steps, np.inf)
    most = np.inf if part.gathers else min(float(p.transfer.min()) for p in same_stream)
    edges: Floats = np.where(counts == 1, np.minimum(reach, most), 0.0)[
        np.searchsorted(slots, part.slot)
    ]
    return edges


def _common_rate(
    ticks: Floats, size_bytes: Floats, least: float, among: Bools
) -> tuple[float, Floats]:
    """Return one rate per byte for ``ticks``, that of the middle byte of the members ``among`` and
    at least ``least``, and of each member the ticks that it lacks at that rate.
    """
    among = among & (size_bytes > 0)
    if not among.any():
        return least, np.zeros_like(ticks)
    rates = ticks[among] / size_bytes[among]
    order = np.argsort(rates)
    reached = np.cumsum(size_bytes[among][order])
    rate = max(least, float(rates[order][np.searchsorted(reached, reached[-1] / 2)]))
    return rate, np.maximum(rate * size_bytes - ticks, 0.0)


def _entering(net: Network, end: int) -> list[slice]:
    """Return the arcs that enter the compute stream behind a slot, on paths to ``end``."""
    blocks = [
        net.block(what, s, end) for s in net.prefix_streams for what in ("enter", "enter_tail")
    ]
    return blocks + ([net.block("rejoin", 0, end)] if net.has_on_path else [])


def _sums(where: Ints, values: Floats, length: int) -> Floats:
    """Return for each place the sum of the values there."""
    sums: Floats = np.bincount(where, values, length).astype(np.float64)
    return sums


def _total(flow: Floats, blocks: list[slice], num_slots: int) -> Floats:
    total: Floats = np.zeros(num_slots)
    for block in blocks:
        total += flow[block]
    return total
