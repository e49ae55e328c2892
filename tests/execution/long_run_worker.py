"""One of four gloo processes that train for long with rewritten graphs, and under eager ``fully_shard``; writes hashes and memory as JSON.

usage: long_run_worker.py PROCESS_RANK WORLD_SIZE FOLDER
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from plan.eager_worker import built_model, eager, trained

NUM_STEPS = 200
PAGE_BYTES = 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main(rank: int, world_size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=600))
    built = built_model(world_size)
    whole = {name: parameter.detach().full_tensor() for name, parameter in built.module.named_parameters()}
    resident: list[int] = []
    rewritten, _ = trained(world_size, bitwise=True, num_steps=NUM_STEPS, after_step=lambda: resident.append(resident_bytes()))
    fully_sharded, _ = eager(whole, built.inputs, world_size, NUM_STEPS)
    report = {"rewritten": rewritten, "eager": fully_sharded, "resident_bytes": resident}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
