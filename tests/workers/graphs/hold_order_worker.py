"""One of two gloo processes that run a toy step, held and compiled by full Inductor; writes how
close it is to the captured graph.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor.compile_fx import compile_fx_inner

from apsched.capture.captured import CapturedGraph
from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.writeback.hold_order import hold_order
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.inductor_code import decomposed
from tests.helpers.graphs.toy_graphs import FlatCosts, captured_function, toy_inputs, toy_step
from tests.helpers.problems.random_schedules import compute_moves, random_schedule

NUM_SHARDS = 4
SEEDS = (1,)


def compare(rank: int, world_size: int) -> dict[str, object]:
    inputs = toy_inputs(world_size, NUM_SHARDS, rank)
    step = toy_step(dist.group.WORLD.group_name, world_size)
    module = decomposed(captured_function(step, inputs, parameters=NUM_SHARDS).module)
    captured = CapturedGraph(
        name="graph", module=module, kept_inputs=frozenset(), parameter_names={}
    )
    problem = build_problem(export_graph(captured, FlatCosts()))
    with torch.no_grad():
        expected = module(*inputs)
        distances, moved = [], []
        for seed in SEEDS:
            schedule = random_schedule(problem, seed)
            held = hold_order(write_back(module, problem, schedule))
            compiled = compile_fx_inner(
                held, [node.meta["val"] for node in held.graph.find_nodes(op="placeholder")]
            )
            for _ in range(2):  # twice: buffers are reused
                found = compiled(list(inputs))
                distances += [
                    (a - b).abs().max().item() for a, b in zip(expected, found, strict=True)
                ]
            moved.append(sum(map(bool, compute_moves(problem, schedule))))
    return {
        "largest_distance": max(distances),
        "largest": max(value.abs().max().item() for value in expected),
        "num_moved": moved,
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=500)
    )
    (folder / f"{rank}.json").write_text(json.dumps(compare(rank, world_size)))
    dist.barrier()
    dist.destroy_process_group()
