"""What may share a launch in a layer that repeats: runs of neighbours in order of urgency, also across the end of the layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from apsched.config import Caps
from apsched.solver.compact import ALL_GATHER, Compact
from apsched.solver.partition import Members, Pricer
from apsched.solver.periods import Period
from apsched.units import ALLOCATION_BYTES

_JUMP = 4
"""Neighbours in size that differ by at least this factor part small members from large ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A bucket that one layer may have."""

    members: tuple[tuple[int, int], ...]
    """(slot, layer relative to the anchor's), the anchor included."""
    anchor: int
    """The slot that is needed first (gathers), or ready last (reductions)."""
    copies_early: bool
    """Gathers: all members are copied out when the first is needed, not each at its own need."""
    launch_ticks: int
    """Work of the launch on the compute stream: prologues, copy-in, launch."""
    transfer_ticks: int
    in_blocks: int
    """Buffer of a bucket of several; 0 alone."""
    copy_ticks: tuple[int, ...]
    """Copy-out of each member; 0 alone."""

    @property
    def several(self) -> bool:
        """Whether it is a bucket of two or more."""
        return len(self.members) > 1


def columns(
    pricer: Pricer, period: Period, layer: int, gathers: list[int], reductions: list[int], caps: Caps, most_members: int | None
) -> tuple[Column, ...]:
    """Return the buckets to choose from: for each key, runs of all its slots, of the small ones and of the large ones."""
    found: dict[tuple[tuple[int, int], ...], None] = {}
    for slots, gathered in ((gathers, True), (reductions, False)):
        when = pricer.compact.need_gap if gathered else pricer.compact.ready_gap
        ids = {s: period.collectives[s][layer] for s in slots}
        for key in sorted({int(pricer.compact.key[c]) for c in ids.values()}):
            order = sorted((s for s in slots if pricer.compact.key[ids[s]] == key), key=lambda s: (int(when[ids[s]]), s))
            for run in _families(pricer.compact, order, ids):
                for members in _runs(run, min(most_members or len(run), len(run)), gathered):
                    found.setdefault(members)
    result: list[Column] = []
    for members in found:
        actual = tuple(sorted(period.collectives[s][layer + shift] for s, shift in members))
        if len(actual) > 1 and not (pricer.allowed(actual, caps) and len(set(pricer.tables.depth[list(actual)].tolist())) == 1):
            continue
        result += _priced(pricer, period, layer, members, actual)
    return tuple(result)


def _families(compact: Compact, order: list[int], ids: dict[int, int]) -> Iterator[list[int]]:
    yield order
    sizes = sorted(int(compact.size_bytes[ids[s]]) for s in order)
    jump, limit = max(((b / max(a, 1), a) for a, b in pairwise(sizes)), default=(0, 0))
    if jump >= _JUMP:
        yield [s for s in order if compact.size_bytes[ids[s]] <= limit]
        yield [s for s in order if compact.size_bytes[ids[s]] > limit]


def _runs(order: list[int], most: int, gathered: bool) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield runs of up to ``most`` neighbours of a cyclic order; shifts count from the anchor's layer."""
    n = len(order)
    for first in range(n):
        for size in range(1, most + 1):
            run = [(order[i % n], i // n) for i in range(first, first + size)]
            base = run[0 if gathered else -1][1]
            yield tuple((s, shift - base) for s, shift in run)


def _priced(pricer: Pricer, period: Period, layer: int, members: tuple[tuple[int, int], ...], actual: Members) -> Iterator[Column]:
    launch, transfer, copy_in, in_bytes, *_ = pricer.figures(actual)
    k = pricer.compact
    gathered = k.kind[actual[0]] == ALL_GATHER
    ids = [period.collectives[s][layer + shift] for s, shift in members]
    several = len(actual) > 1
    work = pricer.tables.prologue_ticks - (pricer.tables.cast_ticks if several else 0)  # a bucket casts while it copies in
    for early in (True, False):
        if not early and not (several and gathered and len({int(k.need_gap[c]) for c in ids}) > 1):
            continue
        yield Column(
            members=members,
            anchor=members[0 if gathered else -1][0],
            copies_early=early,
            launch_ticks=launch + copy_in + int(work[list(actual)].sum()),
            transfer_ticks=transfer,
            in_blocks=-(-in_bytes // ALLOCATION_BYTES),
            copy_ticks=tuple(int(k.copy_out_ticks[c]) if several and gathered else 0 for c in ids),
        )
