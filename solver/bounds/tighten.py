"""Consequences of a memory cap for every schedule: earlier waits and later launches, for the bounds
to use.

At compute node q some bytes are alive in every schedule. A reduce-scatter whose input does not fit
beside them must have been waited for before q: until then its gradient, or the buffer that holds
it, is alive. A gather whose output does not fit beside them cannot have been launched before q,
unless it is needed by then.
"""

from dataclasses import replace

import numpy as np

from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import ALL_GATHER, REDUCE_SCATTER, Ints, ProblemArrays
from apsched.solver.bounds.step_time import least_live_bytes


def tighten(instance: Instance) -> Instance:
    """Return ``instance`` with the ready and need slots that the user's plan and the memory cap
    force.
    """
    arrays = instance.arrays
    arrays = replace(arrays, need_slot=np.minimum(arrays.need_slot, arrays.wait_last))
    instance = replace(instance, arrays=arrays)
    free = free_bytes(instance)
    if free is None or not len(arrays.kind):
        return instance
    num_compute = len(arrays.compute_ticks)
    ready, need = arrays.ready_slot.copy(), arrays.need_slot.copy()
    for c in range(len(arrays.kind)):
        if arrays.on_path[c]:
            continue
        if (
            arrays.kind[c] == REDUCE_SCATTER
            and arrays.need_slot[c] == num_compute
            and holds_input(arrays, c)
        ):
            short = np.nonzero(
                free[ready[c] : num_compute] + _counted(arrays, c, ready[c], num_compute)
                < arrays.input_bytes[c]
            )[0]
            if len(short):
                need[c] = ready[c] + short[0]
        elif (
            arrays.kind[c] == ALL_GATHER
            and arrays.need_slot[c] < num_compute
            and holds_output(arrays, c)
        ):
            short = np.nonzero(free[ready[c] : need[c]] < arrays.output_bytes[c])[0]
            if len(short):
                ready[c] += short[-1] + 1
    return replace(instance, arrays=replace(arrays, ready_slot=ready, need_slot=need))


def free_bytes(instance: Instance) -> Ints | None:
    """Return the bytes under the memory cap that are not surely in use, at each compute node and at
    the output; None without a cap.
    """
    cap = instance.caps.memory_cap_bytes
    return None if cap is None else cap - least_live_bytes(instance.arrays)


def holds_output(arrays: ProblemArrays, c: int) -> bool:
    """Whether the output of gather ``c`` is alive until its need: not where only another collective
    reads it.
    """
    s = int(arrays.output_storage[c])
    return s >= 0 and int(arrays.storage_last_compute[s]) >= int(arrays.need_slot[c])


def holds_input(arrays: ProblemArrays, c: int) -> bool:
    """Whether the input of ``c`` is alive until its wait."""
    s = int(arrays.input_storage[c])
    return s >= 0 and int(arrays.attached_of_wait[c]) in arrays.touches_of(s)


def _counted(arrays: ProblemArrays, c: int, first: int, past: int) -> np.ndarray:
    """Return the bytes of the input of ``c`` that are counted as alive at compute nodes [first,
    past) anyway.
    """
    s = int(arrays.input_storage[c])
    counted = np.zeros(past - first, dtype=np.int64)
    counted[: max(int(arrays.storage_last_compute[s]) + 1 - first, 0)] = arrays.storage_bytes[s]
    return counted
