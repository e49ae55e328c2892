"""One of several gloo processes that train models whose sizes depend on data, under torch.compile
with apsched and without; writes how far apart they are as JSON.

Experts are on all process ranks, parameters are sharded over pairs: a sum of two has the same bits
in any order.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import config
from torch.distributed.device_mesh import init_device_mesh

import apsched
from tests.helpers.graphs.experts import Experts, Masked
from tests.helpers.graphs.small_models import WIDTH, shard
from tests.workers.training.compiler_worker import QUICK, compare, train

NUM_STEPS, NUM_ROWS = 4, 24


def report(rank: int, world_size: int) -> dict[str, object]:
    pairs = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("other", "fsdp"))
    torch.manual_seed(0)
    experts = Experts(dist.group.WORLD)
    module = shard(nn.Sequential(experts, Masked(), nn.Linear(WIDTH, WIDTH)), pairs["fsdp"])
    torch.manual_seed(1 + rank)
    inputs = [(torch.randn(NUM_ROWS, WIDTH),) for _ in range(NUM_STEPS)]
    with torch.no_grad():
        splits = [experts.splits(experts.router(x).argmax(-1)) for (x,) in inputs]
    backend = apsched.backend(**QUICK)
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        found = compare(train(module, inputs, "aot_eager"), train(module, inputs, backend))
    results = backend.results
    return found | {
        "splits": splits,
        "graphs": [
            (r.problem.name, len(r.problem.collectives), r.best.num_launches) for r in results
        ],
        "exact": all(r.round_trip_exact for r in results),
        "assumed": [[(s.symbol, s.value, s.source) for s in r.assumptions.sizes] for r in results],
        "shares": [(r.assumptions.time_share, r.assumptions.peak_share) for r in results],
        "schedules": [repr(r.schedule) for r in results],
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600)
    )
    (folder / f"{rank}.json").write_text(json.dumps(report(rank, world_size)))
    dist.barrier()
    dist.destroy_process_group()
