"""One layer as a loop body: places where units may stand, what may share a launch, and the memory that is there anyway.

A layer of ``apsched.solver.periods`` with its neighbours becomes a body of *sites*, in order, which repeats for ever. A site is a gap
of the spine with the compute behind it. Where something becomes ready in a gap there are two sites: what has become ready is launched at
the early one, which has no compute, so that a wait or another launch can follow in the same gap. Sites are numbered through all
repeats: site q is site q mod P of repeat q div P, and 0 is the first site of the repeat that a collective belongs to.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from apsched.config import Caps
from apsched.problem import Problem
from apsched.solver.compact import ALL_GATHER, Compact, Ints
from apsched.solver.loop_columns import Column, columns
from apsched.solver.partition import Pricer
from apsched.solver.periods import Period
from apsched.units import ALLOCATION_BYTES

GATHER, REDUCTION, PINNED = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in the body: a gap, and the compute until the next site."""

    gap: int
    """Relative to the first spine node of the layer."""
    early: bool
    """No compute follows: another site of the same gap does."""
    ticks: int
    """Compute until the next site."""
    gap_blocks: int
    """Memory with fixed lives in the gap, in blocks, beside what the caller keeps: the most of all layers."""
    spine_blocks: int
    """The same at the spine nodes that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A collective of the layer."""

    role: int
    """GATHER (can be launched ahead), REDUCTION (can be waited for later), PINNED (launched when ready, waited for at a fixed site)."""
    stream: int
    ready_site: int
    """First site at which a gather may be launched with others that are needed before it."""
    launch_site: int
    """First site at which a gather may be launched, if it is the first of its bucket to be needed; of others, where they are launched."""
    wait_site: int
    """Site at which a gather or pinned collective is waited for; of a reduction, the last at which it may be, as the last of its bucket."""
    out_blocks: int
    held_blocks: int
    """Of a gather, its input, where the caller does not keep it; of a reduction, what it reads."""
    launch_ticks: int
    """Work of launching it alone, with its prologue."""
    epilogue_ticks: int
    transfer_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBody:
    """What the modulo schedule of one layer is made of."""

    period: Period
    layer: int
    """The layer that stands for all: the middle one."""
    sites: tuple[Site, ...]
    slots: tuple[Slot, ...]
    columns: tuple[Column, ...]
    reach: int
    """Layers that a gather may be ahead, or a reduction outstanding."""
    caps: Caps
    kept_bytes: int

    @property
    def num_sites(self) -> int:
        """P"""
        return len(self.sites)

    def of_role(self, role: int) -> list[int]:
        """Return the slots of a role."""
        return [s for s, slot in enumerate(self.slots) if slot.role == role]

    def collective(self, slot: int, layer: int) -> int:
        """Return the collective of ``slot`` in ``layer`` of the stretch."""
        return self.period.collectives[slot][layer]


def loop_body(
    problem: Problem, compact: Compact, period: Period, caps: Caps, *, reach: int = 2, most_gaps: int = 32, most_members: int | None = None
) -> LoopBody:
    """Return the body of ``period``; units stand in at most ``most_gaps`` gaps, or where anything begins or ends."""
    layer = period.count // 2
    pricer = Pricer(problem, compact)
    draft = _Draft(pricer, period, layer)
    gaps = draft.gaps(most_gaps)
    sites = draft.sites(gaps)
    slots = tuple(draft.slot(s, sites, reach, caps) for s in range(len(period.collectives)))
    moving = [[s for s, slot in enumerate(slots) if slot.role == role] for role in (GATHER, REDUCTION)]
    return LoopBody(
        period=period,
        layer=layer,
        sites=sites,
        slots=slots,
        columns=columns(pricer, period, layer, moving[0], moving[1], caps, most_members),
        reach=reach,
        caps=caps,
        kept_bytes=compact.kept_bytes,
    )


