"""What a memory cap forces, whatever the schedule: earlier waits and later launches, for the bounds to use.

At spine node q some bytes are alive in every schedule. A reduce-scatter whose input does not fit beside them must have been waited
for before q: until then its gradient, or the buffer that holds it, is alive. A gather whose output does not fit beside them cannot
have been launched before q, unless it is needed by then.
"""

from dataclasses import replace

import numpy as np

from apsched.config import Caps
from apsched.solver.arrays.problem_arrays import ALL_GATHER, REDUCE_SCATTER, Compact
from apsched.solver.bounds.step_time import least_live_bytes


def tighten(compact: Compact, caps: Caps) -> Compact:
    """Return ``compact`` with the ready and need gaps that the user's plan and the memory cap force."""
    compact = replace(compact, need_gap=np.minimum(compact.need_gap, compact.wait_last))
    if caps.memory_cap_bytes is None or not len(compact.kind):
        return compact
    free = caps.memory_cap_bytes - least_live_bytes(compact)  # at each spine node
    num_spine = len(compact.spine_ticks)
    ready, need = compact.ready_gap.copy(), compact.need_gap.copy()
    for c in range(len(compact.kind)):
        if compact.on_path[c]:
            continue
        if compact.kind[c] == REDUCE_SCATTER and compact.need_gap[c] == num_spine and holds_input(compact, c):
            short = np.nonzero(free[ready[c] : num_spine] + _counted(compact, c, ready[c], num_spine) < compact.input_bytes[c])[0]
            if len(short):
                need[c] = ready[c] + short[0]
        elif compact.kind[c] == ALL_GATHER and compact.need_gap[c] < num_spine and holds_output(compact, c):
            short = np.nonzero(free[ready[c] : need[c]] < compact.output_bytes[c])[0]
            if len(short):
                ready[c] += short[-1] + 1
    return replace(compact, ready_gap=ready, need_gap=need)


def holds_output(compact: Compact, c: int) -> bool:
    """Whether the output of gather ``c`` is alive until its need: not where only another collective reads it."""
    s = int(compact.output_storage[c])
    return s >= 0 and int(compact.storage_last_spine[s]) >= int(compact.need_gap[c])


def holds_input(compact: Compact, c: int) -> bool:
    """Whether the input of ``c`` is alive until its wait."""
    s = int(compact.input_storage[c])
    return s >= 0 and int(compact.float_of_wait[c]) in compact.touch_list[compact.touch_begin[s] : compact.touch_begin[s + 1]]


def _counted(compact: Compact, c: int, first: int, past: int) -> np.ndarray:
    """Return the bytes of the input of ``c`` that are counted as alive at spine nodes [first, past) anyway."""
    s = int(compact.input_storage[c])
    counted = np.zeros(past - first, dtype=np.int64)
    counted[: max(int(compact.storage_last_spine[s]) + 1 - first, 0)] = compact.storage_bytes[s]
    return counted
