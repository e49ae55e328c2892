"""Layers that repeat, found from the structure of a problem and not from names.

Every spine node is a symbol: what its collectives look like (key, sizes, distances between ready gap, need gap and last use), and what
memory it takes and frees. Durations are not part of it, so that layers that were measured, and differ a little, are still the same.
A stretch of the spine with period p is a run of positions i with symbol[i] = symbol[i + p]. Distances between equal symbols propose p;
each proposal is checked in one pass. Work: linear in the nodes, for a fixed number of proposals.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apsched.solver.arrays.problem_arrays import Bools, Compact, Ints

_LEAST_REPEATS = 3
_LEAST_SHARE = 0.1
"""Of the collectives that can move, which a stretch must hold to count."""
_PROPOSALS = 64
_STEPS = 8
"""A symbol may stand in a layer up to this often for its distances to propose the layer."""
_AS_GOOD = 0.9
"""A shorter period wins if it covers this share of what the best covers: twice a period fits as well, and sometimes a node further."""
_DURATIONS_ALIKE = 0.01
"""Share of the work by which repeats may differ before several layers together are looked at as one."""
_FAR = -(2**62)
"""Stands for an offset that has no meaning: ready from the beginning, needed by outputs only."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """A stretch of the spine that repeats: spine nodes [first_spine, first_spine + count * length).

    A collective belongs to the layer (repeat) in which it is needed, or, where only outputs need it, becomes ready. The slot is its
    place within the layer: the collectives of one slot look alike in all layers.
    """

    first_spine: int
    length: int
    """Spine nodes of one layer."""
    count: int
    """Layers."""
    slot_of_collective: tuple[int, ...]
    """(C,) -1 for collectives outside."""
    layer_of_collective: tuple[int, ...]
    """(C,) -1 for collectives outside."""

    @cached_property
    def collectives(self) -> tuple[tuple[int, ...], ...]:
        """For each slot its collective in every layer."""
        inside = sorted(
            (slot, layer, c) for c, (slot, layer) in enumerate(zip(self.slot_of_collective, self.layer_of_collective, strict=True))
        )
        rows: list[list[int]] = []
        for slot, _, c in inside:
            if slot >= 0:
                if slot == len(rows):
                    rows.append([])
                rows[slot].append(c)
        return tuple(tuple(row) for row in rows)


def find_periods(compact: Compact) -> tuple[Period, ...]:
    """Return disjoint stretches that repeat at least three times, in order of the spine; one for each kind of layer."""
    events = event_spine(compact)
    symbols = _symbols(compact, events)
    moves = ~compact.on_path
    weight = np.bincount(events[moves & (events >= 0)], minlength=len(symbols))
    least = max(1.0, _LEAST_SHARE * float(moves.sum()))
    found: list[tuple[int, int, int]] = []
    open_stretches = [(0, len(symbols))]
    while open_stretches:
        first, past = open_stretches.pop()
        run = _best_run(symbols[first:past], weight[first:past], least)
        if run is None:
            continue
        begin, length, count = run[0] + first, run[1], run[2]
        times = _several_as_one(compact.spine_ticks[begin : begin + length * count], length, count)
        found.append((begin, length * times, count // times))
        open_stretches += [(first, begin), (begin + length * count, past)]
    return tuple(_period(compact, events, *stretch) for stretch in sorted(found))


def event_spine(compact: Compact) -> Ints:
    """Return for each collective the spine node that it belongs to: the first that needs it, else the last before it; -1 for none."""
    num_spine = len(compact.spine_ticks)
    ready = compact.ready_gap.copy()
    for c in range(len(ready)):  # ordered by start: those that it waits for come first
        before = compact.after_list[compact.after_begin[c] : compact.after_begin[c + 1]]
        if len(before):
            ready[c] = max(ready[c], ready[before].max())
    events: Ints = np.where(compact.need_gap < num_spine, compact.need_gap, ready - 1)
    return events


def _symbols(compact: Compact, events: Ints) -> Ints:
    """Return for each spine node a number that says what it looks like; equal looks, equal numbers."""
    num_spine = len(compact.spine_ticks)
    gap, at = compact.base_gap_bytes, compact.base_spine_bytes
    looks: list[list[tuple[object, ...]]] = [[("fixed", int(gap[k + 1] - gap[k]), int(at[k] - gap[k]))] for k in range(num_spine)]
    for s, size in enumerate(compact.storage_bytes.tolist()):
        birth, last = int(compact.storage_birth_spine[s]), int(compact.storage_last_spine[s])
        if birth >= 0:
            looks[birth].append(("born", size))
        if 0 <= last < num_spine:
            looks[last].append(("dies", size))
    for c, event in enumerate(events.tolist()):
        if event >= 0:
            looks[event].append(_look(compact, c, event))
    index: dict[tuple[object, ...], int] = {}
    return np.array([index.setdefault(tuple(sorted(look)), len(index)) for look in looks], dtype=np.int64)


def _look(compact: Compact, c: int, event: int) -> tuple[object, ...]:
    """Return what makes ``c`` alike another: its key and sizes, and how far from ``event`` it is ready, needed, written and last used."""
    num_spine = len(compact.spine_ticks)
    given, result = int(compact.input_storage[c]), int(compact.output_storage[c])
    ready, need = int(compact.ready_gap[c]), int(compact.need_gap[c])
    birth = int(compact.storage_birth_spine[given]) if given >= 0 else -1
    last = int(compact.storage_last_spine[result]) if result >= 0 else -1
    return (
        "collective",
        int(compact.key[c]),
        *(int(sizes[c]) for sizes in (compact.size_bytes, compact.input_bytes, compact.output_bytes)),
        ready - event if ready > 0 else _FAR,
        need - event if need < num_spine else _FAR,
        birth - event if birth >= 0 else _FAR,
        last - event if 0 <= last < num_spine else _FAR,
        int(compact.after_begin[c + 1] - compact.after_begin[c]),
    )


def _best_run(symbols: Ints, weight: Ints, least: float) -> tuple[int, int, int] | None:
    """Return (first node, period, repeats) of the stretch that covers most collectives, the shortest period among equals."""
    before = np.concatenate(([0], np.cumsum(weight)))
    runs = []
    for length in _proposals(symbols, weight):
        begin, past = _longest_run(symbols[:-length] == symbols[length:], before, length)
        count = (past - begin) // length
        covered = int(before[begin + count * length] - before[begin]) if count >= _LEAST_REPEATS else 0
        if covered >= least:
            runs.append((length, begin, count, covered))
    if not runs:
        return None
    most = max(covered for *_, covered in runs)
    length, begin, count, _ = min(run for run in runs if run[3] >= _AS_GOOD * most)
    return begin, length, count


def _proposals(symbols: Ints, weight: Ints) -> list[int]:
    """Return the most frequent distances between equal symbols that carry collectives."""
    at = np.nonzero(weight)[0]
    order = np.lexsort((at, symbols[at]))
    position, symbol = at[order], symbols[at][order]
    distances = [
        (position[step:] - position[:-step])[symbol[step:] == symbol[:-step]] for step in range(1, min(_STEPS, len(position) - 1) + 1)
    ]
    if not distances:
        return []
    length, times = np.unique(np.concatenate(distances), return_counts=True)
    fits = length * _LEAST_REPEATS <= len(symbols)
    length, times = length[fits], times[fits]
    return [int(p) for p in length[np.lexsort((length, -times))][:_PROPOSALS]]


def _longest_run(alike: Bools, before: Ints, length: int) -> tuple[int, int]:
    """Return first and past of the stretch with ``alike`` throughout that covers most collectives; it reaches one period further."""
    edges = np.diff(np.concatenate(([0], alike.astype(np.int8), [0])))
    first, past = np.nonzero(edges == 1)[0], np.nonzero(edges == -1)[0] + length
    if not len(first):
        return 0, 0
    best = int(np.argmax(before[past] - before[first]))
    return int(first[best]), int(past[best])


def _several_as_one(ticks: Ints, length: int, count: int) -> int:
    """Return how many layers make one repeat: several where only together they take equally long (attention of two kinds in turn)."""
    total = max(int(ticks.sum()), 1)
    for times in range(1, _LEAST_REPEATS + 2):
        step = times * length
        if count // times < _LEAST_REPEATS:
            break
        if int(np.abs(ticks[step:] - ticks[:-step]).sum()) <= _DURATIONS_ALIKE * total:
            return times
    return 1


def _period(compact: Compact, events: Ints, first: int, length: int, count: int) -> Period:
    """Return the stretch with its collectives; those of one layer are numbered by spine node, then by look, then as captured."""
    slots, layers = [-1] * len(events), [-1] * len(events)
    members: list[list[tuple[int, tuple[object, ...], int]]] = [[] for _ in range(count)]
    for c, event in enumerate(events.tolist()):
        layer = (event - first) // length
        if event >= first and layer < count:
            members[layer].append((event - first - layer * length, _look(compact, c, event), c))
    for layer, found in enumerate(members):
        for slot, (*_, c) in enumerate(sorted(found)):
            slots[c], layers[c] = slot, layer
    return Period(first_spine=first, length=length, count=count, slot_of_collective=tuple(slots), layer_of_collective=tuple(layers))
