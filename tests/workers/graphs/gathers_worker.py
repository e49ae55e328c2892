"""One of several gloo processes that have many all-gathers under way at once; writes how many it
waited for and how many had the wrong values.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER, ROUNDS)``, see ``processes.run_jobs``
"""

import json
import random
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = (8, 64, 96, 4000)
"""Elements of a shard."""
DTYPES = (torch.float32, torch.float32, torch.complex64)
MOST_AT_ONCE = 5


def main(rank: int, world_size: int, folder: Path, rounds: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    group = dist.group.WORLD.group_name
    operators = torch.ops._c10d_functional
    chance = random.Random(3)  # the same on all process ranks
    ranks = torch.arange(world_size, dtype=torch.float32)
    num_gathers = num_wrong = 0
    for number in range(int(rounds)):
        under_way = []
        for _ in range(chance.randint(1, MOST_AT_ONCE)):
            size, dtype = chance.choice(SIZES), chance.choice(DTYPES)
            shard = torch.full((size,), number + float(rank), dtype=dtype)
            under_way.append((operators.all_gather_into_tensor(shard, world_size, group), size))
        shard = torch.full((2, 3), number + float(rank))
        together = operators.all_gather_into_tensor_coalesced([shard, shard], world_size, group)
        under_way += [(whole, 6) for whole in together]
        chance.shuffle(under_way)
        for whole, size in under_way:
            found = operators.wait_tensor(whole).flatten()
            expected = (number + ranks).repeat_interleave(size).to(found.dtype)
            num_wrong += not found.equal(expected)
            num_gathers += 1
    (folder / f"{rank}.json").write_text(json.dumps({"gathers": num_gathers, "wrong": num_wrong}))
    dist.barrier()
    dist.destroy_process_group()
