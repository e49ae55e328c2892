"""One of several gloo processes that run models of Transformers of any architecture, with its own
loss: eager, and as captured; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from apsched.models.build import BuiltModel, initial_values
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from apsched.models.transformers.config import build_from_config
from tests.helpers.graphs.hf_configs import AUTO

CASES = {
    2: (
        ("gpt2", "fsdp=2"),
        ("t5", "replicate=2"),
        ("vit", "fsdp=2"),
        ("qwen3", "tp=2"),
        ("mixtral", "fsdp=2,ep=2"),
    ),
    4: (
        ("gpt_neox", "fsdp=2,tp=2"),
        ("bert", "replicate=2,fsdp=2"),
        ("mixtral", "fsdp=4,ep=2"),
    ),
}


def by_transformers(built: BuiltModel, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return loss and gradients of the eager model, summed over data-parallel process ranks."""
    kind = getattr(transformers, type(built.module).__name__)
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    config.use_cache = False
    model = kind(config)
    values = initial_values(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(name, parameter.shape))
    inputs, labels = built.inputs
    chosen = {model.main_input_name: inputs, "labels": labels}
    if config.is_encoder_decoder:
        chosen["decoder_input_ids"] = inputs
    loss = model(**chosen).loss / built.mesh.data_parallel_size
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for tensor in (loss.detach(), *gradients.values()):
        summed(built, tensor)
    return loss.detach(), gradients


def summed(built: BuiltModel, tensor: torch.Tensor) -> None:
    if built.mesh.data_parallel_size > 1:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size() // built.mesh.data_parallel_size


def own_part(whole: torch.Tensor, shape: torch.Size, built: BuiltModel) -> torch.Tensor:
    """Return the part of ``whole`` that this process rank of ``tp`` has, where it is split."""
    rank = dist.get_rank() % built.mesh.tp
    for dim, size in enumerate(shape):
        if size != whole.shape[dim]:
            return whole.chunk(built.mesh.tp, dim)[rank]
    return whole


def run_case(folder: Path, name: str, mesh: str) -> dict[str, object]:
    fields = AUTO[name]
    path = folder / f"{name}.json"
    path.write_text(json.dumps(fields))
    options = ModelOptions(param_dtype=torch.float32, reduce_dtype=torch.float32)
    built = build_from_config(
        path, mesh=MeshSpec.parse(mesh), seq_len=16, options=options, materialize=True
    )
    capture = capture_built(built)
    with torch.no_grad():
        loss, gradients = run_step(built, *(graph.module for graph in capture.graphs))
        summed(built, loss := loss.clone())
        found = {}
        for key, parameter in built.module.named_parameters():
            if not isinstance(parameter, DTensor):  # whole on each process rank
                found[key] = gradients[key]
                continue
            found[key] = DTensor.from_local(
                gradients[key],
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            ).full_tensor()
    expected_loss, expected = by_transformers(built, fields)
    return {
        "loss": loss.item(),
        "expected": expected_loss.item(),
        "names": sorted(found) == sorted(expected),
        "distance": max(
            ((found[n] - own_part(g, found[n].shape, built)).abs().max() / g.abs().max()).item()
            for n, g in expected.items()
            if g.abs().max() > 1e-7
        ),
        "count": len(found),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    own = folder / f"configs{rank}"
    own.mkdir()
    report = {f"{name} {mesh}": run_case(own, name, mesh) for name, mesh in CASES[world_size]}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
