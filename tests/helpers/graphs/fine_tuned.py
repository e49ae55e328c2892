"""Models of which a part is trained, under ``fully_shard``: adapters, or a head."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.helpers.graphs.unit_layouts import Language


class Adapted(nn.Module):
    """A frozen layer, and beside it two small trained ones in float32 (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.inner = nn.Linear(base.in_features, 4, bias=False)
        self.outer = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.base(x)
        return whole + self.outer(self.inner(x.float())).to(whole.dtype)


def adapted() -> nn.Module:
    """Return a frozen model in bfloat16 with float32 adapters: FSDP2 gathers both as bytes."""
    torch.manual_seed(0)
    model = Language().to(torch.bfloat16).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
        fully_shard(block)
    return fully_shard(model)


def trained_head(*, kept: bool = True) -> nn.Module:
    """Return a frozen model whose head alone is trained: backward reads no parameter."""
    torch.manual_seed(0)
    model = Language().requires_grad_(False)
    model.head.requires_grad_(True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.head, reshard_after_forward=not kept)
    return fully_shard(model)


FINE_TUNED = {"float32 adapters of bfloat16 weights": adapted, "a trained head": trained_head}
