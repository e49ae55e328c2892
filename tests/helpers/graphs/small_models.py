"""Small models whose parameters are gathered when read, as a user would write them with what torch
has.
"""

import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

WIDTH = 8


class Gathered(nn.Module):
    """Reading a parameter gathers it; its gradient is reduced to the shard."""

    def forward(self, shard):
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def shard(model, mesh):
    """Make every parameter a shard that is gathered when it is read."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(
                name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            )
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    return model


class Broken(nn.Module):
    """Two parts, between which Dynamo breaks the graph."""

    def __init__(self, num_layers=2):
        super().__init__()
        self.first = layers(num_layers)
        self.second = layers(num_layers)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Block(nn.Module):
    """Registers its parameters in another order than it uses them."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))))


class Blocks(nn.Module):
    """Blocks, each a unit of FSDP2, and a first and a last layer, which are left to the root."""

    def __init__(self):
        super().__init__()
        self.output, self.input = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.input(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def layers(num_layers=2):
    """Return linear layers with a nonlinearity behind each."""
    return nn.Sequential(
        *(layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    )


class ResidualBlock(nn.Module):
    """The feed-forward part of a transformer block."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    """An embedding, blocks, an output and a loss, for FSDP2 and DDP."""

    def __init__(self, width=WIDTH, num_layers=4):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.layers = nn.ModuleList(ResidualBlock(width) for _ in range(num_layers))
        self.output = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x).float().logsumexp(-1).mean()
