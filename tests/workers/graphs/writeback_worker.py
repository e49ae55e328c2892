"""One of two gloo processes that run a toy step under random schedules; writes how the results
compare as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.toy_graphs import CoalescedCosts, capture_toy, toy_inputs
from tests.helpers.problems.random_schedules import random_schedule

NUM_SHARDS = 8
SEEDS = range(60)


def compare(rank: int, world_size: int) -> dict[str, object]:
    captured = capture_toy(
        dist.group.WORLD.group_name, world_size, num_shards=NUM_SHARDS, process_rank=rank
    )
    problem = build_problem(export_graph(captured, CoalescedCosts()))
    inputs = toy_inputs(world_size, NUM_SHARDS, rank)
    code = captured.module.code
    expected = captured.module(*inputs)
    unequal, kinds, coalesced = [], set(), set()
    for seed in SEEDS:
        schedule = random_schedule(problem, seed)
        kinds |= {
            problem.keys[problem.collectives[bucket.members[0]].key].kind
            for bucket in schedule.buckets
        }
        coalesced |= {
            problem.keys[problem.collectives[bucket.members[0]].key].kind
            for bucket in schedule.buckets
            if bucket.coalesced
        }
        module = write_back(captured.module, problem, schedule)
        for _ in range(2):  # twice: nothing is left over from the first
            found = module(*inputs)
            unequal += [
                (seed, k)
                for k, (a, b) in enumerate(zip(expected, found, strict=True))
                if not torch.equal(a, b)
            ]
            unequal += [
                (seed, k)
                for k, (a, b) in enumerate(zip(expected, found, strict=True))
                if a.stride() != b.stride()
            ]
    return {
        "unequal": unequal,
        "kinds": sorted(kinds),
        "coalesced": sorted(coalesced),
        "input_graph_unchanged": captured.module.code == code,
        "num_outputs": len(expected),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    (folder / f"{rank}.json").write_text(json.dumps(compare(rank, world_size)))
    dist.barrier()
    dist.destroy_process_group()
