"""One of two gloo processes that train models of other layouts under ``fully_shard``, tuned by
``tune_fsdp2`` and not; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import apsched
from tests.helpers.graphs.eager_fsdp2 import digest, shards_of
from tests.helpers.graphs.unit_layouts import LAYOUTS

NUM_STEPS = 3
QUICK = {"budget": 0.2, "memory_cap": "none", "deadline_s": 200.0}


def trained(model: nn.Module, tokens: torch.Tensor) -> list[object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[object] = []
    for _ in range(NUM_STEPS):
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return [*seen, digest(shards_of(model))]


def layout(rank: int, build: Callable[[], nn.Module]) -> dict[str, object]:
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(rank))
    model = build()
    found = apsched.tune_fsdp2(model, tokens, **QUICK)
    return {
        "units": [unit.name for unit in found.settings.units],
        "times": [found.step_time_us, found.untuned_us],
        "tuned": trained(model, tokens),
        "as it was": trained(build(), tokens),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
    )
    report = {name: layout(rank, build) for name, build in LAYOUTS.items()}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
