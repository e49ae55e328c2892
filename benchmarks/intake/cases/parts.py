"""Modules with collectives of which the features are made."""

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, TOKENS, WORLD = 32, 16, 2

functional: Any = import_module("torch.distributed._functional_collectives")
"""Collectives as functions, whose types say less than they take."""


def train_flex_attention_on_cpu() -> None:
    """Let ``flex_attention`` be differentiated on a CPU, in this process: torch refuses that, as it
    has no compiled kernel there, but traces and runs the dense form.
    """
    module: Any = import_module("torch.nn.attention.flex_attention")
    module._validate_device = lambda query, key, value: None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(shard, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter_tensor(gradient, "sum", 0, dist.group.WORLD)


def gathered(shard: torch.Tensor) -> torch.Tensor:
    """Return the whole of a shard; its gradient is reduce-scattered."""
    whole: torch.Tensor = _Gather.apply(shard)
    return whole


class ShardedLinear(nn.Module):
    """A linear layer whose weight is gathered when it is used."""

    def __init__(self, inner: int = WIDTH, outer: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer // WORLD, inner) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return F.linear(x, gathered(self.weight))


class Block(nn.Module):
    """Two sharded layers around a nonlinearity, and ``between``."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = ShardedLinear(WIDTH, 2 * WIDTH), ShardedLinear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.between = between or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual sum."""
        return x + self.down(self.between(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """An embedding, blocks and an output."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or (Block(), Block()))
        self.head = ShardedLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def activations(batch: int = 2) -> torch.Tensor:
    """Return random inputs of the model."""
    return torch.randn(batch, TOKENS, WIDTH)
