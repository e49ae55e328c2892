"""A bound over all sequences of launches on one stream of gathers, or of reductions:
``docs/formulation.md``, (W7).

The bound along paths is a mean over partitions. Where the first gathers are late, no single
partition is as good as the mean: a bucket delays its head by all of its bytes, and all of its
copies follow its transfer. Here the launches follow each other one by one. A launch is alone or a
bucket of any size; bytes are needed in one order, so that the launch that begins at a byte tells
which compute waits for it.

Reductions at the end of a step are the same in reversed time: the last one comes first, the compute
before its ready slot is the compute behind a need, and copies run before the transfer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.bounds.paths.bucket_costs import BucketCosts, bucket_costs
from apsched.solver.bounds.paths.network import OnPath, least_lead
from apsched.solver.bounds.paths.path_work import PathWork
from apsched.solver.bounds.step_time import TimeBound

Floats = npt.NDArray[np.float64]

_MOST_CELLS = 2000
"""Cells into which the bytes of a stream are divided."""
_MOST_LABELS = 128
"""Pairs of tail and copied cells that are kept at a position."""
_MOST_DIVIDED = 8
"""Sizes, those with the most bytes in all, whose parts are tried as a cell."""
_FEW = 3
"""The largest collectives, where they are so few, are counted: each is launched alone once."""
_STEPS = (0.01, 0.02, 0.04, 0.08)
"""Shares by which the bound is tried to be raised: the nearer the limit, the fewer labels."""
_STALLED = 0.05
"""Share of the bound that is no compute, below which no stream is late."""
_IDLE_SHARE = 0.05
"""Share of the stream's transfers, below which those of the other kind are left out."""


class Stream(NamedTuple):
    """The gathers of one stream as cells of equally many bytes, in the order of their need; or its
    reductions, in the reversed order of their ready slots and in reversed time.
    """

    after: Floats
    """(cells,) the compute from the first node that needs the cell to the end, and ``behind``."""
    behind: Floats
    """(cells,) the least copies of all cells from there on."""
    way: Floats
    """(cells,) the compute with the collectives that it waits for; copies may run meanwhile."""
    flat: Floats
    """(cells + 1,) the least transfer of a bucket of so many cells."""
    copy: float
    """The least copy of a cell in a bucket, beyond that of any cell."""
    alone_cells: Ints
    alone: Floats
    """(sizes,) cells and transfer of each size of collectives that are launched alone."""
    counted_after: Floats
    """(n,) of each collective of the largest size, which is the last one, the compute from its need
    to the end, the latest need first; each is alone once. Without entries any number is alone.
    """
    counted_way: Floats
    """(n,) the same with the collectives that it waits for."""
    lead: float
    """Least work before the first transfer."""
    compute: float
    """All compute, and the least copies of all cells."""
    work: float
    """The least other work on the compute stream that no choice changes."""


def launch_sequence_bound(
    instance: Instance, best_ticks: int, work: PathWork | None = None
) -> TimeBound | None:
    """Return a bound above ``best_ticks``; ``None`` where none is found, or no stream of one kind
    is late. ``work`` is the compute along the paths, without it that of ``instance`` in its order.
    """
    work = PathWork.in_order(instance.arrays) if work is None else work
    if best_ticks * (1 - _STALLED) < work.after[0]:
        return None
    found = float(best_ticks)
    for stream in streams_of_one_kind(instance, work):
        found = _raised(stream, found)
    ticks = int(found * (1 - 1e-9))
    source = BoundSource.LAUNCH_SEQUENCE
    return TimeBound(ticks=ticks, source=source) if ticks > best_ticks else None


def streams_of_one_kind(instance: Instance, work: PathWork) -> list[Stream]:
    """Return the streams of gathers and those of reductions; of the other kind they have at most a
    few, which are left out.
    """
    found: list[Stream] = []
    of_streams: dict[int, list[BucketCosts]] = {}
    for part in bucket_costs(instance):
        of_streams.setdefault(part.stream, []).append(part)
    for parts in of_streams.values():
        busiest = max(parts, key=lambda part: float(part.transfer.sum()))
        of_kind = [part for part in parts if part.gathers == busiest.gathers]
        total = sum(float(part.transfer.sum()) for part in parts)
        if sum(float(part.transfer.sum()) for part in of_kind) >= (1 - _IDLE_SHARE) * total:
            made = _stream(instance, work, of_kind)
            found += [made] if made is not None else []
    return found


