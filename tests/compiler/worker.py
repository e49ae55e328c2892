"""One of several gloo processes that train under torch.compile, with apsched and without; writes how far apart they are as JSON.

usage: worker.py PROCESS_RANK WORLD_SIZE FOLDER
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from small_models import WIDTH, Broken, layers, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import apsched
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions

NUM_STEPS = 3
QUICK = {"budget": 0.0, "memory_cap": "none"}
MESHES = {2: "fsdp=2", 4: "fsdp=2,tp=2"}

Record = list[torch.Tensor]


def train(module: nn.Module, inputs: list[tuple[torch.Tensor, ...]], backend: object) -> Record:
    """Return losses and gradients of some steps of gradient descent; the parameters are put back."""
    torch._dynamo.reset()
    start = [parameter.detach().clone() for parameter in module.parameters()]
    compiled = torch.compile(module, backend=backend)
    record = []
    for given in inputs:
        loss = compiled(*given).float().square().mean()
        loss.backward()
        record.append(loss.detach().clone())
        for parameter in module.parameters():
            record.append(parameter.grad.to_local().clone())
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), start, strict=True):
            parameter.copy_(value)
    return record


def compare(expected: Record, found: Record) -> dict[str, float]:
    pairs = list(zip(expected, found, strict=True))
    distances = [((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in pairs if a.numel()]
    return {"num_unequal": sum(not torch.equal(a, b) for a, b in pairs), "largest_distance": max(distances)}


def compared(module: nn.Module, inputs: list[tuple[torch.Tensor, ...]], plain: str, **settings: object) -> dict[str, object]:
    backend = apsched.backend(**QUICK, **settings)
    expected = train(module, inputs, plain)
    found = train(module, inputs, backend)
    counts = [(r.problem.name, len(r.problem.collectives), r.best.num_launches) for r in backend.results]
    return compare(expected, found) | {"graphs": counts, "exact": all(r.round_trip_exact for r in backend.results)}


def preset(mesh: str) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    options = ModelOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    built = build("llama3-debug", mesh=MeshSpec.parse(mesh), seq_len=32, options=options, materialize=True, num_layers=1)
    return built.module, [built.inputs] * NUM_STEPS


def small(make: Callable[[], nn.Module], sizes: list[int]) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    module = shard(make(), init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(dist.get_rank())
    return module, [(torch.randn(size, WIDTH),) for size in sizes]


def inference(module: nn.Module, x: torch.Tensor) -> dict[str, object]:
    torch._dynamo.reset()
    backend = apsched.backend(**QUICK)
    with torch.no_grad():
        expected, found = module(x), torch.compile(module, backend=backend)(x)
    return {"equal": torch.equal(expected, found), "names": [r.problem.name for r in backend.results]}


def report(world_size: int) -> dict[str, object]:
    found: dict[str, object] = {"preset": compared(*preset(MESHES[world_size]), "aot_eager")}
    if world_size == 2:
        found["reshard"] = compared(*small(layers, [4] * NUM_STEPS), "aot_eager", reshard_after_forward=True)
        found["graph breaks"] = compared(*small(Broken, [4] * NUM_STEPS), "aot_eager")
        found["sizes that change"] = compared(*small(layers, [4, 6, 10]), "aot_eager", deadline_s=None)
        found["inductor"] = compared(*small(layers, [4] * NUM_STEPS), "inductor", inductor=True, reshard_after_forward=True)
        module, inputs = small(Broken, [4])
        found["inference"] = inference(module, *inputs[0])
    return found


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor_{rank}")
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600))
    (folder / f"{rank}.json").write_text(json.dumps(report(world_size)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
