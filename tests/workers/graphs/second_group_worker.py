"""One of two gloo processes that run two toy steps with gathers on a second group; writes how the
results compare as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from apsched.fx.collectives import collective_kind, group_name
from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.problem.second_group import with_second_groups
from apsched.schedule.simulate import simulate
from apsched.torch_compat.graphs import process_group_names
from apsched.writeback.round_trip import round_trip
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.toy_graphs import CoalescedCosts, capture_toy, toy_inputs
from tests.helpers.problems.random_schedules import random_schedule


def compare(rank: int, world_size: int) -> dict[str, object]:
    first = dist.group.WORLD.group_name
    unequal, inexact, used, made = [], [], set(), []
    for num_shards in (8, 5):  # two graphs: the group is made for the first, and used for both
        captured = capture_toy(first, world_size, num_shards=num_shards, process_rank=rank)
        problem = with_second_groups(build_problem(export_graph(captured, CoalescedCosts())))
        assert problem is not None
        inputs = toy_inputs(world_size, num_shards, rank)
        expected = captured.module(*inputs)
        for seed in range(15):
            schedule = random_schedule(problem, seed)
            module = write_back(captured.module, problem, schedule)
            trip = round_trip(
                module,
                captured,
                CoalescedCosts(),
                {},
                simulate(problem, schedule),
                problem.contention,
            )
            inexact += [trip.difference] if seed < 3 and not trip.exact else []
            found = module(*inputs)
            unequal += [
                (seed, k)
                for k, (a, b) in enumerate(zip(expected, found, strict=True))
                if not torch.equal(a, b)
            ]
            used |= {
                (kind, group_name(node) == first)
                for node in module.graph.nodes
                if (kind := collective_kind(node)) is not None
            }
        made.append(len(process_group_names()))
    return {"unequal": unequal, "inexact": inexact, "used": sorted(used), "num_groups": made}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    (folder / f"{rank}.json").write_text(json.dumps(compare(rank, world_size)))
    dist.barrier()
    dist.destroy_process_group()