def _raised(stream: Stream, best: float) -> float:
    """Return the least step over all sequences as far as it is above ``best``."""
    found = best
    for step in _STEPS:
        limit = best * (1 + step)
        least = least_step(stream, limit)
        if least <= limit:
            return max(found, least)
        found = limit
    return found


def least_step(stream: Stream, limit: float) -> float:
    """Return the least step time over all sequences of launches, (W7); infinite above ``limit``."""
    compute = stream.compute + stream.work
    if compute > limit:
        return np.inf
    tails, flats, nums = _tails(stream, limit, _MOST_LABELS)
    least = np.inf
    for used in range(len(nums)):
        labels = slice(0, nums[used])
        steps = np.maximum(
            stream.lead + tails[used, labels], compute + stream.copy * flats[used, labels]
        )
        least = min(least, float(steps.min(initial=np.inf)))
    return least


def _stream(instance: Instance, work: PathWork, parts: Sequence[BucketCosts]) -> Stream | None:
    """Return the gathers or the reductions ``parts``, all of one stream; ``None`` if no bytes are
    sent.
    """
    gathers = parts[0].gathers
    size, slot, transfer, copy_out, alone_work, shared_work, epilogue = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in (
            *("size_bytes", "slot", "transfer", "copy_out"),
            *("alone_work", "shared_work", "epilogue"),
        )
    )
    if not size.any():
        return None
    cell_bytes = _cell_bytes(size)
    cells = (size / cell_bytes + 1e-9).astype(np.int64)
    kept = cells > 0
    if not kept.any():
        return None
    order = np.argsort(slot[kept] if gathers else -slot[kept], kind="stable")
    at = np.repeat(slot[kept][order], cells[kept][order])
    alone_cells, alone = _sizes(cells[kept], transfer[kept])
    largest = slot[kept][order][cells[kept][order] == alone_cells[-1]][::-1]  # latest need first
    if len(largest) > _FEW:
        largest = largest[:0]
    copied = copy_out if gathers else shared_work  # behind its transfer, or before it
    flat, by_itself = (
        float((ticks[kept] / cells[kept]).min())
        for ticks in (copied, np.zeros_like(copied) if gathers else alone_work)
    )
    each = min(flat, by_itself)
    before = np.minimum(alone_work, shared_work) if gathers else np.zeros_like(copied)
    least = np.minimum(alone_work, shared_work + copy_out)
    way, lines = OnPath(instance), np.concatenate([part.lines for part in parts])
    payloads = cell_bytes * np.arange(len(at) + 1)[:, None]
    behind = each * np.arange(len(at), 0, -1, dtype=np.float64)
    if not gathers:  # a launch, too, runs before its transfer
        beyond = float((alone_work[kept] - each * cells[kept]).min())
        behind += min(beyond, *(part.bucket_work for part in parts))
    after = work.after if gathers else work.before
    longest = way.after() if gathers else way.before()
    return Stream(
        after=after[at] + behind,
        behind=behind,
        way=longest[at],
        flat=(lines[:, 0] + lines[:, 1] * payloads).min(axis=1),
        copy=flat - each,
        alone_cells=alone_cells,
        alone=alone,
        counted_after=after[largest].astype(np.float64),
        counted_way=longest[largest].astype(np.float64),
        lead=min(least_lead(part) if gathers else float(part.epilogue.min()) for part in parts),
        compute=float(work.after[0]) + each * len(at),
        work=float((before + epilogue)[kept].sum() + (least + epilogue)[~kept].sum()),
    )


def _cell_bytes(size_bytes: Floats) -> float:
    """Return the size of a cell with which the sizes, each rounded down to cells, lose least; there
    must be a size above 0.
    """
    sizes, counts = np.unique(size_bytes[size_bytes > 0], return_counts=True)
    total = float(sizes @ counts)
    least = total / _MOST_CELLS
    best, most = least, -1.0
    for size in sizes[np.argsort(-sizes * counts, kind="stable")][:_MOST_DIVIDED].tolist():
        for parts in range(1, max(int(size / least), 1) + 1):
            cell = max(size / parts, least)
            left = float((np.floor(sizes / cell + 1e-9) * cell) @ counts)
            if left > most + 1e-9 * total or (left > most - 1e-9 * total and cell > best):
                best, most = cell, max(left, most)
    return best


def _sizes(cells: Ints, transfer: Floats) -> tuple[Ints, Floats]:
    """Return the sizes in cells, ascending, and the least transfer of each."""
    sizes, which = np.unique(cells, return_inverse=True)
    alone = np.full(len(sizes), np.inf)
    np.minimum.at(alone, which, transfer)
    return sizes.astype(np.int64), alone


