"""One of several gloo processes that found different costs; writes what it got when all agreed, and
how it heard of what went wrong.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from apsched.calibrate import ranks as job_module
from apsched.calibrate.ranks import Job, agreed
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.measured import MeasuredCosts, Price, Transfers
from apsched.costs.measured_file import dump_costs
from apsched.errors import InputError

TIMES_US = (10.0, 40.0, 11.0)
"""The measurements of each process rank; the second was disturbed."""


def found_by(rank: int) -> MeasuredCosts:
    """What a process rank found: in an order of its own, the last without one of the operations."""
    time_us = TIMES_US[rank]
    compute = {
        "mm": Price(time_us=time_us, source="measured"),
        "add": Price(time_us=2 * time_us, source="measured"),
    }
    if rank == 2:
        compute = {"mm": compute["mm"]}
    points = ((1024, time_us), (4096, 3 * time_us))
    return MeasuredCosts(
        device="cpu, made up",
        cluster="cpu",
        compute=dict(reversed(compute.items())) if rank == 1 else compute,
        transfers=(
            Transfers(
                kind="all_gather", num_ranks=3, num_nodes=1, source="measured", points=points
            ),
        ),
        launch_us={"all_gather": time_us},
        copies=((512, time_us),),
    )


def refused(rank: int) -> str:
    """Return the error of a process rank if one of them runs on another device."""
    costs = found_by(rank)
    try:
        agreed(replace(costs, device="another") if rank == 1 else costs)
    except InputError as error:
        return str(error)
    return ""


def failed(rank: int) -> str:
    """Return the error of a process rank if one of them cannot measure."""

    def measure(*args: object, **kwargs: object) -> None:
        if rank == 1:
            raise RuntimeError("out of memory")

    job_module.measure_compute = measure
    try:
        Job(rank=rank, device=torch.device("cpu"), connected=True).measure(
            [], "cpu", load_cluster("cpu")
        )
    except InputError as error:
        return str(error)
    return ""


def main(process_rank: int, world_size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=process_rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    report = {
        "costs": dump_costs(agreed(found_by(process_rank))).decode(),
        "refused": refused(process_rank),
        "failed": failed(process_rank),
    }
    (folder / f"{process_rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
