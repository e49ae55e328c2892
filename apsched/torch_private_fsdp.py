"""Private attributes of torch's ``fully_shard``: which modules share a unit, and how many groups of parameters a unit has."""

from typing import Any


def fsdp_unit_of(module: Any) -> tuple[int, int]:
    """Return what tells the unit of an ``FSDPModule`` apart from others, and how many groups its parameters are gathered in.

    ``fully_shard([a, b])`` makes one unit of two modules: they share one state
    (torch/distributed/fsdp/_fully_shard/_fully_shard.py, FSDPModule._get_fsdp_state; _fsdp_state.py, FSDPState._fsdp_param_groups).
    """
    state = module._get_fsdp_state()
    return id(state), len(state._fsdp_param_groups)
