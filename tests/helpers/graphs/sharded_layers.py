"""A few sharded layers with a loss, captured on a fake world: small enough to try every choice of
what is kept.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.joint import capture_module
from apsched.costs.model import CostModel
from apsched.fx.node_shards import node_groups
from apsched.pipeline.load import LoadedGraph, loaded_graph
from apsched.progress import Progress

RANKS = 4


class ShardedLayers(nn.Module):
    """``x @ w_0 @ w_1 ...`` with parameters sharded over the rows, gathered and then cast; with
    ``replicas`` as HSDP: gradients are reduced to shards first.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        cast: torch.dtype | None = None,
        penalty: bool = False,
        ranks: int = RANKS,
        replicas: int = 1,
    ) -> None:
        super().__init__()
        copies = (replicas,) if replicas > 1 else ()
        self.mesh = init_device_mesh("cpu", (ranks, *copies))
        self.replicated = tuple(Replicate() for _ in copies)
        self.mode, self.cast, self.penalty = FakeTensorMode(), cast, penalty
        self.weights = nn.ParameterList()
        with self.mode:
            for rows, columns in pairwise(widths):
                shard = torch.empty(rows // ranks, columns)
                places = (Shard(0), *self.replicated)
                placed = DTensor.from_local(shard, self.mesh, places, run_check=False)
                self.weights.append(nn.Parameter(placed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            everywhere = (Replicate(), *self.replicated)
            whole = weight.redistribute(placements=everywhere)  # type: ignore[operator]
            local = whole.to_local(grad_placements=tuple(Partial() for _ in everywhere))
            if self.cast is not None:
                local, x = local.to(self.cast), x.to(self.cast)
            x = torch.relu(x @ local)
            if self.penalty:
                x = x + weight.to_local().square().sum()  # type: ignore[operator]
        return x.float().sum()


def captured_layers(
    widths: Sequence[int],
    *,
    tokens: int = 64,
    cast: torch.dtype | None = None,
    penalty: bool = False,
    kept: Sequence[str] = (),
    replicas: int = 1,
) -> Capture:
    """Return the graphs of layers of these widths; parameters ``kept`` by the partitioner."""
    with world(replicas * RANKS):
        module = ShardedLayers(widths, cast=cast, penalty=penalty, replicas=replicas)
        with module.mode:
            x = torch.empty(tokens, widths[0], requires_grad=True)
        return capture_module(module, (x,), source="layers", kept_parameters=kept)


class FlatPrices:
    """Matrix products by their FLOPs, other nodes a microsecond, transfers by bytes: prices that no
    fusion changes.
    """

    def __init__(self, *, bytes_per_us: float = 500.0, latency_us: float = 3.0) -> None:
        self.bytes_per_us, self.latency_us = bytes_per_us, latency_us

    def compute_us(self, node: torch.fx.Node) -> float:
        if node.target is torch.ops.aten.mm.default:
            rows, inner = node.all_input_nodes[0].meta["val"].shape
            return 1 + float(rows * inner * node.meta["val"].shape[1]) / 50_000
        return 1.0

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        return self.latency_us + size_bytes / self.bytes_per_us


class PricesInNodes(FlatPrices):
    """As :class:`FlatPrices`, and transfers of the two process ranks of a node are faster."""

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        factor = 8 if group_size < RANKS else 1
        return super().collective_us(kind, group_name, group_size, size_bytes) / factor


class SlowReplicas(FlatPrices):
    """As :class:`FlatPrices`, and transfers between replicas are slower."""

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        factor = 16 if group_size < RANKS else 1
        return super().collective_us(kind, group_name, group_size, size_bytes) * factor


def loaded_layers(
    capture: Capture, prices: CostModel | None = None, *, ranks_per_node: int = RANKS
) -> tuple[LoadedGraph, ...]:
    """Return the graphs of ``capture`` as problems."""
    return tuple(
        loaded_graph(
            graph,
            prices or FlatPrices(),
            cluster="",
            group_ranks=capture.group_ranks,
            device_memory_bytes=2**30,
            nodes=node_groups(capture.group_ranks, ranks_per_node),
            progress=Progress(quiet=True),
        )
        for graph in capture.graphs
    )
