"""Training under eager ``fully_shard``, with gradients summed as graphs do it: hashes of the
weights, and of what is reduced.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor


def digest(shards: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of the bits of all weights, in order of registration."""
    result = hashlib.sha256()
    for name, shard in shards.items():
        result.update(
            name.encode() + shard.detach().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return result.hexdigest()


def shards_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> what this process rank has of each parameter; the name as it was before it was
    parametrized.
    """
    return {
        re.sub(r"parametrizations\.(\w+)\.original", r"\1", n): p.detach().to_local()
        if isinstance(p, DTensor)
        else p.detach()
        for n, p in module.named_parameters()
    }


def bits(tensor: torch.Tensor) -> str:
    """Return a hash of the bits of a tensor."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


@torch.no_grad()
def descended(module: nn.Module, rate: float) -> None:
    """Take one step against the gradients, which are dropped."""
    for parameter in module.parameters():
        parameter.to_local().sub_(parameter.grad.to_local(), alpha=rate)
        parameter.grad = None


def fully_sharded(model: nn.Module, blocks: Iterable[nn.Module]) -> nn.Module:
    """Put ``fully_shard`` on each block and on ``model``; gradients are summed, not averaged."""
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    for unit in units_of(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def units_of(model: nn.Module) -> list[FSDPModule]:
    """Return what ``fully_shard`` was called on."""
    return [child for child in model.modules() if isinstance(child, FSDPModule)]


def trained_eagerly(
    model: nn.Module, inputs: tuple[Any, ...], num_steps: int, rate: float
) -> tuple[list[str], list[str]]:
    """Return the hash of the weights after each step, and of the buffers that the first step
    reduces.
    """
    found: list[str] = []
    sent: list[str] = []

    class Watched(DefaultReduceScatter):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if not found:
                sent.append(bits(input_tensor))
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)

    for unit in units_of(model):
        unit.set_custom_reduce_scatter(Watched())
    for _ in range(num_steps):
        model(*inputs).backward()
        descended(model, rate)
        found.append(digest(shards_of(model)))
    return found, sent
