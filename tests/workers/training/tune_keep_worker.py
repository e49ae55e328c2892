"""One of two gloo processes that train under ``fully_shard``, tuned with a choice of kept units;
reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import apsched
from apsched.torch_compat.fsdp import resharded_to
from tests.workers.training.tune_worker import sharded, tokens, trained

QUICK = {"budget": 0.0, "deadline_s": 60.0}
CASES: dict[str, Any] = {
    "auto": ("auto", "none"),
    "tight": ("auto", "floor"),
    "none": ("none", "none"),
    "part": ([r"layers\.1\.up\.weight"], "none"),
}
"""Name -> ``keep`` and memory cap."""


def tuned(rank: int, keep: Any, memory_cap: str) -> dict[str, Any]:
    model = sharded()
    found = apsched.tune_fsdp2(model, tokens(rank), keep=keep, memory_cap=memory_cap, **QUICK)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {
        "resharded": {one.name: one.reshard_after_forward for one in found.settings.units},
        "set": [resharded_to(unit) for unit in units],
        "text": str(found),
        "losses": trained(model, tokens(rank)),
    }


def differs(rank: int) -> list[str]:
    """One process rank states another choice than the other."""
    try:
        apsched.tune_fsdp2(sharded(), tokens(rank), keep=("all", "none")[rank], **QUICK)
    except apsched.ApschedError as error:
        return [type(error).__name__, str(error)]
    return []


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    report: dict[str, Any] = {name: tuned(rank, *case) for name, case in CASES.items()}
    report |= {"as it was": trained(sharded(), tokens(rank)), "differs": differs(rank)}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
