"""One of two gloo processes that train under ``torch.compile``, where process rank 1 alone gets
another size in its second step, and so compiles again; writes how that ends.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import apsched
from tests.helpers.graphs.small_models import WIDTH, shard
from tests.workers.training.compiler_worker import QUICK

DEADLINE_S = 3.0


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), mesh["fsdp"])
    backend = apsched.backend(**{**QUICK, "on_error": "fallback", "deadline_s": DEADLINE_S})
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(4, WIDTH)).sum().backward()
    error, done = "", folder / "1.json"
    if rank == 1:
        try:
            compiled(torch.randn(6, WIDTH))
        except Exception as found:
            error = str(found)
    else:
        give_up_s = time.monotonic() + 300
        while not done.exists() and time.monotonic() < give_up_s:
            time.sleep(0.05)
    (folder / f"{rank}.json").write_text(json.dumps({"error": error}))
    os._exit(0)  # the group would wait for a collective that the other does not begin
