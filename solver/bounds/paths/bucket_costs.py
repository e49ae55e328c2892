"""Costs of the collectives of one key, alone and in buckets, for the bound that weighs paths
(``apsched.solver.bounds.paths.bound``).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays
from apsched.solver.bounds.paths.price_lines import lines_below
from apsched.solver.bounds.step_time import copy_rest, least_rate
from apsched.solver.bounds.tighten import holds_output

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCosts:
    """The gathers of a key that the compute order needs, by need; or its reductions for outputs,
    latest ready slot first.

    So the head of a bucket, the member that decides when it is transferred at the latest (or
    earliest), is the first of its members.
    """

    gathers: bool
    stream: int
    index: Ints
    """(n,) collectives."""
    slot: Ints
    """(n,) need slot of gathers, ready slot of reductions."""
    size_bytes: Floats
    transfer: Floats
    """(n,) alone."""
    alone_work: Floats
    """(n,) on the compute stream before the transfer, alone: launch, of a gather its prologue."""
    shared_work: Floats
    """(n,) the same in a bucket: its share of the copy-in, of a gather its prologue without the
    cast.
    """
    copy_in: Floats
    copy_out: Floats
    """(n,) of a gather in a bucket."""
    epilogue: Floats
    bucket_work: float
    """Launch of a bucket, and the cost of its copy-in beyond that of the bytes."""
    lines: Floats
    """(P, 2) latency and rate of buckets, see ``lines_below``."""
    copy_rate: float
    """Least ticks per byte of ``size_bytes``: of the copy-out of a gather, of the copy-in of a
    reduction; at most the least rate.
    """
    bucketable: Bools
    held_share: float
    """Bytes that a member holds from its launch to its need, at least, for each of ``size_bytes``;
    0 for reductions.
    """


def bucket_costs(instance: Instance) -> list[BucketCosts]:
    """Return gathers and reductions, one entry for each key and direction."""
    arrays = instance.arrays
    gathers, reductions = arrays.gathers, arrays.reductions
    ready = arrays.late_ready_slot
    found = []
    for key in range(len(instance.problem.keys)):
        for mask in (gathers, reductions):
            index = np.nonzero(mask & (arrays.key == key))[0]
            if len(index):
                slot = arrays.need_slot[index] if mask is gathers else ready[index]
                order = np.argsort(slot if mask is gathers else -slot, kind="stable")
                found.append(_bucket_costs(instance, index[order], slot[order], mask is gathers))
    return found


def _bucket_costs(instance: Instance, index: Ints, slot: Ints, gathers: bool) -> BucketCosts:
    problem, arrays = instance.problem, instance.arrays
    key = int(arrays.key[index[0]])
    lines, bucketable = _lines(instance, key)
    prologue, epilogue, cast = (
        ticks[index].astype(np.float64)
        for ticks in (arrays.prologue_ticks, arrays.epilogue_ticks, arrays.cast_ticks)
    )
    before, before_shared = (
        (prologue, prologue - cast) if gathers else (np.zeros(len(index)), np.zeros(len(index)))
    )
    copy_in: Floats = arrays.copied_bytes[index].astype(np.float64) * least_rate(
        problem.copy_price, None
    )
    copy_out = arrays.copy_out_ticks[index].astype(np.float64) if gathers else np.zeros(len(index))
    size = arrays.size_bytes[index].astype(np.float64)
    copied = (copy_out if gathers else copy_in)[size > 0] / size[size > 0]
    return BucketCosts(
        gathers=gathers,
        stream=int(arrays.stream[index[0]]),
        index=index,
        slot=slot,
        size_bytes=size,
        transfer=arrays.transfer_ticks[index].astype(np.float64),
        alone_work=arrays.launch_ticks[index] + before,
        shared_work=copy_in + before_shared,
        copy_in=copy_in,
        copy_out=copy_out,
        epilogue=epilogue,
        bucket_work=float(arrays.bucket_launch_ticks[index[0]] + copy_rest(problem)),
        lines=lines,
        copy_rate=min(float(copied.min(initial=np.inf)), float(lines[:, 1].min())) * (1 - 1e-12),
        bucketable=arrays.bucketable[index] & bucketable,
        held_share=_held_share(arrays, index) if gathers else 0.0,
    )


def _held_share(arrays: ProblemArrays, index: Ints) -> float:
    held = [arrays.output_bytes[c] if holds_output(arrays, c) else 0 for c in index.tolist()]
    size = arrays.size_bytes[index]
    shares = np.array(held, dtype=np.float64)[size > 0] / size[size > 0]
    return float(shares.min()) * (1 - 1e-12) if len(shares) else 0.0


def _lines(instance: Instance, key: int) -> tuple[Floats, bool]:
    """Return the lines below the price of a bucket of ``key``, and whether there can be one."""
    arrays = instance.arrays
    sizes = np.sort(arrays.size_bytes[(arrays.key == key) & arrays.bucketable])
    if len(sizes) < 2:
        return np.zeros((1, 2)), False
    smallest, largest = int(sizes[:2].sum()), int(sizes.sum())
    if instance.caps.bucket_cap_bytes is not None:
        largest = min(largest, instance.caps.bucket_cap_bytes)
    return lines_below(instance.problem.keys[key].price, smallest, largest), smallest <= largest
