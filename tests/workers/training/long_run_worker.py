"""One of four gloo processes that train for long with rewritten graphs, and under eager
``fully_shard``; writes hashes and memory as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import ctypes
import gc
import itertools
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.workers.training.eager_worker import built_model, eager, trained

NUM_STEPS = 200
STEPS_BETWEEN_LOOKS = 20
PAGE_BYTES = 4096


def held() -> dict[str, int]:
    """Return the tensors that Python knows, the collectives that nobody waited for, and resident
    memory less what malloc can give back.
    """
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    return {
        "tensors": len(tensors),
        "tensor_bytes": sum(storages.values()),
        "collectives": torch._C._distributed_c10d._get_work_registry_size(),
        "resident_bytes": pages * PAGE_BYTES,
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=600),
    )
    built = built_model(world_size)
    whole = {
        name: parameter.detach().full_tensor()
        for name, parameter in built.module.named_parameters()
    }
    looks: list[dict[str, int]] = []
    steps = itertools.count(1)
    rewritten, _ = trained(
        world_size,
        bitwise=True,
        num_steps=NUM_STEPS,
        after_step=lambda: looks.append(held()) if next(steps) % STEPS_BETWEEN_LOOKS == 0 else None,
    )
    fully_sharded, _ = eager(whole, built.inputs, world_size, NUM_STEPS)
    report = {"rewritten": rewritten, "eager": fully_sharded, "held": looks}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
