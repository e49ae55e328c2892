"""Collectives in a trace: the metadata of NCCL's kernels, and the operator of each gloo transfer.
No torch here.

Kineto copies the arguments of ``record_param_comms`` to the kernels that it launched; older
versions leave them with the operator (torch/csrc/profiler/util.cpp, saveNcclMeta; names of
collectives: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from apsched.calibrate.profile.trace import HostOp, Trace, Work
from apsched.kinds import CollectiveKind

_NCCL = "nccl"
KIND_OF_NAME = {
    "_allgather_base": CollectiveKind.ALL_GATHER,
    "allgather": CollectiveKind.ALL_GATHER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "allgather_coalesced": CollectiveKind.ALL_GATHER,
    "allgather_into_tensor_coalesced": CollectiveKind.ALL_GATHER,
    "_reduce_scatter_base": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": CollectiveKind.REDUCE_SCATTER,
    "allreduce": CollectiveKind.ALL_REDUCE,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "allreduce_coalesced": CollectiveKind.ALL_REDUCE,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "all_to_allv": CollectiveKind.ALL_TO_ALL,
    "alltoall_base": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.ALL_GATHER,  # priced as an all-gather of its size
}
# c10::toString of a ScalarType, as "dtype" has it
_ITEM_BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "Short": 2,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The transfer of one NCCL kernel."""

    kind: CollectiveKind
    size_bytes: int
    """Counted once."""
    ranks: tuple[int, ...]
    """Process ranks of the group; if the trace has none, as many from 0 on."""


def is_nccl(kernel: Work) -> bool:
    """Whether ``kernel`` is one of NCCL's (or RCCL's)."""
    return kernel.name.startswith((_NCCL, "rccl")) or "Collective name" in kernel.args


def message_of(kernel: Work, launched_by: HostOp | None) -> Message | None:
    """Return the transfer of an NCCL kernel; ``None`` if the trace has no metadata, or the kernel
    needs no price (barriers, point to point).
    """
    args = (
        kernel.args
        if "Collective name" in kernel.args
        else launched_by.args
        if launched_by is not None
        else {}
    )
    kind = KIND_OF_NAME.get(str(args.get("Collective name", "")).lower())
    item_bytes = _ITEM_BYTES.get(str(args.get("dtype", "")))
    counts = _whole(args.get("In msg nelems")), _whole(args.get("Out msg nelems"))
    num_ranks = _whole(args.get("Group size"))
    if kind is None or item_bytes is None or None in counts or not num_ranks:
        return None
    sent, received = counts
    size_bytes = item_bytes * ((received if kind == CollectiveKind.ALL_GATHER else sent) or 0)
    return (
        Message(kind=kind, size_bytes=size_bytes, ranks=_ranks(args, num_ranks))
        if size_bytes
        else None
    )


def gloo_transfers(trace: Trace, ops: Iterable[int]) -> dict[int, Work]:
    """Return for each operator among ``ops`` that starts a collective the transfer of gloo that it
    caused.

    gloo runs its operators in order, so the transfer is the first one with the same input that no
    earlier operator caused; the message of a transfer is the input that its annotation shows.
    """
    waiting: dict[int, list[Work]] = {}
    for work in reversed(trace.gloo):
        waiting.setdefault(_numel(work.args), []).append(work)
    found = {}
    for index in ops:
        op = trace.ops[index]
        queue = waiting.get(_numel(op.args), [])
        while queue and queue[-1].begin_us < op.begin_us:
            queue.pop()
        if queue:
            found[index] = queue.pop()
    return found


def _numel(args: Mapping[str, Any]) -> int:
    """Return the elements of the first input (all of a list)."""
    shapes = args.get("Input Dims") or [[]]
    first = shapes[0]
    return sum(map(math.prod, first)) if first and isinstance(first[0], list) else math.prod(first)


def _ranks(args: Mapping[str, Any], num_ranks: int) -> tuple[int, ...]:
    """Return ``Process Group Ranks``: a list, or its text, of which the profiler keeps the first
    30; a long one goes on as it begins.

    If the trace has no ranks, as many from 0 on.
    """
    stated = args.get("Process Group Ranks")
    if isinstance(stated, str):
        stated = [int(part) for part in stated.strip("[] ").split(",") if part.strip().isdigit()]
    if not isinstance(stated, list) or not stated or not all(type(rank) is int for rank in stated):
        return tuple(range(num_ranks))
    if len(stated) < num_ranks:
        stride = stated[1] - stated[0] if len(stated) > 1 else 1
        stated = [
            *stated,
            *(stated[-1] + stride * k for k in range(1, 1 + num_ranks - len(stated))),
        ]
    return tuple(stated[:num_ranks])


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