@compiled
def _tails(stream: Stream, limit: float, most_labels: int) -> tuple[Floats, Ints, Ints]:
    """Return the labels of all launches, by how many of the largest are alone: the least time from
    the begin of the first transfer to the end, and the cells in buckets; and their number.

    From the last launch to the first: all that follows a launch is known. The labels that no other
    beats in both are kept. Labels of no step within ``limit`` are left out.
    """
    after, way, flat, copy = stream.after, stream.way, stream.flat, stream.copy
    alone_cells, alone = stream.alone_cells, stream.alone
    num, num_counted = len(after), len(stream.counted_after)
    num_sizes = len(alone) - (1 if num_counted else 0)
    compute = stream.compute + stream.work
    earliest = _earliest(stream, limit)
    tails = np.full((num + 1, num_counted + 1, most_labels), np.inf)
    flats = np.zeros((num + 1, num_counted + 1, most_labels), np.int64)
    nums = np.zeros((num + 1, num_counted + 1), np.int64)
    nums[num, 0] = 1
    tails[num, 0, 0] = 0.0
    least = np.empty(num + 1)  # by cells in buckets
    for i in range(num - 1, -1, -1):
        if earliest[i] == np.inf:
            continue
        for used in range(num_counted + 1):
            least[: num - i + 1] = np.inf
            for s in range(len(alone)):
                before, rest, longest = used, after[i], way[i]
                if s >= num_sizes:  # this one and those behind it: one has this need or a sooner
                    before = used - 1
                    if before < 0:
                        continue
                    rest = max(rest, stream.counted_after[before] + stream.behind[i])
                    longest = max(longest, stream.counted_way[before])
                j = i + alone_cells[s]
                if j > num:
                    continue
                for a in range(nums[j, before]):
                    cells = flats[j, before, a]
                    tail = alone[s] + max(tails[j, before, a], rest + copy * cells, longest)
                    least[cells] = min(least[cells], tail)
            for j in range(i + 1, num + 1):
                if earliest[i] + flat[j - i] + after[i] + copy * (j - i) > limit:
                    break
                for a in range(nums[j, used]):
                    cells = flats[j, used, a] + j - i
                    tail = flat[j - i] + max(tails[j, used, a], after[i] + copy * cells, way[i])
                    least[cells] = min(least[cells], tail)
            most_tail = limit - earliest[i]
            most_cells = num - i
            if most_cells * copy > limit - compute:
                most_cells = int((limit - compute) / copy)
            nums[i, used] = _kept(
                least[: most_cells + 1], most_tail, tails[i, used], flats[i, used]
            )
    return tails[0], flats[0], nums[0]


@compiled
def _earliest(stream: Stream, limit: float) -> Floats:
    """Return the least end of the transfers before each position, as far as the step may keep
    ``limit``; (cells + 1,).
    """
    after, flat, copy = stream.after, stream.flat, stream.copy
    alone_cells, alone = stream.alone_cells, stream.alone
    num = len(after)
    earliest = np.full(num + 1, np.inf)
    earliest[0] = stream.lead
    for i in range(num):
        for s in range(len(alone)):
            j = i + alone_cells[s]
            end = earliest[i] + alone[s]
            if j <= num and end + after[i] <= limit:
                earliest[j] = min(earliest[j], end)
        for j in range(i + 1, num + 1):
            end = earliest[i] + flat[j - i]
            if end + after[i] + copy * (j - i) > limit:
                break
            earliest[j] = min(earliest[j], end)
    return earliest


@compiled
def _kept(least: Floats, most_tail: float, tails: Floats, flats: Ints) -> int:
    """Write the labels that no other beats to ``tails`` and ``flats``, and return their number;
    where they are too many, the least of each range of tails takes the place of all in it.

    ``least`` has the least tail by cells in buckets.
    """
    first = last = np.inf
    num = 0
    for cells in range(len(least)):
        if least[cells] <= most_tail and least[cells] < last:
            first = least[cells] if num == 0 else first
            last = least[cells]
            num += 1
    width = (first - last) / (len(tails) - 1) if num > len(tails) else 0.0
    kept, last = 0, np.inf
    for cells in range(len(least)):
        if not (least[cells] <= most_tail and least[cells] < last):
            continue
        if (
            kept
            and width > 0.0
            and int((first - least[cells]) / width) == int((first - last) / width)
        ):
            tails[kept - 1] = least[cells]
        else:
            tails[kept], flats[kept] = least[cells], cells
            kept += 1
        last = least[cells]
    return kept
