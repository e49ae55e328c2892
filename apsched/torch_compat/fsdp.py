"""Private attributes of torch's ``fully_shard``: which modules share a unit, and how many groups of
parameters a unit has.
"""

from typing import Any

import torch

from apsched.torch_compat.version import check_torch_version

check_torch_version()


def fsdp_unit_of(module: Any) -> tuple[int, int]:
    """Return what tells the unit of an ``FSDPModule`` apart from others, and how many groups its
    parameters are gathered in.

    ``fully_shard([a, b])`` makes one unit of two modules: they share one state
    (torch/distributed/fsdp/_fully_shard/_fully_shard.py, FSDPModule._get_fsdp_state;
    _fsdp_state.py, FSDPState._fsdp_param_groups).
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one group at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return id(state), len(groups)


def has_fully_sharded_modules() -> bool:
    """Return whether ``fully_shard`` was called on a module that is alive
    (torch/distributed/_composable_state.py, _module_state_mapping).
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed import _composable_state
    from torch.distributed.fsdp import FSDPModule

    return any(
        isinstance(module, FSDPModule) for module in list(_composable_state._module_state_mapping)
    )


def runs_in_ddp() -> bool:
    """Return whether the forward of a DistributedDataParallel is running
    (torch/nn/parallel/distributed.py, _active_ddp_module).
    """
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None
