"""One of four gloo processes that train a small preset with captured graphs, and with those that
torch's schedulers make of them.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from apsched.pipeline.inductor_baseline import run_inductor, run_inductor_manual
from apsched.problem.build import build_problem

MESHES = ("fsdp=4", "fsdp=2,tp=2", "replicate=2,fsdp=2")
OPTIONS = ModelOptions(reduce_dtype=torch.float64)
"""Gradients computed in bfloat16 add up in float64 without rounding, in whatever order (see
``training_cases``).
"""


def compare(mesh: str) -> dict[str, dict[str, object]]:
    """Return for each scheduler which of loss and gradients are not bit for bit those of the
    captured graphs.
    """
    built = build(
        "llama3-debug",
        mesh=MeshSpec.parse(mesh),
        seq_len=32,
        options=OPTIONS,
        materialize=True,
        num_layers=2,
    )
    capture = capture_built(built)
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    problems = [
        build_problem(export_graph(graph, costs, group_ranks=capture.group_ranks))
        for graph in capture.graphs
    ]
    greedy = [
        run_inductor(graph, costs, group_ranks=capture.group_ranks) for graph in capture.graphs
    ]
    manual = [
        run_inductor_manual(graph, problem)
        for graph, problem in zip(capture.graphs, problems, strict=True)
    ]
    expected = results(built, [graph.module for graph in capture.graphs])
    report = {}
    for runs in (greedy, manual):
        found = results(built, [run.module for run in runs])
        unequal = sorted(name for name in expected if not torch.equal(expected[name], found[name]))
        report[runs[0].name] = {
            "unequal": unequal,
            "num_results": len(expected),
            "finite": all(bool(v.isfinite().all()) for v in found.values()),
        }
    return report


def results(built, modules) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        loss, gradients = run_step(built, *modules)
    return {"loss": loss, **gradients}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    (folder / f"{rank}.json").write_text(json.dumps({mesh: compare(mesh) for mesh in MESHES}))
    dist.barrier()
    dist.destroy_process_group()