class _Draft:
    """The layer relative to its first spine node; gaps of a neighbour are negative or beyond the length."""

    def __init__(self, pricer: Pricer, period: Period, layer: int) -> None:
        self.compact, self.tables, self.period = pricer.compact, pricer.tables, period
        self.origin = period.first_spine + layer * period.length
        self.ids = [row[layer] for row in period.collectives]
        self.launches, self.waits = pinned_gaps(self.compact)
        self.roles = roles(self.compact)

    def gaps(self, most: int) -> list[int]:
        """Return the gaps where units may stand: where something is ready, needed, born or used up, then the middles of long stretches."""
        k, length = self.compact, self.period.length
        found = {0}
        for c in self.ids:
            marks = [int(self.launches[c]), int(self.waits[c])]
            for s, at in ((int(k.output_storage[c]), k.storage_last_spine), (int(k.input_storage[c]), k.storage_birth_spine)):
                if s >= 0 and 0 <= at[s] < len(k.spine_ticks):
                    marks += [int(at[s]), int(at[s]) + 1]
            found |= {(gap - self.origin) % length for gap in marks if 0 < gap < len(k.spine_ticks)}
        ticks = np.concatenate(([0], np.cumsum(k.spine_ticks[self.origin : self.origin + length])))
        while len(found) < min(most, length):
            edges = [*sorted(found), length]
            long = [(int(ticks[b] - ticks[a]), -a, b) for a, b in pairwise(edges) if b - a > 1]
            span, first, past = max(long)
            middle = bisect_right(ticks.tolist(), int(ticks[-first]) + span // 2)
            found.add(min(max(middle, -first + 1), past - 1))
        return sorted(found)

    def sites(self, gaps: list[int]) -> tuple[Site, ...]:
        """Return the sites: each gap once, or twice where something is launched because it is ready."""
        length = self.period.length
        ready = {(int(self.launches[c]) - self.origin) % length for c in self.ids if self.roles[c] != GATHER}
        early, main, spine = self._fixed_blocks()
        found = []
        for gap, past in zip(gaps, [*gaps[1:], length], strict=True):
            if gap in ready:
                found.append(Site(gap=gap, early=True, ticks=0, gap_blocks=int(early[gap]), spine_blocks=0))
            ticks = int(self.compact.spine_ticks[self.origin + gap : self.origin + past].sum())
            blocks = int(spine[gap:past].max())
            found.append(Site(gap=gap, early=False, ticks=ticks, gap_blocks=int(main[gap]), spine_blocks=blocks))
        return tuple(found)

    def slot(self, s: int, sites: tuple[Site, ...], reach: int, caps: Caps) -> Slot:
        """Return slot ``s`` with its window."""
        k, c = self.compact, self.ids[s]
        role = int(self.roles[c])
        place = {(site.gap, site.early): i for i, site in enumerate(sites)}

        def site(gap: int, early: bool) -> int:
            repeat, inside = divmod(gap - self.origin, self.period.length)
            return repeat * len(sites) + place[inside, early]

        if role == GATHER:
            wait = site(int(k.need_gap[c]), False)
            ready = max(wait - (reach + 1) * len(sites), self._first_site_from(int(k.ready_gap[c]), sites))
            launch = max(wait - reach * len(sites), ready)
            if caps.max_prefetch is not None:
                launch = max(launch, self._first_site_from(int(k.need_gap[c]) - caps.max_prefetch, sites))
        else:
            launch = site(int(self.launches[c]), True)
            wait = site(int(self.waits[c]), False) if role == PINNED else launch + reach * len(sites)
            ready = launch
        given = int(k.input_storage[c])
        held = int(k.storage_bytes[given]) if given >= 0 and (role == REDUCTION or k.storage_birth_float[given] >= 0) else 0
        return Slot(
            role=role,
            stream=int(k.stream[c]),
            ready_site=ready,
            launch_site=launch,
            wait_site=wait,
            out_blocks=_blocks(int(k.output_bytes[c])),
            held_blocks=_blocks(held),
            launch_ticks=int(k.launch_ticks[c] + self.tables.prologue_ticks[c]),
            epilogue_ticks=int(self.tables.epilogue_ticks[c]),
            transfer_ticks=int(k.transfer_ticks[c]),
        )

    def _first_site_from(self, gap: int, sites: tuple[Site, ...]) -> int:
        """Return the first main site at or behind ``gap``."""
        repeat, inside = divmod(gap - self.origin, self.period.length)
        later = [i for i, site in enumerate(sites) if site.gap >= inside and not site.early]
        return repeat * len(sites) + (later[0] if later else len(sites) + next(i for i, x in enumerate(sites) if not x.early))

    def _fixed_blocks(self) -> tuple[Ints, Ints, Ints]:
        """Return the most bytes of fixed lives of all layers: at early sites, in gaps, at spine nodes.

        A gather counts from its need to its last use, a gradient up to its launch, all else from the earliest to the latest that the
        place of its owner allows; what is alive beyond that is decided by the modulo schedule.
        """
        k, period = self.compact, self.period
        num_spine = len(k.spine_ticks)
        delta = np.zeros(3 * num_spine + 6, dtype=np.int64)  # three steps a gap: early, main, spine
        owner = _owners(k)
        gather, reduction = self.roles == GATHER, self.roles == REDUCTION
        for s, size in enumerate(k.storage_bytes.tolist()):
            first, last = 3 * int(k.storage_birth_spine[s]) + 2, 3 * int(k.storage_last_spine[s]) + 2
            if k.storage_birth_spine[s] < 0:
                born = owner[int(k.storage_birth_float[s])] if k.storage_birth_float[s] >= 0 else -1
                first = 0 if born < 0 else self._step(born, gather)
            for f in k.touch_list[k.touch_begin[s] : k.touch_begin[s + 1]]:
                c = owner[int(f)]
                if reduction[c] and int(k.input_storage[c]) == s:
                    last = max(last, 3 * int(self.launches[c]) - 1)
                else:
                    last = max(last, 3 * int(self.waits[c]) + 1 if not reduction[c] else 3 * int(self.launches[c]))
            if last >= first:
                delta[first] += size
                delta[last + 1] -= size
        live = np.cumsum(delta)
        at = np.arange(period.count)[:, None] * period.length + period.first_spine + np.arange(period.length)[None, :]
        gap, spine = k.base_gap_bytes[at], k.base_spine_bytes[at]
        most = [(gap + live[3 * at]).max(axis=0), (gap + live[3 * at + 1]).max(axis=0), (spine + live[3 * at + 2]).max(axis=0)]
        early, main, compute = (-(-bytes_ // ALLOCATION_BYTES) for bytes_ in most)
        return early, main, compute

    def _step(self, c: int, gather: Ints) -> int:
        """Return when what ``c`` allocates is there at the latest."""
        return 3 * int(self.compact.need_gap[c]) + 1 if gather[c] else 3 * int(self.launches[c])


def roles(compact: Compact) -> Ints:
    """Return the role of every collective: only gathers that nothing waits for, and reductions that only outputs need, can move."""
    num_spine = len(compact.spine_ticks)
    chained = np.diff(compact.after_begin) > 0
    awaited = np.zeros(len(compact.kind), dtype=np.bool_)
    awaited[compact.after_list] = True
    gathers = (compact.kind == ALL_GATHER) & ~compact.on_path & (compact.need_gap < num_spine) & ~awaited & ~chained
    reductions = ~compact.on_path & (compact.need_gap >= num_spine) & ~awaited & (compact.kind != ALL_GATHER)
    return np.where(gathers, GATHER, np.where(reductions, REDUCTION, PINNED))


def pinned_gaps(compact: Compact) -> tuple[Ints, Ints]:
    """Return for each collective the gap where it is launched, and the gap where it is waited for, if it is pinned.

    One that others wait for is waited for in the first gap that is as far behind its launch, in compute, as its transfer takes.
    """
    num_spine = len(compact.spine_ticks)
    reached = np.concatenate(([0], np.cumsum(compact.spine_ticks)))
    launches, waits = compact.ready_gap.copy(), compact.need_gap.copy()
    awaited = set(compact.after_list.tolist())
    for c in range(len(launches)):
        for d in compact.after_list[compact.after_begin[c] : compact.after_begin[c + 1]].tolist():
            launches[c] = max(launches[c], min(waits[d] + 1, num_spine))
        if c in awaited and waits[c] >= num_spine:
            waits[c] = min(np.searchsorted(reached, reached[launches[c]] + compact.transfer_ticks[c]), num_spine)
    return launches, waits


def _owners(compact: Compact) -> Ints:
    """Return for each float its collective."""
    owner = np.zeros(len(compact.float_ticks), dtype=np.int64)
    for c in range(len(compact.kind)):
        owner[[compact.float_of_start[c], compact.float_of_wait[c]]] = c
        owner[compact.prologue_list[compact.prologue_begin[c] : compact.prologue_begin[c + 1]]] = c
        owner[compact.epilogue_list[compact.epilogue_begin[c] : compact.epilogue_begin[c + 1]]] = c
    return owner


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // ALLOCATION_BYTES)
