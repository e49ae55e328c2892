"""Modules with DTensor weights on a mesh of two axes, and gathers by hand: what the passes are
tried on.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from apsched.models.collectives import exchange_tokens, gather_shards
from apsched.models.mesh import Group, group_of
from apsched.torch_compat.graphs import strided_shard

ROWS, WIDTH = 16, 8
F32 = torch.float32


def values(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers that depend on nothing but ``seed``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Redistributed(nn.Module):
    """``x @ w`` with a DTensor weight that DTensor gathers: tp first, or with ``columns`` dp first,
    as FSDP2 with TP has it.
    """

    def __init__(self, mesh: DeviceMesh, *, columns: bool) -> None:
        super().__init__()
        whole = values(0, ROWS, WIDTH)
        dp, tp = (group_of(mesh, axis) for axis in ("dp", "tp"))
        outer, inner = (tp, dp) if columns else (dp, tp)
        local = whole.chunk(outer.size)[outer.rank].chunk(inner.size)[inner.rank].clone()
        first = strided_shard(0, mesh.size(1)) if columns else Shard(0)
        self.weight = nn.Parameter(
            DTensor.from_local(
                local,
                mesh,
                (first, Shard(0)),
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.weight.redistribute(placements=(Replicate(), Replicate()))
        return (x @ whole.to_local(grad_placements=(Partial(), Partial())).t()).relu().sum()


class ByHand(nn.Module):
    """Gathers over one axis, then the other, with ``between`` in the middle."""

    def __init__(self, mesh: DeviceMesh, axes: tuple[str, str], between: Any) -> None:
        super().__init__()
        self.groups: tuple[Group, Group] = tuple(group_of(mesh, axis) for axis in axes)  # type: ignore[assignment]
        self.between = between
        rank = torch.distributed.get_rank()
        self.weight = nn.Parameter(values(1 + rank, ROWS // mesh.size(), WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = gather_shards(self.weight, self.groups[0], F32, F32)
        result = x @ gather_shards(self.between(first), self.groups[1], F32, F32).t()
        return (
            result.relu().sum()
            if self.between is not also_used
            else (result.relu() + first.sum()).sum()
        )


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x


def cancelling(x: torch.Tensor) -> torch.Tensor:
    """There and back: permutes around a copy, and a view in another shape."""
    return (
        x.t()
        .contiguous()
        .t()
        .contiguous()
        .view(-1, 2, WIDTH)
        .transpose(0, 2)
        .transpose(0, 2)
        .reshape(x.shape)
    )


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rows the other way round, as far as shapes go the same: what a check of shapes and strides
    alone would let pass.
    """
    return x.view(2, -1, WIDTH).transpose(0, 1).contiguous().view(x.shape)


def cast(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(F32)


def also_used(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape)


class ReadTwice(nn.Module):
    """A weight that is gathered wherever it is read, as SimpleFSDP and DTensor do it: two gathers,
    two gradients that are added.
    """

    def __init__(self, group: Group, seed: int) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(values(seed + group.rank, WIDTH // group.size, WIDTH).round())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ gather_shards(self.weight, self.group, F32, F32).t()).relu()
        return (x @ gather_shards(self.weight, self.group, F32, F32).t()).sum()


class ThereAndBack(nn.Module):
    """A sharded activation that is gathered for one consumer, and cut to its own part again for
    another.
    """

    def __init__(self, mesh: DeviceMesh, *, whole_too: bool) -> None:
        super().__init__()
        self.mesh, self.whole_too = mesh, whole_too
        self.scale = nn.Parameter(values(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local = DTensor.from_local(x * self.scale, self.mesh, (Shard(0),), run_check=False)
        whole = torch.ops.aten.alias.default(local.redistribute(placements=(Replicate(),)))
        own = whole.redistribute(placements=(Shard(0),)).to_local()
        result = (own * 3).relu().sum()
        return result + whole.to_local().sum() if self.whole_too else result


class Exchanged(nn.Module):
    """Tokens that go to other process ranks and straight back: an expert layer without experts."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.scale = nn.Parameter(values(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            (exchange_tokens(exchange_tokens(x * self.scale, self.group), self.group) * 2)
            .relu()
            .sum()
        )
