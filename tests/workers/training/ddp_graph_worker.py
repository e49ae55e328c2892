"""One of two gloo processes that train under DDP whose all-reduces are in a graph of
torch.compile, with apsched and without; writes what it found as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import apsched

NUM_STEPS = 2
WIDTH = 32


def trained(rank: int, backend: Any) -> list[Any]:
    """Return the losses and the weights of some steps, each of them one compiled function."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))

    @torch.compile(backend=backend)
    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    seen: list[Any] = []
    for _ in range(NUM_STEPS):
        seen.append(step().item())
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, [parameter.tolist() for parameter in model.parameters()]]


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor{rank}")
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    in_graph = {"optimize_ddp": "python_reducer", "compiled_autograd": True}
    found = {}
    for plain, inductor in (("aot_eager", False), ("inductor", True)):
        backend = apsched.backend(cluster="h100", memory_cap="none", budget=0.0, inductor=inductor)
        with torch._dynamo.config.patch(in_graph):
            found[plain] = {"plain": trained(rank, plain), "scheduled": trained(rank, backend)}
        found[plain]["launches"] = [
            [len(r.problem.collectives), r.best.num_launches] for r in backend.results
        ]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
