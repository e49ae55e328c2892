"""Layers that repeat, found from the structure of a problem and not from names.

Every compute node is a symbol: the look of its collectives (key, sizes, distances between ready
slot, need slot and last use), and the bytes that it allocates and frees. Durations are not part of
it, so that measured layers with slightly different durations are the same. A stretch of the compute
order with period p is a run of positions i with symbol[i] = symbol[i + p]. Distances between equal
symbols propose p; each proposal is checked in one pass. Work: linear in the nodes, for a fixed
number of proposals.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays

_LEAST_REPEATS = 3
_LEAST_SHARE = 0.1
"""Share of the collectives that can move; a stretch that holds less does not count."""
_PROPOSALS = 64
_STEPS = 8
"""A symbol may stand in a layer up to this often for its distances to propose the layer."""
_AS_GOOD = 0.9
"""A shorter period wins if it covers this share of the collectives that the best period covers:
twice a period fits as well, and sometimes a node further.
"""
_DURATIONS_ALIKE = 0.01
"""Share of the work by which repeats may differ before several layers together are looked at as
one.
"""
_FAR = -(2**62)
"""Stands for an offset that has no meaning: ready from the beginning, needed by outputs only."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """A stretch of the compute order that repeats: compute nodes [first_compute, first_compute +
    count * length).

    A collective belongs to the layer (repeat) in which it is needed, or, where only outputs need
    it, becomes ready. The position is its place within the layer: the collectives of one position
    look alike in all layers.
    """

    first_compute: int
    length: int
    """Compute nodes of one layer."""
    count: int
    """Layers."""
    position_of_collective: tuple[int, ...]
    """(C,) -1 for collectives outside."""
    layer_of_collective: tuple[int, ...]
    """(C,) -1 for collectives outside."""

    @cached_property
    def collectives(self) -> tuple[tuple[int, ...], ...]:
        """For each position its collective in every layer."""
        inside = sorted(
            (position, layer, c)
            for c, (position, layer) in enumerate(
                zip(self.position_of_collective, self.layer_of_collective, strict=True)
            )
        )
        rows: list[list[int]] = []
        for position, _, c in inside:
            if position >= 0:
                if position == len(rows):
                    rows.append([])
                rows[position].append(c)
        return tuple(tuple(row) for row in rows)


def find_periods(arrays: ProblemArrays) -> tuple[Period, ...]:
    """Return disjoint stretches that repeat at least three times, in order of the compute order;
    one for each kind of layer.
    """
    events = event_compute(arrays)
    symbols = _symbols(arrays, events)
    moves = ~arrays.on_path
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
        times = _several_as_one(arrays.compute_ticks[begin : begin + length * count], length, count)
        found.append((begin, length * times, count // times))
        open_stretches += [(first, begin), (begin + length * count, past)]
    return tuple(_period(arrays, events, *stretch) for stretch in sorted(found))


def event_compute(arrays: ProblemArrays) -> Ints:
    """Return for each collective the compute node that it belongs to: the first that needs it, else
    the last before it; -1 for none.
    """
    num_compute = len(arrays.compute_ticks)
    ready = arrays.ready_slot.copy()
    for c in range(len(ready)):  # ordered by start: those that it waits for come first
        before = arrays.awaited_by(c)
        if len(before):
            ready[c] = max(ready[c], ready[before].max())
    events: Ints = np.where(arrays.need_slot < num_compute, arrays.need_slot, ready - 1)
    return events


def _symbols(arrays: ProblemArrays, events: Ints) -> Ints:
    """Return for each compute node the number of its symbol; equal symbols, equal numbers."""
    num_compute = len(arrays.compute_ticks)
    slot, at = arrays.base_slot_bytes, arrays.base_compute_bytes
    looks: list[list[tuple[object, ...]]] = [
        [("fixed", int(slot[k + 1] - slot[k]), int(at[k] - slot[k]))] for k in range(num_compute)
    ]
    for s, size in enumerate(arrays.storage_bytes.tolist()):
        birth, last = int(arrays.storage_birth_compute[s]), int(arrays.storage_last_compute[s])
        if birth >= 0:
            looks[birth].append(("born", size))
        if 0 <= last < num_compute:
            looks[last].append(("dies", size))
    for c, event in enumerate(events.tolist()):
        if event >= 0:
            looks[event].append(_look(arrays, c, event))
    index: dict[tuple[object, ...], int] = {}
    return np.array(
        [index.setdefault(tuple(sorted(look)), len(index)) for look in looks], dtype=np.int64
    )


def _look(arrays: ProblemArrays, c: int, event: int) -> tuple[object, ...]:
    """Return the symbol of ``c``: its key and sizes, and the distances from ``event`` at which it
    is ready, needed, written and last used.
    """
    num_compute = len(arrays.compute_ticks)
    given, result = int(arrays.input_storage[c]), int(arrays.output_storage[c])
    ready, need = int(arrays.ready_slot[c]), int(arrays.need_slot[c])
    birth = int(arrays.storage_birth_compute[given]) if given >= 0 else -1
    last = int(arrays.storage_last_compute[result]) if result >= 0 else -1
    return (
        "collective",
        int(arrays.key[c]),
        *(int(sizes[c]) for sizes in (arrays.size_bytes, arrays.input_bytes, arrays.output_bytes)),
        ready - event if ready > 0 else _FAR,
        need - event if need < num_compute else _FAR,
        birth - event if birth >= 0 else _FAR,
        last - event if 0 <= last < num_compute else _FAR,
        int(arrays.after_begin[c + 1] - arrays.after_begin[c]),
    )


def _best_run(symbols: Ints, weight: Ints, least: float) -> tuple[int, int, int] | None:
    """Return (first node, period, repeats) of the stretch that covers most collectives, the
    shortest period among equals.
    """
    before = np.concatenate(([0], np.cumsum(weight)))
    runs = []
    for length in _proposals(symbols, weight):
        begin, past = _longest_run(symbols[:-length] == symbols[length:], before, length)
        count = (past - begin) // length
        covered = (
            int(before[begin + count * length] - before[begin]) if count >= _LEAST_REPEATS else 0
        )
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
        (position[step:] - position[:-step])[symbol[step:] == symbol[:-step]]
        for step in range(1, min(_STEPS, len(position) - 1) + 1)
    ]
    if not distances:
        return []
    length, times = np.unique(np.concatenate(distances), return_counts=True)
    fits = length * _LEAST_REPEATS <= len(symbols)
    length, times = length[fits], times[fits]
    return [int(p) for p in length[np.lexsort((length, -times))][:_PROPOSALS]]


def _longest_run(alike: Bools, before: Ints, length: int) -> tuple[int, int]:
    """Return first and past of the stretch with ``alike`` throughout that covers most collectives;
    it reaches one period further.
    """
    edges = np.diff(np.concatenate(([0], alike.astype(np.int8), [0])))
    first, past = np.nonzero(edges == 1)[0], np.nonzero(edges == -1)[0] + length
    if not len(first):
        return 0, 0
    best = int(np.argmax(before[past] - before[first]))
    return int(first[best]), int(past[best])


def _several_as_one(ticks: Ints, length: int, count: int) -> int:
    """Return the number of layers in one repeat: several if only together they take equally long
    (attention of two kinds in turn).
    """
    total = max(int(ticks.sum()), 1)
    for times in range(1, _LEAST_REPEATS + 2):
        step = times * length
        if count // times < _LEAST_REPEATS:
            break
        if int(np.abs(ticks[step:] - ticks[:-step]).sum()) <= _DURATIONS_ALIKE * total:
            return times
    return 1


def _period(arrays: ProblemArrays, events: Ints, first: int, length: int, count: int) -> Period:
    """Return the stretch with its collectives; those of one layer are numbered by compute node,
    then by look, then as captured.
    """
    positions, layers = [-1] * len(events), [-1] * len(events)
    members: list[list[tuple[int, tuple[object, ...], int]]] = [[] for _ in range(count)]
    for c, event in enumerate(events.tolist()):
        layer = (event - first) // length
        if event >= first and layer < count:
            members[layer].append((event - first - layer * length, _look(arrays, c, event), c))
    for layer, found in enumerate(members):
        for position, (*_, c) in enumerate(sorted(found)):
            positions[c], layers[c] = position, layer
    return Period(
        first_compute=first,
        length=length,
        count=count,
        position_of_collective=tuple(positions),
        layer_of_collective=tuple(layers),
    )
