"""One of two gloo processes that run steps of python functions as captured and rewritten; writes
what differs as JSON.

usage: functions_worker.py PROCESS_RANK WORLD_SIZE FOLDER
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
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.programs_of_functions import THINGS, inputs_of, traced_step
from tests.helpers.graphs.toy_graphs import FlatCosts
from tests.helpers.problems.random_schedules import random_schedule

SEEDS = range(12)
OPTIMIZED = ("F.relu(inplace=True)", "torch.mul(out=)")
"""Steps that were optimized into other numbers; one solve takes seconds."""


def ran(
    module: torch.fx.GraphModule, world_size: int, process_rank: int
) -> dict[str, list[torch.Tensor]]:
    """Return what a run leaves behind: results, the tensors that it was handed, and the state of
    the generator."""
    inputs = inputs_of(world_size, process_rank)
    torch.manual_seed(7 + process_rank)
    outputs = [value.clone() for value in module(*inputs)]
    return {"result": outputs, "input": inputs, "generator": [torch.get_rng_state()]}


def differences(
    expected: dict[str, list[torch.Tensor]], found: dict[str, list[torch.Tensor]]
) -> list[str]:
    """Return which of what two runs leave behind is not the same, bit for bit."""
    return [
        f"{what} {k}"
        for what in expected
        for k, (a, b) in enumerate(zip(expected[what], found[what], strict=True))
        if a.dtype != b.dtype or not torch.equal(a, b)
    ]


def compare(name: str, rank: int, world_size: int) -> dict[str, object]:
    with torch.no_grad():
        module = traced_step(name, dist.group.WORLD.group_name, world_size)
        expected = ran(module, world_size, rank)
        optimized = (
            differences(expected, ran(apsched.optimize(module), world_size, rank))
            if name in OPTIMIZED
            else []
        )
        captured = capture_graph(module)
        problem = build_problem(export_graph(captured, FlatCosts()))
        shuffled = {}
        orders = set()
        for seed in SEEDS:
            rewritten = write_back(captured.module, problem, random_schedule(problem, seed))
            orders.add(tuple(node.name for node in rewritten.graph.nodes))
            if wrong := differences(expected, ran(rewritten, world_size, rank)):
                shuffled[seed] = wrong
    return {"optimized": optimized, "shuffled": shuffled, "num_orders": len(orders)}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    found = {name: compare(name, rank, world_size) for name in THINGS}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
