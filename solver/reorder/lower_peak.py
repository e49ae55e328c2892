"""Less memory by moving compute: blocks at the peak run earlier or later, as long as that lowers
the peak.

At the block with the peak, a stretch of neighbours is parted in two: the block and its predecessors
go first, or the block and its successors go last. Each is judged by the least peak of
launches and waits around it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.program.evaluate import trace
from apsched.solver.program.program import NODE, Program
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.search.just_in_time import Floor, just_in_time

_STRETCHES = (1, 2, 4, 8, 16, 32, 64)
"""Blocks."""
_ROUNDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """An order of the blocks, and the least peak that is known for it."""

    blocks: Ints
    peak_bytes: int
    program: Program | None = None
    """The program with that peak; None if it is the one that starts just in time."""


def lower_peak(mover: ComputeMover, caps: Caps, enough_bytes: int) -> tuple[Lowered, ...]:
    """Return blocks in orders with lower and lower peaks, the last at best of ``enough_bytes``;
    none where none is found.

    Caps other than that on memory are kept.
    """
    known = _floor(mover, mover.captured, caps) if len(mover.captured) else None
    if known is None:
        return ()
    blocks, floor = mover.captured, known
    least, found_so_far = known.peak_memory_bytes, list[Lowered]()
    seen = {blocks.tobytes()}
    for _ in range(_ROUNDS):
        if least <= enough_bytes:
            break
        best: tuple[int, int, Ints, Floor] | None = None
        for number, neighbour in enumerate(_neighbours(mover, blocks, floor)):
            if neighbour.tobytes() in seen or not mover.is_near(neighbour, caps):
                continue
            found = _floor(mover, neighbour, caps)
            if found is not None and (best is None or (found.peak_memory_bytes, number) < best[:2]):
                best = found.peak_memory_bytes, number, neighbour, found
        if best is None or best[0] > floor.peak_memory_bytes:
            break
        _, _, blocks, floor = (
            best  # as high is good enough: the peak may stand at another block now
        )
        seen.add(blocks.tobytes())
        if floor.peak_memory_bytes < least:
            least = floor.peak_memory_bytes
            found_so_far.append(Lowered(blocks=blocks, peak_bytes=least))
    return tuple(found_so_far)


def _floor(mover: ComputeMover, blocks: Ints, caps: Caps) -> Floor | None:
    return just_in_time(mover.moved(blocks).within(caps))


def _neighbours(mover: ComputeMover, blocks: Ints, floor: Floor) -> Iterator[Ints]:
    place = _place_of_peak(mover, blocks, floor)
    p = mover.orders.precedence
    for length in _STRETCHES:
        begin, past = max(place - length, 0), min(place + length + 1, len(blocks))
        needed = {int(blocks[place])}
        for block in blocks[begin:place][::-1].tolist():
            if not needed.isdisjoint(
                p.behind_list[p.behind_begin[block] : p.behind_begin[block + 1]].tolist()
            ):
                needed.add(block)
        yield _parted(blocks, begin, place + 1, needed, first=True)
        following = {int(blocks[place])}
        for block in blocks[place + 1 : past].tolist():
            if not following.isdisjoint(
                p.before_list[p.before_begin[block] : p.before_begin[block + 1]].tolist()
            ):
                following.add(block)
        yield _parted(blocks, place, past, following, first=False)


def _parted(blocks: Ints, begin: int, past: int, chosen: set[int], *, first: bool) -> Ints:
    """Return ``blocks`` with those of the stretch that are chosen before, or behind, the others of
    it.
    """
    inside = np.isin(blocks[begin:past], list(chosen))
    one, other = blocks[begin:past][inside], blocks[begin:past][~inside]
    return np.concatenate(
        (blocks[:begin], *((one, other) if first else (other, one)), blocks[past:])
    )


def _place_of_peak(mover: ComputeMover, blocks: Ints, floor: Floor) -> int:
    """Return which of ``blocks`` runs where, or last before, the most is alive."""
    stands = trace(mover.moved(blocks).arrays, floor.program)
    at = int(
        np.searchsorted(stands.first_position, int(np.argmax(stands.live_bytes)), side="right")
    )
    nodes = int((floor.program.operation[:at] == NODE).sum())
    ends = np.cumsum(np.diff(mover.orders.precedence.first)[blocks])
    return min(int(np.searchsorted(ends, max(nodes - 1, 0), side="right")), len(blocks) - 1)
