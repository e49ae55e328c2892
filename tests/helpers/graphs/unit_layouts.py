"""A small language model, and the layouts of units that ``fully_shard`` makes of it."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Two linear layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Scale(nn.Module):
    """Pointwise alone: a compiler computes it again in backward, eager torch does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Shared(nn.Module):
    """Logits are products with the embedding, which the model reads outside of its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(65, 32), Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.block(self.embedding(tokens)), self.embedding.weight)


def shared() -> nn.Module:
    """Return such a model, whose embedding stays gathered."""
    torch.manual_seed(0)
    model = Shared()
    fully_shard(model.embedding, reshard_after_forward=False)
    fully_shard(model.block)
    return fully_shard(model)


class Positions(nn.Module):
    """The sum of embeddings of tokens and of their places; its backward reads no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(65, 32), nn.Embedding(8, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[-1]))


class Recomputed(nn.Module):
    """Checkpointed: recomputation reads the embeddings, as its first nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = Positions(), Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(checkpoint(self.embedding, tokens, use_reentrant=False))


def recomputed() -> nn.Module:
    """Return such a model, whose embeddings are a unit."""
    torch.manual_seed(0)
    model = Recomputed()
    for unit in (model.embedding, model.block):
        fully_shard(unit)
    return fully_shard(model)


class Language(nn.Module):
    """An embedding, blocks that run in ``order``, and a head, which may be tied."""

    def __init__(
        self,
        order: Sequence[int] = (0, 1, 2),
        *,
        tied: bool = False,
        checkpointed: bool = False,
        layerdrop: float | None = None,
        block: Callable[[], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.order, self.checkpointed, self.layerdrop = order, checkpointed, layerdrop
        self.embedding = nn.Embedding(65, 32)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(32, 65, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for k in self.order:
            if self.layerdrop is not None and torch.rand([]) < self.layerdrop:
                continue
            block = self.blocks[k]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


Units = Sequence[nn.Module | list[nn.Module]]


def blocks(model: Language) -> Units:
    """Return the units of a model whose root has all but the blocks."""
    return list(model.blocks)


def layout(
    units: Callable[[Language], Units] = blocks,
    *,
    tied: bool = False,
    order: Sequence[int] = (0, 1, 2),
    reshard: bool = True,
    checkpointed: bool = False,
    frozen: bool = False,
    layerdrop: float | None = None,
    normalised: bool = False,
    block: Callable[[], nn.Module] = Block,
) -> Callable[[], nn.Module]:
    """Return a function that builds the model with these units, and the root as the last;
    ``frozen``: its embedding has no gradient, so that the first block has no gradient of its input;
    ``normalised``: the first weight of each block is a length and a direction.
    """

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Language(
            order, tied=tied, checkpointed=checkpointed, layerdrop=layerdrop, block=block
        )
        model.embedding.requires_grad_(not frozen)
        for one in model.blocks if normalised else ():
            weight_norm(one.up)
        for unit in units(model):
            fully_shard(unit, reshard_after_forward=reshard)
        return fully_shard(model, reshard_after_forward=reshard)

    return build


LAYOUTS = {
    "tied in the root": layout(tied=True),
    "tied in a unit": layout(lambda m: [[m.embedding, m.head], *m.blocks], tied=True),
    "units in units": layout(lambda m: [part for b in m.blocks for part in (b.up, b)]),
    "a unit that does not run": layout(order=(0, 2)),
    "a block of the root that runs twice": layout(lambda m: list(m.blocks[1:]), order=(0, 1, 0, 2)),
    "blocks that run again in backward": layout(checkpointed=True),
    "a first unit that runs again in backward": layout(
        lambda m: [part for b in m.blocks for part in (b.up, b)], checkpointed=True, frozen=True
    ),
    "blocks with a LayerDrop of 0": layout(layerdrop=0.0),
    "pointwise blocks": layout(block=Scale),
    "an embedding read by the root": shared,
    "embeddings that run again in backward": recomputed,
    "weights made of two parameters": layout(normalised=True),
    "every part a unit, kept": layout(lambda m: [m.embedding, *m.blocks, m.head], reshard=False),
}
