"""A module that gathers its weight wherever it is read."""

import torch
from torch import nn

from apsched.models.collectives import gather_shards
from apsched.models.mesh import Group

ROWS, WIDTH = 16, 8
F32 = torch.float32


def values(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers that depend on nothing but ``seed``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
