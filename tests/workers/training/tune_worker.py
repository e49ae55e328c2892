"""One of two gloo processes that train under ``fully_shard`` and DDP, or of four that train under
HSDP, tuned by apsched and not; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import apsched
from apsched.pipeline.result import Result
from apsched.schedule.schedule import StepKind
from tests.helpers.graphs.eager_fsdp2 import digest, shards_of
from tests.helpers.graphs.small_models import Residual

NUM_STEPS = 3
QUICK = {"budget": 0.2, "memory_cap": "none", "deadline_s": 200.0}


def sharded(**policy: torch.dtype) -> nn.Module:
    """Return a model of 33 rows, which two process ranks do not share evenly; four ranks are two
    replicas of two.
    """
    torch.manual_seed(0)
    model = Residual(33)
    size = dist.get_world_size()
    axes = ("shard",) if size == 2 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**policy)}
    for layer in model.layers:
        fully_shard(layer, **how)
    fully_shard(model.output, reshard_after_forward=False, **how)
    fully_shard(model, **how)
    return model


def in_nodes(number: int | bool) -> nn.Module:
    """Return a model over four process ranks whose inner layers are resharded to ``number``."""
    torch.manual_seed(0)
    model = Residual(33)
    first, *others = model.layers
    fully_shard(first)
    for layer in others:
        fully_shard(layer, reshard_after_forward=number)
    return fully_shard(model)


def tuned_in_nodes(rank: int) -> dict[str, object]:
    model, x = in_nodes(2), tokens(rank)
    found = apsched.tune_fsdp2(model, x, **QUICK)
    problem = found.results[1].problem
    return {
        "resharded": [unit.reshard_after_forward for unit in found.settings.units],
        "gathers": sorted(
            {
                (c.module.rsplit(".", 2)[0], problem.keys[c.key].group_size)
                for c in problem.collectives
                if problem.keys[c.key].kind == "all_gather"
            }
        ),
        "tuned": trained(model, x),
        "as it was": trained(in_nodes(2), x),
        "gathered again": trained(in_nodes(True), x),
    }


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(rank))


def trained(model: nn.Module, x: torch.Tensor) -> list[object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[object] = []
    for _ in range(NUM_STEPS):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return [*seen, digest(shards_of(model))]


def fsdp2(rank: int, **policy: torch.dtype) -> dict[str, object]:
    model, x = sharded(**policy), tokens(rank)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    found = apsched.tune_fsdp2(model, x, **QUICK)
    return {
        "untouched": before == {name: id(p) for name, p in model.named_parameters()},
        "settings": asdict(found.settings),
        "gain": [found.step_time_us, found.untuned_us, found.gain],
        "text": str(found),
        "dtypes": sorted({key.dtype for r in found.results for key in r.problem.keys}),
        "kept": [c.module for c in found.results[1].problem.collectives],
        "launched": launched(found.results[1]),
        "tuned": trained(model, x),
        "as it was": trained(sharded(**policy), x),
    }


class Headed(nn.Module):
    """Layers, and a head that the root unit has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(33, 33) for _ in range(4))
        self.head = nn.Linear(33, 66)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).square().mean()


def headed() -> nn.Module:
    torch.manual_seed(0)
    model = Headed()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tuned_with_head(rank: int) -> dict[str, object]:
    x = torch.randn(64, 33, generator=torch.Generator().manual_seed(rank))
    model = headed()
    found = apsched.tune_fsdp2(model, x, **QUICK)
    return {
        "settings": asdict(found.settings),
        "launched": [launched(result) for result in found.results],
        "times": [found.step_time_us, found.untuned_us],
        "tuned": trained(model, x),
        "as it was": trained(headed(), x),
    }


def launched(result: Result) -> list[list[str]]:
    """Return the launches of a schedule by kind and parameters, in order."""
    problem, schedule = result.problem, result.schedule
    buckets = [
        [problem.collectives[member] for member in schedule.buckets[step.index].members]
        for step in schedule.steps
        if step.kind is StepKind.START
    ]
    return [[problem.keys[b[0].key].kind, *sorted(c.module for c in b)] for b in buckets]


def falls_back(rank: int) -> dict[str, object]:
    """One process rank has inputs that its model cannot take."""
    model, x = sharded(), tokens(rank)
    wrong = (x, x) if rank == 1 else x
    found = apsched.tune_fsdp2(model, wrong, on_error="fallback", **QUICK)
    return {"settings": found.settings, "text": str(found)}


def ddp(rank: int) -> dict[str, object]:
    found = {}
    for name, width in {"small": 32, "large": 256}.items():
        torch.manual_seed(0)
        model, x = Residual(width), tokens(rank).repeat(16, 8)
        buckets = apsched.ddp_buckets(model, x)
        wrapped = DistributedDataParallel(model, **buckets.arguments)
        for _ in range(4):  # torch writes its statistics down in some of the first steps
            wrapped(x).backward()
        found[name] = asdict(buckets) | {
            "gain": buckets.gain,
            "order": buckets.parameter_order,
            "names": [name for name, _ in model.named_parameters()],
            "made": wrapped._get_ddp_logging_data(),
        }
    return found


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
    )
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    report = {"float32": fsdp2(rank), "mixed": fsdp2(rank, **mixed)}
    if world_size == 2:
        report |= {"fallback": falls_back(rank), "ddp": ddp(rank), "head": tuned_with_head(rank)}
    else:
        report |= {"in nodes": tuned_in_nodes(rank)}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
