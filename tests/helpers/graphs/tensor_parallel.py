"""Transformer blocks under tensor parallelism and ``fully_shard``, as trainers set them up."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, VOCABULARY, NUM_BLOCKS = 16, 64, 2
PLANS = ("whole activations", "sequences in parts")


class Attention(nn.Module):
    """Causal attention of two heads, of which a process rank has one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    """A causal model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def built(plan: str, replicas: int = 1, *, ends_are_one: bool = False) -> nn.Module:
    """Return the model on a mesh of half of the process ranks, in ``replicas``, and two for tensor
    parallelism; with ``sequences in parts`` the activations between layers are sharded by tokens.
    With ``ends_are_one`` embedding and head are in one unit.
    """
    size = torch.distributed.get_world_size()
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", (replicas, size // 2 // replicas, 2), mesh_dim_names=names)
    data = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
    torch.manual_seed(0)
    model = Model()
    in_parts = plan == "sequences in parts"
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], _of_block(in_parts=in_parts))
    if in_parts:
        parallelize_module(model, mesh["tp"], _of_ends())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=data, mp_policy=policy)
    if ends_are_one:
        fully_shard([model.embedding, model.norm, model.head], mesh=data, mp_policy=policy)
    return fully_shard(model, mesh=data, mp_policy=policy)


def tied_again() -> nn.Module:
    """Return the model with embedding and head tied as TorchTitan does it: ``parallelize_module``
    makes two parameters of them, and FSDP2 gathers both, which are one from the first step on.
    """
    model = built(PLANS[1], ends_are_one=True)
    model.embedding.weight = model.head.weight
    return model


def _of_block(*, in_parts: bool) -> dict[str, ParallelStyle]:
    linear: dict[str, ParallelStyle] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.o": RowwiseParallel(output_layouts=Shard(1) if in_parts else Replicate()),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=Shard(1) if in_parts else Replicate()),
    }
    if not in_parts:
        return linear
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "before": SequenceParallel(),
        "between": SequenceParallel(),
        "attention": whole,
        "mlp": whole,
        **linear,
    }


def _of_ends() -> dict[str, ParallelStyle]:
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
