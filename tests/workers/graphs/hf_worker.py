"""One of several gloo processes that run Transformers models: its own code, the captured graphs,
the rewritten graphs; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
import re
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.build import BuiltModel, initial_values
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from apsched.models.transformers.config import FAMILIES, build_from_config
from apsched.problem.build import build_problem
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.hf_configs import written
from tests.helpers.problems.random_schedules import layer_schedule

SEQ_LEN = 32
CASES = {
    2: (
        ("llama", "fsdp=2", "float32", "float32"),
        ("llama", "tp=2", "float32", "float32"),
        ("qwen3", "fsdp=2", "float32", "float32"),
        ("mixtral", "fsdp=2", "bfloat16", "float32"),
    ),
    4: (
        ("llama", "fsdp=2,tp=2", "float32", "float32"),
        ("qwen3", "fsdp=4", "float32", "float64"),
        ("mixtral", "replicate=2,fsdp=2", "bfloat16", "float32"),
    ),
}
"""Family, mesh, dtype of parameters and of reductions. Grouped matrix products can be traced in
bfloat16 only.
"""
Step = tuple[torch.Tensor, dict[str, torch.Tensor]]


def by_transformers(path: Path, built: BuiltModel) -> Step:
    """Return loss and whole gradients of Transformers' own model in eager mode, summed over
    data-parallel process ranks.
    """
    fields = json.loads(path.read_text())
    family = FAMILIES[fields["model_type"]]
    config = getattr(transformers, family.config).from_dict(fields)
    model: nn.Module = getattr(transformers, family.model)(config).to(built.options.param_dtype)
    values = initial_values(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(name, parameter.shape))
    tokens, targets = built.inputs
    logits = model(input_ids=tokens).logits.float().flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / (
        targets.numel() * built.mesh.data_parallel_size
    )
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for tensor in (loss.detach(), *gradients.values()):
        summed(built, tensor)
    return loss.detach(), gradients


def summed(built: BuiltModel, tensor: torch.Tensor) -> None:
    """Sum a tensor over process ranks with other data; those of one tensor-parallel group have the
    same.
    """
    if built.mesh.data_parallel_size > 1:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size() // built.mesh.data_parallel_size


def whole(built: BuiltModel, step: Step) -> Step:
    """Return loss and gradients as one process would have them."""
    loss, gradients = step[0].clone(), {}
    summed(built, loss)
    for name, parameter in built.module.named_parameters():
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        shard = DTensor.from_local(
            step[1][name], mesh, placements, shape=parameter.shape, stride=parameter.stride()
        )
        gradients[name] = shard.full_tensor()
    return loss, gradients


def layer_of(parameter: str) -> str:
    """``model.layers.N`` of a parameter's name, or its module."""
    return re.match(r"model\.layers\.\d+|.*\.", parameter).group()


def run_case(
    folder: Path, name: str, mesh: str, dtype: str, reduce_dtype: str
) -> dict[str, object]:
    path = written(folder, name, num_hidden_layers=1)
    options = ModelOptions(
        param_dtype=getattr(torch, dtype), reduce_dtype=getattr(torch, reduce_dtype)
    )
    built = build_from_config(
        path, mesh=MeshSpec.parse(mesh), seq_len=SEQ_LEN, options=options, materialize=True
    )
    capture = capture_built(built)
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    modules = []
    for graph in capture.graphs:
        problem = build_problem(export_graph(graph, costs, group_ranks=capture.group_ranks))
        schedule = layer_schedule(problem, layer_of)
        modules.append(
            (graph.module, write_back(graph.module, problem, schedule), len(schedule.buckets))
        )
    with torch.no_grad():
        captured, rewritten = (run_step(built, *(pair[k] for pair in modules)) for k in (0, 1))
        loss, gradients = whole(built, captured)
    expected_loss, expected = by_transformers(path, built)
    return {
        "loss": loss.item(),
        "expected": expected_loss.item(),
        "names": sorted(gradients) == sorted(expected),
        "distance": max(
            ((gradients[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items()
        ),
        "unequal": [n for n, g in captured[1].items() if not torch.equal(g, rewritten[1][n])],
        "same loss": torch.equal(captured[0], rewritten[0]),
        "buckets": [pair[2] for pair in modules],
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    own = folder / f"configs{rank}"
    own.mkdir()
    report = {
        f"{name} {mesh}": run_case(own, name, mesh, *dtypes)
        for name, mesh, *dtypes in CASES[world_size]
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
