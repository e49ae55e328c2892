"""Blocks with experts on two expert-parallel process ranks under ``fully_shard``: other parameters
are sharded over all process ranks, experts over those that have the same.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard, distribute_tensor

WIDTH, VOCABULARY, NUM_BLOCKS, NUM_EXPERTS = 16, 64, 2, 2
AS_UNITS, SEVERAL_MESHES = "experts as units", "two meshes in one unit"


class Experts(nn.Module):
    """The expert of this process rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        whole = [torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / WIDTH for _ in range(2)]
        self.up, self.down = (nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (weight.to_local()[0] for weight in (self.up, self.down))
        return torch.tanh(x @ up) @ down


class Routed(nn.Module):
    """Sends each token to one expert; the numbers of tokens depend on data."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts, self.mesh = Experts(mesh), mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        score, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = torch.stack([(expert == e).sum() for e in range(NUM_EXPERTS)])
        others = funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, self.mesh))
        sent, received = counts.tolist(), others.tolist()
        rows = funcol.all_to_all_single_autograd(tokens[order], received, sent, self.mesh)
        back = funcol.all_to_all_single_autograd(self.experts(rows), sent, received, self.mesh)
        found = torch.zeros_like(tokens).index_put((order,), back * score[order, None])
        return found.view_as(x)


class Block(nn.Module):
    """Two residual layers."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)
        self.routed = Routed(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.dense(x))
        return x + self.routed(self.norm(x))


class Model(nn.Module):
    """A model of tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ways() -> list[str]:
    """Return the ways to shard the experts that this torch has."""
    several = hasattr(_fsdp_common, "ShardPlacementResult")
    return [AS_UNITS, SEVERAL_MESHES] if several else [AS_UNITS]


def built(way: str) -> nn.Module:
    """Return the model on all process ranks, two of which share the experts."""
    size = torch.distributed.get_world_size()
    data = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(0)
    model = Model(mesh["ep"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if way == AS_UNITS:
            fully_shard(block.routed.experts, mesh=mesh["edp"], mp_policy=policy)
            fully_shard(block, mesh=data, mp_policy=policy)
        else:
            places = _places(block.routed.experts, data, mesh["edp"])
            fully_shard(block, mesh=data, mp_policy=policy, shard_placement_fn=places)
    return fully_shard(model, mesh=data, mp_policy=policy)


def _places(experts: nn.Module, data: DeviceMesh, same_experts: DeviceMesh) -> Any:
    """Return the mesh of each parameter, as TorchTitan chooses it."""
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    own = set(experts.parameters())
    of_experts, of_others = (_get_mesh_info(mesh, None) for mesh in (same_experts, data))

    def place(parameter: nn.Parameter) -> Any:
        mesh_info = of_experts if parameter in own else of_others
        return _fsdp_common.ShardPlacementResult(placement=Shard(0), mesh_info=mesh_info)

    return place
