"""One of several gloo processes that run a step whose sums of gradients come before the reductions;
writes what differs as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule

from apsched.capture.joint import capture_module
from apsched.fx.collectives import collective_kind, is_collective
from apsched.fx.graph_copies import copied
from apsched.fx.passes.lists import add_before_reducing
from apsched.fx.passes.run_passes import Pass
from apsched.models.mesh import group_of
from tests.helpers.graphs.mesh_modules import ROWS, WIDTH, ReadTwice, values

Results = list[torch.Tensor]


def inputs_of(module: nn.Module, *inputs: torch.Tensor) -> Results:
    local = [p.detach() for p in module.parameters()]
    return [*(p.to_local() if hasattr(p, "to_local") else p for p in local), *inputs]


def step(forward: GraphModule, backward: GraphModule, inputs: Results) -> Results:
    """Return loss and gradients."""
    loss, *saved = forward(*inputs)
    return [
        loss,
        *(g for g in backward(*saved, torch.ones_like(loss)) if isinstance(g, torch.Tensor)),
    ]


def counts(graphs: Sequence[GraphModule]) -> list[dict[str, int]]:
    """Return the collectives of each graph, by kind."""
    return [
        dict(Counter(str(collective_kind(n)) for n in g.graph.nodes if is_collective(n)))
        for g in graphs
    ]


def before_partition(
    module: nn.Module, x: torch.Tensor, passes: Sequence[Pass]
) -> dict[str, object]:
    """Run ``passes`` on the joint graph, and the step without and with them; counts are those of
    the joint graph.
    """
    joint: list[GraphModule] = []

    def watched(name: str) -> Pass:
        def run(module: GraphModule) -> GraphModule:
            joint.append(module)
            return copied(module)

        return Pass(name=name, run=run)

    watching = ((), (watched("before"), *passes, watched("after")))
    pairs = [
        [g.module for g in capture_module(module, (x,), source="case", passes=tuple(p)).graphs]
        for p in watching
    ]
    expected, found = (step(*pair, inputs_of(module, x)) for pair in pairs)
    return report(joint[:1], joint[1:], expected, found)


def report(
    before: Sequence[GraphModule], after: Sequence[GraphModule], expected: Results, found: Results
) -> dict[str, object]:
    return {
        "before": counts(before),
        "after": counts(after),
        "equal": len(expected) == len(found)
        and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)),
        "results": len(found),
    }


def sums_first(mesh: DeviceMesh) -> dict[str, object]:
    """A weight that is gathered twice, so that two reductions of its gradient are added."""
    group = group_of(mesh, "fsdp")
    x = values(100 + group.rank, ROWS, WIDTH).round()  # whole numbers: sums are exact in any order
    return before_partition(ReadTwice(group, seed=0), x, add_before_reducing())


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    found = sums_first(mesh)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
