"""Arrays of :class:`ProblemArrays` for a few collectives out of many, renumbered."""

from typing import Any

import numpy as np

from apsched.solver.arrays.partition import Partition
from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays

PER_COLLECTIVE = (
    "kind",
    "key",
    "stream",
    "size_bytes",
    "input_bytes",
    "output_bytes",
    "copied_bytes",
    "bucket_launch_ticks",
    "copy_out_ticks",
    "coalesces",
    "member_ticks",
    "on_path",
    "start_rank",
    "group",
    "closed",
)
GAPS = ("ready_slot", "need_slot", "launch_last", "wait_first", "wait_last")
"""The allowed places of a collective."""


def attached_of(arrays: ProblemArrays, free: tuple[int, ...]) -> list[int]:
    """Return the attached nodes of ``free`` in the order that the small problem numbers them."""
    result: list[int] = []
    for c in free:
        result += arrays.prologue_of(c).tolist()
        result += [int(arrays.attached_of_start[c]), int(arrays.attached_of_wait[c])]
        result += arrays.epilogue_of(c).tolist()
    return result


def float_arrays(
    arrays: ProblemArrays, free: tuple[int, ...], num_collectives: int
) -> dict[str, Any]:
    """Return the arrays over attached nodes of the small problem; a pinned collective has a start
    and a wait of no work.
    """
    attached = attached_of(arrays, free)
    index = {f: j for j, f in enumerate(attached)}
    prologues = [[index[int(f)] for f in arrays.prologue_of(c)] for c in free]
    epilogues = [[index[int(f)] for f in arrays.epilogue_of(c)] for c in free]
    starts, waits = (
        [index[int(arrays.attached_of_start[c])] for c in free],
        [index[int(arrays.attached_of_wait[c])] for c in free],
    )
    ticks = arrays.attached_ticks[attached].tolist()
    casts = [index.get(int(arrays.cast_attached[c]), -1) for c in free] + [-1] * (
        num_collectives - len(free)
    )
    for _ in range(num_collectives - len(free)):
        starts.append(len(ticks))
        waits.append(len(ticks) + 1)
        ticks += [0, 0]
        prologues.append([])
        epilogues.append([])
    owner = [-1] * len(ticks)
    for c, f in enumerate(waits):
        owner[f] = c
    return {
        "attached_ticks": np.array(ticks, dtype=np.int64),
        "attached_of_start": np.array(starts, dtype=np.int64),
        "attached_of_wait": np.array(waits, dtype=np.int64),
        "collective_of_wait": np.array(owner, dtype=np.int64),
        "prologue_begin": begins(prologues),
        "prologue_list": np.array([f for fs in prologues for f in fs], dtype=np.int64),
        "cast_attached": np.array(casts, dtype=np.int64),
        "epilogue_begin": begins(epilogues),
        "epilogue_list": np.array([f for fs in epilogues for f in fs], dtype=np.int64),
    }


def begins(lists: list[list[int]]) -> Ints:
    begin = np.zeros(len(lists) + 1, dtype=np.int64)
    begin[1:] = np.cumsum([len(values) for values in lists])
    return begin


def forms_of(partition: Partition, free: tuple[int, ...], size: int) -> Bools:
    """Return which of the ``size`` collectives of the small problem, ``free`` first, are in a
    coalesced bucket.
    """
    coalesced = np.zeros(size, dtype=np.bool_)
    coalesced[: len(free)] = partition.coalesced[partition.bucket_of[list(free)]]
    return coalesced


def forms_with(partition: Partition, free: tuple[int, ...], small: Partition) -> Bools:
    """Return which collectives are in a coalesced bucket where ``free`` are in the buckets of
    ``small``.
    """
    coalesced = partition.coalesced[partition.bucket_of]
    coalesced[list(free)] = small.coalesced[small.bucket_of[: len(free)]]
    return coalesced
