"""One of several gloo processes that run captured graphs before and after passes; writes what
differs as JSON.

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
from apsched.fx.passes.chained_gathers import flat_mesh, fuse_chained_gathers
from apsched.fx.passes.lists import shortening_passes
from apsched.fx.passes.round_trips import undo_round_trips
from apsched.fx.passes.run_passes import Pass, run_passes
from apsched.models.mesh import group_of
from tests.helpers.graphs import mesh_modules
from tests.helpers.graphs.mesh_modules import (
    ROWS,
    WIDTH,
    ByHand,
    Exchanged,
    ReadTwice,
    Redistributed,
    ThereAndBack,
    values,
)

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


def cuts(graphs: Sequence[GraphModule]) -> int:
    """Return how many aliases and splits there are."""
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    return sum("alias" in target or "split" in target for target in targets)


def after_partition(
    module: nn.Module, x: torch.Tensor, passes: Sequence[Pass]
) -> dict[str, object]:
    """Run ``passes`` on the forward and the backward graph, and both graphs before and after."""
    graphs = [graph.module for graph in capture_module(module, (x,), source="case").graphs]
    changed = [run_passes(graph, passes).module for graph in graphs]
    expected, found = (step(*pair, inputs_of(module, x)) for pair in (graphs, changed))
    return report(graphs, changed, expected, found)


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
        "cuts": [
            sum(
                "alias" in str(n.target) or "split" in str(n.target)
                for g in graphs
                for n in g.graph.nodes
            )
            for graphs in (before, after)
        ],
        "equal": len(expected) == len(found)
        and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)),
        "results": len(found),
    }


def on_two_axes(mesh: DeviceMesh) -> dict[str, dict[str, object]]:
    x = values(7, 3, WIDTH)
    fuse = (fuse_chained_gathers(flat_mesh(mesh)),)
    found = {
        f"dtensor {how}": after_partition(Redistributed(mesh, columns=how == "columns"), x, fuse)
        for how in ("rows", "columns")
    }
    for axes in (("dp", "tp"), ("tp", "dp")):
        for between in (
            mesh_modules.nothing,
            mesh_modules.cancelling,
            mesh_modules.turned,
            mesh_modules.cast,
            mesh_modules.also_used,
        ):
            found[f"{between.__name__} {'-'.join(axes)}"] = after_partition(
                ByHand(mesh, axes, between), x, fuse
            )
    return found


def on_one_axis(mesh: DeviceMesh) -> dict[str, dict[str, object]]:
    group = group_of(mesh, "fsdp")
    x = values(100 + group.rank, ROWS, WIDTH).round()  # whole numbers: sums are exact in any order
    twice = ReadTwice(group, seed=0)
    return {
        "gathers twice": before_partition(twice, x, shortening_passes(bitwise=True)),
        "sums first": before_partition(twice, x, shortening_passes(bitwise=False)),
        "there and back": before_partition(
            ThereAndBack(mesh, whole_too=True), x, (undo_round_trips(),)
        ),
        "only back": before_partition(
            ThereAndBack(mesh, whole_too=False), x, (undo_round_trips(),)
        ),
        "other part": before_partition(
            ThereAndBack(mesh, whole_too=False),
            x,
            (undo_round_trips(lambda group: (dist.get_rank() + 1) % 4),),
        ),
        "exchanged": before_partition(Exchanged(group), x, (undo_round_trips(),)),
    }


def next_one(group: str) -> int:
    """Return a rank that this process has not."""
    return (dist.get_rank() + 1) % dist.get_world_size()


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    found = on_two_axes(init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp")))
    if world_size == 4:
        found |= on_one_axis(init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
