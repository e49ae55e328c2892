"""A fault of gloo that ends processes, and the way around it.

``_c10d_functional.all_gather_into_tensor`` on CPU tensors becomes ``AsyncAllgatherCoalescedWork``
(torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, torch 2.13). With several of them under way it
now and then writes to freed memory: ``tests/workers/graphs/gathers_worker.py`` without this module
ends with a signal within seconds on a busy machine. ``_allgather_base``, which the form with
``out`` uses, does not.
"""

from functools import cache
from typing import Any

import torch


@cache
def avoid_coalesced_gathers() -> Any:
    """Let gathers of CPU tensors use ``_allgather_base`` in this process, from now on; the results
    are the same. Returns the ``torch.library.Library`` that holds the two kernels.
    """
    library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("all_gather_into_tensor", _gather, "CPU")
    library.impl("all_gather_into_tensor_coalesced", _gathers, "CPU")
    return library


def _gather(shard: torch.Tensor, group_size: int, group: Any) -> torch.Tensor:
    out = shard.new_empty((shard.shape[0] * group_size, *shard.shape[1:]))
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    sent, received = shard.contiguous(), out
    if shard.is_complex():  # as torch's own kernel does: gloo has no type of complex numbers
        sent, received = torch.view_as_real(sent), torch.view_as_real(out)
    gather(sent, group_size, group, out=received)
    return out


def _gathers(shards: list[torch.Tensor], group_size: int, group: Any) -> list[torch.Tensor]:
    return [_gather(shard, group_size, group) for shard in shards]
