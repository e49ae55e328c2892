"""One of two gloo processes that run steps whose communication is not all scheduled, as captured
and rewritten; writes what differs as JSON.

usage: communication_worker.py PROCESS_RANK WORLD_SIZE FOLDER
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import apsched
from apsched.capture.graph_module import capture_graph
from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.schedule.simulate import simulate
from apsched.writeback.round_trip import round_trip
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.programs_of_communication import (
    NAMES,
    c10d,
    inputs_of_steps,
    run_parted_products_on_cpu,
    traced_step,
)
from tests.helpers.graphs.toy_graphs import FlatCosts
from tests.helpers.problems.random_schedules import random_schedule

SEEDS = range(8)
OPTIMIZED = (
    "a wait in the caller",
    "isend and irecv",
    "cond with a collective",
    "keys and values of context parallelism",
    "control_deps",
)
"""Steps that are optimized, too; one solve takes seconds."""


def ran(module: torch.fx.GraphModule, process_rank: int) -> list[torch.Tensor]:
    """Return what a run leaves behind: results and inputs, after the waits that the caller owes."""
    inputs = inputs_of_steps(process_rank)
    outputs = module(*inputs)
    return [c10d.wait_tensor(value).clone() for value in (*outputs, *inputs)]


def differences(expected: list[torch.Tensor], found: list[torch.Tensor]) -> list[int]:
    """Return which of what two runs leave behind is not the same, bit for bit."""
    pairs = enumerate(zip(expected, found, strict=True))
    return [k for k, (a, b) in pairs if a.dtype != b.dtype or not torch.equal(a, b)]


def compare(name: str, rank: int) -> dict[str, object]:
    with torch.no_grad():
        module = traced_step(name, dist.group.WORLD.group_name, 1 - rank)
        expected = ran(module, rank)
        optimized = (
            differences(expected, ran(apsched.optimize(module, budget=0.05), rank))
            if name in OPTIMIZED
            else []
        )
        captured = capture_graph(module)
        problem = build_problem(export_graph(captured, FlatCosts()))
        shuffled, inexact, orders = {}, [], set()
        for seed in SEEDS:
            schedule = random_schedule(problem, seed)
            rewritten = write_back(captured.module, problem, schedule)
            orders.add(tuple(node.name for node in rewritten.graph.nodes))
            trip = round_trip(rewritten, captured, FlatCosts(), {}, simulate(problem, schedule))
            inexact += [] if trip.exact else [trip.difference]
            if wrong := differences(expected, ran(rewritten, rank)):
                shuffled[seed] = wrong
    return {
        "optimized": optimized,
        "shuffled": shuffled,
        "inexact": inexact,
        "num_orders": len(orders),
        "num_scheduled": len(problem.collectives),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    library = run_parted_products_on_cpu()
    found = {name: compare(name, rank) for name in NAMES}
    del library
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
