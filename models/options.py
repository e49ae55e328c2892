"""Options of a preset beyond its size and mesh."""

from dataclasses import dataclass

import torch

from apsched.errors import InputError
from apsched.fx.passes.checkpointing import Checkpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Mixed precision, activation checkpointing and resharding, named as TorchTitan does."""

    param_dtype: torch.dtype = torch.bfloat16
    """Type in which parameters are gathered and used; shards are float32."""
    reduce_dtype: torch.dtype = torch.float32
    """Type in which gradients are reduced over data-parallel process ranks, whatever the form:
    FSDP, HSDP or DDP.
    """
    activation_checkpoint: str = "none"
    """``none``; ``full`` (every layer is recomputed in backward); ``every-N`` (every N-th layer);
    ``selective`` (in every layer attention, collectives, every second matrix product and the first
    residual sum are saved, the rest is recomputed).
    """
    reshard_after_forward: bool = True
    """Gather parameters again in backward; otherwise gathered parameters stay from forward to
    backward.
    """

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, field)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise InputError(f"{field} must be a floating-point torch.dtype; found {dtype!r}")
        Checkpointing.parse(self.activation_checkpoint)
