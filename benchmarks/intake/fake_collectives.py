"""Collectives of one process that computes the payloads of every other process rank.

The values of the other process ranks are taken to be this one's, times a number of their own. So
the output of a collective depends on each element of its input and on its place, as it does in a
job; a bucket that mixes up payloads or process ranks gives other bits. Integers are not scaled,
since they may be indices or sizes.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

_LIBRARIES: list[Any] = []


def install() -> None:
    """Give the functional collectives of this process kernels that communicate with no other."""
    make: Any = torch.library.Library
    library = make("_c10d_functional", "IMPL")
    _LIBRARIES.append(library)
    kernels = {
        "all_gather_into_tensor": _all_gather,
        "all_gather_into_tensor_coalesced": _all_gather_coalesced,
        "all_gather_into_tensor_out": _all_gather_out,
        "reduce_scatter_tensor": _reduce_scatter,
        "reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
        "reduce_scatter_tensor_out": _reduce_scatter_out,
        "all_reduce": _all_reduce,
        "all_reduce_": _all_reduce_in_place,
        "all_reduce_coalesced": _all_reduce_coalesced,
        "all_reduce_coalesced_": _all_reduce_coalesced_in_place,
        "all_to_all_single": _all_to_all,
        "broadcast": lambda x, source, group: x.clone(),
        "broadcast_": lambda x, source, group: x,
        "wait_tensor": lambda x: x,
    }
    for name, kernel in kernels.items():
        if hasattr(torch.ops._c10d_functional, name):
            library.impl(name, kernel, "CPU", allow_override=True)
    fused = make("symm_mem", "IMPL")
    _LIBRARIES.append(fused)
    fused.impl("fused_all_gather_matmul", _all_gather_matmul, "CPU")
    fused.impl("fused_matmul_reduce_scatter", _matmul_reduce_scatter, "CPU")


def _of_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the value of ``x`` on process rank ``rank`` of the group."""
    return x * (1 + rank / 8) if x.is_floating_point() or x.is_complex() else x.clone()


def _all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return torch.cat([_of_rank(x, rank) for rank in range(size)])


def _all_gather_out(x: torch.Tensor, size: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_all_gather(x, size, group))


def _all_gather_coalesced(
    inputs: Sequence[torch.Tensor], size: int, group: str
) -> list[torch.Tensor]:
    return [_all_gather(x, size, group) for x in inputs]


def _reduce_scatter(x: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    """Return a sum that every part of the input enters with a weight of its own."""
    parts = x.chunk(size)
    total = _of_rank(parts[0], 0)
    for rank in range(1, size):
        total = total + _of_rank(parts[rank], rank)
    return total


def _reduce_scatter_out(
    x: torch.Tensor, op: str, size: int, group: str, *, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(_reduce_scatter(x, op, size, group))


def _reduce_scatter_coalesced(
    inputs: Sequence[torch.Tensor], op: str, size: int, group: str
) -> list[torch.Tensor]:
    return [_reduce_scatter(x, op, size, group) for x in inputs]


def _all_gather_matmul(
    x: torch.Tensor,
    others: Sequence[torch.Tensor],
    dim: int,
    group: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    parts = [_of_rank(x, rank) for rank in range(_size(group))]
    whole = torch.cat(parts, dim)
    return whole if return_A else None, [whole @ other for other in others]


def _matmul_reduce_scatter(
    x: torch.Tensor, other: torch.Tensor, op: str, dim: int, group: str
) -> torch.Tensor:
    whole = (x @ other).movedim(dim, 0)
    return _reduce_scatter(whole, op, _size(group), group).movedim(0, dim).contiguous()


def _size(group: str) -> int:
    resolve: Any = import_module("torch.distributed.distributed_c10d")._resolve_process_group
    size: int = resolve(group).size()
    return size


def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return x + _of_rank(x, 1) if op in ("sum", "avg") else x.clone()


def _all_reduce_in_place(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return x.copy_(_all_reduce(x, op, group))


def _all_reduce_coalesced(
    inputs: Sequence[torch.Tensor], op: str, group: str
) -> list[torch.Tensor]:
    return [_all_reduce(x, op, group) for x in inputs]


def _all_reduce_coalesced_in_place(
    inputs: Sequence[torch.Tensor], op: str, group: str
) -> list[torch.Tensor]:
    return [_all_reduce_in_place(x, op, group) for x in inputs]


def _all_to_all(
    x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: str
) -> torch.Tensor:
    """Return one part for each process rank: the rows that this one sends to it, as scaled for that
    rank, cut or repeated to the number of rows to receive.
    """
    if len(sent) == 0:  # even splits
        return x.clone()
    parts = []
    for rank, (part, rows) in enumerate(zip(torch.split(x, list(sent)), received, strict=True)):
        if rows == part.shape[0]:
            parts.append(_of_rank(part, rank))
        elif part.shape[0] == 0:
            parts.append(x.new_zeros((rows, *x.shape[1:])))
        else:
            index = torch.arange(rows) % part.shape[0]
            parts.append(_of_rank(part[index], rank))
    return torch.cat(parts)
