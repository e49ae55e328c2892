"""Small models whose sizes depend on data: experts on all process ranks, and rows that a mask
keeps.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.helpers.graphs.small_models import WIDTH


class Experts(nn.Module):
    """One expert for each process rank; each row goes to the expert that the router chooses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.num_ranks = group, group.size()
        self.router = nn.Linear(WIDTH, self.num_ranks)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def splits(self, choice: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the rows for each process rank, and those from each."""
        counts = (choice.unsqueeze(-1) == torch.arange(self.num_ranks)).sum(0)
        theirs = functional.all_to_all_single(counts, None, None, self.group)
        return counts.tolist(), theirs.tolist()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, choice = self.router(x).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        sent, received = self.splits(choice)
        for size in (*sent, *received):
            torch._check(size >= 0)
        exchange = functional.all_to_all_single_autograd
        mine = exchange(x[order], received, sent, self.group)
        done = exchange(self.down(torch.relu(self.up(mine))), sent, received, self.group)
        return x + torch.zeros_like(x).index_add(0, order, done * gate[order].unsqueeze(-1))


class Masked(nn.Module):
    """A layer for the rows with a positive sum, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.all = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
        return self.all(x).index_add(0, rows, self.some(x[rows]) + x.mean(0))


def env_of(module: torch.fx.GraphModule) -> ShapeEnv:
    """Return the ShapeEnv of the symbols in a graph."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    sizes = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    return next(size.node.shape_env for size in sizes if isinstance(size, torch.SymInt))


def knowledge_of(env: ShapeEnv) -> tuple[str, ...]:
    """Return what a ShapeEnv has learned of its symbols: guards, assertions, bounds."""
    assertions = [a.expr for some in env.deferred_runtime_asserts.values() for a in some]
    known = (env.guards, assertions, env.var_to_range, env.replacements, env.var_to_hint_override)
    return tuple(map(repr, known))
