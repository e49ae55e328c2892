"""The paths through a schedule along which time cannot be saved, as a network: nodes R_g and E_g
for a sample of slots g.

R_g is the time when the compute stream reaches slot g, E_g the time when compute node g begins. A
path begins at time 0 or with the gathers of a stream that are needed at or before k (it enters at
E_k), follows the compute stream, and ends with it or with the reductions of a stream that are ready
at or after j (it leaves at R_j). Paths form classes by the work that they may count on the compute
stream between these two:

    BEGINNING   from time 0: all work for gathers, and for launches of reductions
    s           from the gathers of stream s: copy-outs of later gathers of s, launches of later
                reductions
    TAIL        the same with the copy-out of the last gather before E_k: launches of later
                reductions
    ON_PATH     through on-path collectives: nothing, since it may hide behind them

and by their ends, since a reduction is launched before the end of the compute stream, or before a
suffix of its stream or transferred in it: END, a stream, or SHIFT (the path goes on as ON_PATH at
R_x: nothing about reductions).

Under a memory cap a path to a stream may also end with all that is launched on it behind R_j,
gathers too, and each sampled slot has a row of memory: the gathers that are launched before it and
needed behind it fit beside all that is surely alive at the compute node before it.

A vector of weights on the arcs that sum to one path is a flow from the beginning to the end.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.bounds.paths.bucket_costs import BucketCosts
from apsched.solver.bounds.paths.path_work import PathWork
from apsched.solver.bounds.step_time import least_launch

Floats = npt.NDArray[np.float64]
Start = int
"""A stream, or one of the two below."""
Arc = tuple[str, int, int]
"""The kind of the arc; its start class; its end class (a stream or END)."""
BEGINNING, TAIL, END, SHIFT = -1, -2, -3, -4
_MOST_GAPS = 60
_IDLE_SHARE = 0.05
"""Share of the busiest stream's transfers, below which a stream is left out of the network (its
transfers are not counted).
"""
_ENDS = 10
"""Gaps at either end that are always taken."""
_TIGHT = 8
"""So many compute nodes with the least room have a row of memory in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Arcs in blocks of one entry for each sampled slot; ``whole_stream`` blocks have a single
    one.
    """

    slots: Ints
    """(R,) sampled slots, ascending, 0 and the last among them."""
    offset: dict[Arc, int]
    """Block -> its first arc."""
    constant: Floats
    """(arcs,) ticks of each arc that no decision changes."""
    prefix_streams: tuple[int, ...]
    """Streams of gathers."""
    suffix_streams: tuple[int, ...]
    """Streams of reductions."""
    leaps: tuple[tuple[int, int], ...]
    """Positions (from R, to E) of on-path collectives that reach across sampled slots."""
    has_on_path: bool
    byte_ticks: float
    """Ticks for a byte in a row of memory, so that weights are about 1: the least rate of any
    transfer.
    """
    has_rows: bool
    """Whether there are rows of memory."""

    @property
    def num_arcs(self) -> int:
        """Number of arcs."""
        return len(self.constant)

    @property
    def classes(self) -> tuple[tuple[Start, int], ...]:
        """Start and end of all classes of paths but the one through on-path collectives."""
        return tuple((start, end) for what, start, end in self.offset if what == "flow")

    @property
    def ends(self) -> tuple[int, ...]:
        """The possible ends of a path."""
        return END, *self.suffix_streams, *((SHIFT,) if self.has_on_path else ())

    def leaves_for_all(self, stream: int) -> list[slice]:
        """Return the arcs of paths that end with all that is launched on ``stream``."""
        return [
            self.block(what, start, end)
            for what, start, end in self.offset
            if what == "leave_for_all" and end == stream
        ]

    def block(self, what: str, start: int = 0, end: int = 0) -> slice:
        """Return the arcs of a block."""
        first = self.offset[what, start, end]
        return slice(first, first + len(self.slots))


# Blocks. "flow": E_i -> R_{i+1}. "enter": a path begins with a prefix, at E_i; "enter_tail": it
# counts the last copy-out. "leave": it ends with a suffix, at R_i; "leave_for_all": with all that
# is launched behind R_i. "shift": R_i, to the ON_PATH class. Of that class: "path" E_i -> R_{i+1};
# "stall" R_i -> E_i; "path_enter"; "path_leave"; "rejoin": E_i, to TAIL. "leap": R_i -> E_j.
# "memory": the row of slot i. "whole": a stream.


def network(
    instance: Instance, parts: list[BucketCosts], work: PathWork, room: Ints | None = None
) -> Network:
    """Return the network for gathers and reductions ``parts``, with the compute ``work``, and rows
    of memory where ``room`` tells the free bytes at each compute node.
    """
    prefix, suffix = (
        _busy_streams([p for p in parts if p.gathers == gathers]) for gathers in (True, False)
    )
    weights = OnPath(instance)
    last = len(instance.arrays.compute_ticks)
    slots = _sample(parts, [0, last, *weights.leap_slots(), *_tight_slots(room)])
    offset: dict[Arc, int] = {}
    size = 0

    def add(what: str, start: int = 0, end: int = 0, length: int = len(slots)) -> None:
        nonlocal size
        offset[what, start, end] = size
        size += length

    for end in (END, *suffix, *((SHIFT,) if weights.exists else ())):
        for start in (BEGINNING, *prefix, *((TAIL,) if end != SHIFT else ())):
            add("flow", start, end)
            if end != END:
                add("shift" if end == SHIFT else "leave", start, end)
            if room is not None and end in prefix:
                add("leave_for_all", start, end)
        for s in prefix:
            add("enter", s, end)
            if end != SHIFT:
                add("enter_tail", s, end)
        if weights.exists and end != SHIFT:
            add("rejoin", 0, end)
    if weights.exists:
        add("path")
        add("stall")
        for s in prefix:
            add("path_enter", s)
        for s in suffix:
            add("path_leave", s)
    leaps = weights.leaps(slots)
    add("leap", length=len(leaps))
    if room is not None:
        add("memory")
    for s in sorted({*prefix, *suffix}):
        add("whole", s, length=1)
    made = Network(
        slots=slots,
        offset=offset,
        constant=np.zeros(size),
        prefix_streams=prefix,
        suffix_streams=suffix,
        leaps=tuple((a, b) for a, b, _ in leaps),
        has_on_path=weights.exists,
        byte_ticks=min((float(p.lines[:, 1].min()) for p in parts), default=0.0) or 1.0,
        has_rows=room is not None,
    )
    if room is not None:
        made.constant[made.block("memory")][1:] = -made.byte_ticks * room[slots[1:] - 1]
    _fill(instance, made, parts, work, weights, [w for _, _, w in leaps])
    return made


def _busy_streams(parts: list[BucketCosts]) -> tuple[int, ...]:
    """Return the streams whose transfers matter beside those of the busiest."""
    load: dict[int, float] = {}
    for p in parts:
        load[p.stream] = load.get(p.stream, 0.0) + float(p.transfer.sum())
    return tuple(s for s in sorted(load) if load[s] >= _IDLE_SHARE * max(load.values()))


def _tight_slots(room: Ints | None) -> list[int]:
    """Return the slots behind the compute nodes with the least ``room``."""
    if room is None:
        return []
    return [int(k) + 1 for k in np.argsort(room[:-1], kind="stable")[:_TIGHT]]


def _sample(parts: list[BucketCosts], others: list[int]) -> Ints:
    distinct = np.unique(np.concatenate([p.slot for p in parts]))
    if len(distinct) > _MOST_GAPS:
        spread = distinct[
            np.linspace(0, len(distinct) - 1, _MOST_GAPS - 2 * _ENDS).round().astype(np.int64)
        ]
        distinct = np.concatenate((distinct[:_ENDS], spread, distinct[-_ENDS:]))
    return np.unique(np.concatenate((distinct, np.array(others, dtype=np.int64))))


class OnPath:
    """On-path collectives as arcs from R_ready to E_need: launch and transfer, chains within a slot
    together.
    """

    def __init__(self, instance: Instance) -> None:
        arrays = instance.arrays
        num_compute = len(arrays.compute_ticks)
        self.arrays = arrays
        self.launch = np.zeros(
            num_compute + 1
        )  # of on-path collectives that are launched in a slot and needed behind it
        self.stall = np.zeros(num_compute + 1)
        self.long: dict[tuple[int, int], float] = {}
        takes = least_launch(instance)
        ways: dict[
            int, dict[int, float]
        ] = {}  # collective -> slot -> the longest chain from there to its end
        for c in map(int, np.nonzero(arrays.on_path & (arrays.need_slot < num_compute))[0]):
            longest = {int(arrays.ready_slot[c]): 0.0}
            for d in map(int, arrays.awaited_by(c)):
                for slot, ticks in ways.get(d, {}).items():
                    longest[slot] = max(longest.get(slot, 0.0), ticks)
            need = int(arrays.need_slot[c])
            ways[c] = {
                slot: ticks + takes[c] + arrays.transfer_ticks[c] for slot, ticks in longest.items()
            }
            for slot, ticks in ways[c].items():
                if slot >= need:
                    self.stall[need] = max(self.stall[need], ticks)
                else:
                    self.long[slot, need] = max(self.long.get((slot, need), 0.0), ticks)
            if arrays.ready_slot[c] == need and not arrays.bucketable[c]:
                self.launch[need] += arrays.launch_ticks[c]
        self.exists = bool(ways)

    def leap_slots(self) -> list[int]:
        """Return the slots that long arcs touch, where there are few of them."""
        return sorted({g for arc in self.long for g in arc}) if len(self.long) <= _MOST_GAPS else []

    def leaps(self, slots: Ints) -> list[tuple[int, int, float]]:
        """Return long arcs between sampled slots, by position."""
        position = {int(g): i for i, g in enumerate(slots)}
        return [
            (position[a], position[b], w)
            for (a, b), w in sorted(self.long.items())
            if a in position and b in position
        ]

    def after(self) -> Floats:
        """Return the longest way from each E_k to the end, on-path collectives that need no other
        compute included; (m+1,).
        """
        ways = np.append(self.arrays.compute_ticks, 0) + self.stall
        ways[-1] = 0.0
        found: Floats = np.cumsum(ways[::-1])[::-1] - np.append(self.stall[:-1], 0.0)
        return found

    def before(self) -> Floats:
        """Return the longest way from the beginning to each R_k, on-path collectives included;
        (m+1,).
        """
        return np.concatenate(([0.0], np.cumsum(self.arrays.compute_ticks + self.stall[:-1])))

    def between(self, first: int, past: int) -> float:
        """Return the longest way from E_first to R_past, on-path collectives in between
        included.
        """
        time = 0.0
        for k in range(first, past):
            time += (self.stall[k] if k > first else 0.0) + self.arrays.compute_ticks[k]
        return time


def _fill(
    instance: Instance,
    made: Network,
    parts: list[BucketCosts],
    work: PathWork,
    weights: OnPath,
    leaps: list[float],
) -> None:
    """Write the constants of all arcs: (W5), with the least before a prefix and after a suffix."""
    arrays = instance.arrays
    slots, constant = made.slots, made.constant
    _fill_flows(made, work, weights.launch)
    for s in made.prefix_streams:
        on_stream = [p for p in parts if p.gathers and p.stream == s]
        lead = np.where(
            slots >= min(int(p.slot.min()) for p in on_stream),
            min(least_lead(p) for p in on_stream),
            0.0,
        )
        for end in made.ends:
            constant[made.block("enter", s, end)] = lead - weights.launch[slots]
            if end != SHIFT:
                constant[made.block("enter_tail", s, end)] = lead - weights.launch[slots]
        if made.has_on_path:
            constant[made.block("path_enter", s)] = lead
    for s in made.suffix_streams:
        on_stream = [p for p in parts if not p.gathers and p.stream == s]
        rest = np.where(
            slots <= max(int(p.slot.max()) for p in on_stream),
            min(float(p.epilogue.min()) for p in on_stream),
            0.0,
        )
        for start, end in made.classes:
            if end == s:
                constant[made.block("leave", start, s)] = rest
        if made.has_on_path:
            constant[made.block("path_leave", s)] = rest
    if made.has_on_path:
        for end in (END, *made.suffix_streams):
            constant[made.block("rejoin", 0, end)] = -weights.launch[slots]
        ways = [weights.between(a, b) for a, b in pairwise(slots.tolist())]
        constant[made.block("path")] = [*ways, 0.0]
        constant[made.block("stall")] = weights.stall[slots]
    constant[made.offset["leap", 0, 0] : made.offset["leap", 0, 0] + len(leaps)] = leaps
    counted = np.zeros(len(arrays.kind), dtype=np.bool_)
    for p in parts:
        counted[p.index] = True
    for s in {*made.prefix_streams, *made.suffix_streams}:
        on_stream = arrays.stream == s
        others = np.nonzero(on_stream & ~counted & ~arrays.bucketable)[0]
        first = int(arrays.ready_slot[on_stream].min())
        last = min(int(arrays.need_slot[on_stream].max()), len(arrays.compute_ticks))
        constant[made.offset["whole", s, 0]] = (
            work.before[first] + work.after[last] + arrays.transfer_ticks[others].sum()
        )


def _fill_flows(made: Network, work: PathWork, launch: Floats) -> None:
    """Write the compute along the paths, by their ends, and the launches of on-path collectives."""
    slots = made.slots
    launched = np.concatenate(([0], np.cumsum(launch)))  # [g]: at slots before g
    launches = launched[slots[1:]] - launched[slots[:-1] + 1]
    to_end, from_start, between = (
        np.append(run + launches, 0.0) + launch[slots]
        for run in (-np.diff(work.after[slots]), np.diff(work.before[slots]), work.between(slots))
    )
    for start, end in made.classes:
        least = to_end if end == END else from_start if start == BEGINNING else between
        made.constant[made.block("flow", start, end)] = least


def least_lead(part: BucketCosts) -> float:
    """Return the least work on the compute stream before the first transfer of a gather."""
    return float(
        np.minimum(
            part.alone_work, np.where(part.bucketable, part.shared_work + part.bucket_work, np.inf)
        ).min()
    )
