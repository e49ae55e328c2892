"""Relaxations of the arrays: without places for the collectives, and without prices of copies."""

from dataclasses import replace

import numpy as np

from apsched.costs.price_curve import PriceCurve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import ProblemArrays

_FREE = PriceCurve(size_bytes=(0, 1), price_ticks=(0, 0))


def without_places(arrays: ProblemArrays) -> ProblemArrays:
    """Return ``compact`` with every collective ready from the beginning and needed by the output
    only, and no memory in use.

    Every schedule around the compute in any order is one of this problem, since its compute nodes
    depend on nothing: bounds on time and launches of this one hold for all orders.
    """
    zeros, last = np.zeros_like(arrays.ready_slot), len(arrays.compute_ticks)
    unused = np.full_like(arrays.storage_bytes, -1)
    return replace(
        arrays,
        ready_slot=zeros,
        need_slot=zeros + last,
        base_slot_bytes=np.zeros_like(arrays.base_slot_bytes),
        base_compute_bytes=np.zeros_like(arrays.base_compute_bytes),
        storage_bytes=np.zeros_like(arrays.storage_bytes),
        storage_birth_compute=unused,
        storage_last_compute=unused,
        kept_bytes=0,
    )


def without_copies(instance: Instance) -> Instance:
    """Return the problem for bounds: with free copies if some bucket may be coalesced, else
    unchanged.

    Take any schedule, and make each of its coalesced buckets a flat one with its copy-in right
    before the start and its copy-outs right behind the wait. Here the copies cost nothing, the
    transfer costs no more than before, and everything else keeps its time and place: no schedule is
    faster than the best one of flat buckets with free copies. The conclusions from a memory cap
    (``apsched.solver.bounds.tighten``) are for a collective alone, whose input and output live as
    those of a member of a coalesced bucket.
    """
    arrays = instance.arrays
    if not arrays.coalesces.any():
        return instance
    return replace(
        instance,
        problem=replace(instance.problem, copy_price=_FREE),
        arrays=replace(arrays, copy_out_ticks=np.zeros_like(arrays.copy_out_ticks)),
    )
