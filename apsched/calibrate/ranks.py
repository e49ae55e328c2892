"""The job that a command runs in: alone, or one process rank of those that torchrun started."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import networkx as nx
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.calibrate.agree import agreed, all_measured
from apsched.calibrate.measure import Measured, device_at_hand, measure_compute
from apsched.calibrate.measure_collectives import measure_collectives
from apsched.costs.cluster import Cluster
from apsched.costs.measured import MeasuredCosts

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Where costs are measured."""

    rank: int
    device: torch.device
    connected: bool
    """A real process group runs."""

    def measure(
        self,
        graphs: Sequence[tuple[GraphModule, nx.DiGraph]],
        cluster_name: str,
        cluster: Cluster,
        known: MeasuredCosts | None = None,
        *,
        fused: bool = True,
    ) -> Measured:
        """Return what the nodes of ``graphs`` take here, and with a process group their collectives, agreed on by all process ranks."""
        if not self.connected:
            return measure_compute(graphs, self.device, cluster_name, known, fused=fused)
        measured, failure = None, None
        try:
            measured = measure_compute(graphs, self.device, cluster_name, known, fused=fused)
        except Exception as error:  # whatever it is, the other process ranks must hear of it
            failure = error
        all_measured(failure)
        assert measured is not None
        transfers, launch_us = measure_collectives([dag for _, dag in graphs], cluster, self.device)
        return replace(measured, costs=agreed(replace(measured.costs, transfers=transfers, launch_us=launch_us)))


@contextmanager
def job() -> Iterator[Job]:
    """Run the body as part of the job that torchrun started, if it did; a process group that runs already is used and left running."""
    connected = dist.is_available() and dist.is_initialized()
    started = not connected and all(name in os.environ for name in _TORCHRUN)
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if started:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    real = started or (connected and dist.get_backend() != "fake")
    try:
        yield Job(rank=dist.get_rank() if real else 0, device=device_at_hand(), connected=real)
    finally:
        if started:
            dist.destroy_process_group()
