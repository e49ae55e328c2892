"""One of several gloo processes that run graphs of several groups before and after the pass for
AutoParallel; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.compiler.settings import Settings
from apsched.fx.collectives import group_name, is_collective
from apsched.fx.graph_copies import copied
from apsched.integrations.autoparallel import (
    aten_autobucketing_config,
    aten_autobucketing_reordering_pass,
)
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from tests.helpers.graphs.toy_graphs import captured_function, toy_inputs, toy_step

NUM_SHARDS = 4
MESHES = {2: ("fsdp=2", "tp=2"), 4: ("fsdp=2,tp=2", "replicate=2,fsdp=2")}
QUICK = Settings(budget=0.0, max_compute_move=0)


class Limits(aten_autobucketing_config):
    """A configuration as people write it."""

    max_in_flight_gb = 0.25
    max_compute_pre_fetch = 5
    max_topo_span = 1500


def launches(modules: list[GraphModule]) -> list[list[str]]:
    return [
        [group_name(node) for node in module.graph.nodes if is_collective(node)]
        for module in modules
    ]


def run_case(mesh: str) -> dict[str, object]:
    built = build(
        "llama3-debug", mesh=MeshSpec.parse(mesh), seq_len=32, num_layers=1, materialize=True
    )
    captured = [graph.module for graph in capture_built(built).graphs]
    before = launches(captured)
    in_place = [copied(module) for module in captured]
    returned = [
        aten_autobucketing_reordering_pass(module.graph, Limits, settings=QUICK)
        for module in in_place
    ]
    with torch.no_grad():
        loss, gradients = run_step(built, *captured)
        other = run_step(built, *in_place)
    return {
        "same module": [a is b for a, b in zip(in_place, returned, strict=True)],
        "left alone": launches(captured) == before,
        "groups": [len(Counter(names)) for names in before],
        "launches": [list(map(len, names)) for names in (before, launches(in_place))],
        "order": launches(in_place),
        "unequal": [
            name
            for name, gradient in gradients.items()
            if not torch.equal(gradient, other[1][name])
        ],
        "same loss": torch.equal(loss, other[0]),
        "chosen": [module.meta["apsched_result"].caps.in_flight_cap_bytes for module in in_place],
    }


def two_groups(rank: int, world_size: int) -> dict[str, object]:
    """A step with two groups of the same process ranks, one among the other, as with parameters and
    activations sharded alike.
    """
    world, other = (dist.new_group(list(range(world_size))).group_name for _ in range(2))
    inputs = toy_inputs(world_size, NUM_SHARDS, rank)
    module = captured_function(
        toy_step(world, world_size, other), inputs, parameters=NUM_SHARDS
    ).module
    changed = copied(module)
    aten_autobucketing_reordering_pass(changed.graph, Limits, settings=QUICK)
    with torch.no_grad():
        pairs = list(zip(module(*inputs), changed(*inputs), strict=True))
    names = launches([module, changed])
    return {
        "groups": len({*names[0]}),
        "launches": list(map(len, names)),
        "order": names[1],
        "unequal": [k for k, (a, b) in enumerate(pairs) if not torch.equal(a, b)],
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
    )
    report = {mesh: run_case(mesh) for mesh in MESHES[world_size]}
    if world_size == 2:
        report["two groups"] = two_groups(rank, world_size)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
