"""One of two gloo processes that train with rewritten graphs until they are told to stop, or
something breaks; writes how it ended.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER, SCHEDULE, TIMEOUT_S, NAMESPACE)``, see
``processes.Interpreter``
"""

import ctypes
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from apsched.problem.build import build_problem
from apsched.schedule.schedule import as_captured
from apsched.writeback.write_back import write_back
from tests.helpers.problems.random_schedules import random_schedule

CLONE_NEWNET = 0x40000000


def meet(folder: Path, where: str, process_rank: int, world_size: int) -> None:
    """Wait for all at ``where``: on a busy machine one may get there longer after the others than
    gloo waits.
    """
    (folder / f"{where}.{process_rank}").touch()
    deadline = time.monotonic() + 200
    while (
        not all((folder / f"{where}.{rank}").exists() for rank in range(world_size))
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)


def enter(namespace: str) -> None:
    """Join the network namespace, as ``ip netns exec`` does."""
    with (Path("/run/netns") / namespace).open() as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def main(
    process_rank: int,
    world_size: int,
    folder: Path,
    schedule: str,
    timeout_s: str,
    namespace: str,
) -> None:
    torch.set_num_threads(1)
    enter(namespace)
    meet(folder, "imported", process_rank, world_size)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=process_rank,
        world_size=world_size,
        timeout=timedelta(seconds=float(timeout_s)),
    )
    built = build(
        "llama3-debug", mesh=MeshSpec.parse(f"fsdp={world_size}"), seq_len=32, materialize=True
    )
    capture = capture_built(built)
    costs = ClusterCostModel(load_cluster("cpu"), capture.group_ranks)
    problems = [
        build_problem(export_graph(captured, costs, group_ranks=capture.group_ranks))
        for captured in capture.graphs
    ]
    chosen = [
        as_captured(p.num_nodes) if schedule == "captured" else random_schedule(p, 3, max_members=8)
        for p in problems
    ]
    modules = [
        write_back(c.module, p, s) for c, p, s in zip(capture.graphs, problems, chosen, strict=True)
    ]
    meet(folder, "written", process_rank, world_size)
    steps, error, begin = 0, "", time.monotonic()
    try:
        while True:
            begin = time.monotonic()
            stop = torch.tensor(float((folder / "stop").exists()))
            dist.all_reduce(stop)  # both stop after the same step
            if stop.item():
                break
            with torch.no_grad():
                run_step(built, *modules)
            steps += 1
            (folder / f"steps.{process_rank}").write_text(str(steps))
    except RuntimeError as found:
        error = str(found)
    seconds = time.monotonic() - begin
    (folder / f"{process_rank}.json").write_text(
        json.dumps({"steps": steps, "error": error, "last_step_seconds": seconds})
    )
    os._exit(0)  # a group whose peer is gone would wait for it
