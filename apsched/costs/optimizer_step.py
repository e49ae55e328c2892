"""The state of an optimizer, and the time of its step behind backward.

A fused step (``fused=True``, torch/optim/adamw.py) streams every tensor through memory once:

    t = (2 P + G + 2 S) / (memory bandwidth * efficiency)

with P the bytes of the shards of parameters, which it reads and writes, G those of their gradients,
which it reads and which are as large, and S those of the state, which it reads and writes.
"""

from dataclasses import dataclass

from apsched.config import OPTIMIZERS
from apsched.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The parameters of one process rank."""

    size_bytes: int
    bf16_bytes: int
    """Their bytes, if each were bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedOptimizer:
    """Optimizers of a job, which hold parameters and state of known sizes
    (:mod:`apsched.costs.optimizer_state`).
    """

    name: str
    parameter_bytes: int
    """Of the shards that they update."""
    size_bytes: int
    """Of the state, whether it exists yet or not."""

    def __str__(self) -> str:
        return self.name


def state_bytes(optimizer: str | CountedOptimizer, shards: Shards) -> int:
    """Return the bytes of the state; ``InputError`` if there is no such optimizer."""
    match optimizer:
        case CountedOptimizer():
            return optimizer.size_bytes
        case "adamw":  # exp_avg and exp_avg_sq, of the parameter's dtype (torch.optim.AdamW)
            return 2 * shards.size_bytes
        case "adamw-bf16":
            return 2 * shards.bf16_bytes
        case "sgd":  # momentum_buffer
            return shards.size_bytes
        case "none":
            return 0
    raise InputError(f"optimizer: expected {', '.join(OPTIMIZERS)}; found {optimizer!r}")


def step_us(optimizer: str | CountedOptimizer, shards: Shards, memory_bytes_per_us: float) -> float:
    """Return the time of one step in microseconds; 0 without an optimizer, and where the bandwidth
    is 0 (not known).
    """
    state = state_bytes(optimizer, shards)
    if optimizer == "none" or not memory_bytes_per_us:
        return 0.0
    updated_bytes = shards.size_bytes
    if isinstance(optimizer, CountedOptimizer):
        updated_bytes = optimizer.parameter_bytes
    return (3 * updated_bytes + 2 * state) / memory_bytes_per_us
