"""The job that a command runs in: alone, or one process rank of those that torchrun started."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import networkx as nx
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.calibrate.measure import Measured, device_at_hand, measure_compute
from apsched.calibrate.measure_collectives import measure_collectives
from apsched.costs.clusters.cluster import Cluster
from apsched.costs.measured import MeasuredCosts, merged
from apsched.errors import InputError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Device and process groups of a measurement."""

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
        """Return the times of the nodes of ``graphs`` on this device, and with a process group
        those of their collectives, agreed on by all process ranks.
        """
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
        return replace(
            measured,
            costs=agreed(replace(measured.costs, transfers=transfers, launch_us=launch_us)),
        )


@contextmanager
def job() -> Iterator[Job]:
    """Run the body as part of the job that torchrun started, if it did; a process group that runs
    already is used and left running.
    """
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


def agreed(costs: MeasuredCosts) -> MeasuredCosts:
    """Return the median of the costs of all process ranks; every process rank must call this, and
    gets the same costs. A process rank without others gets ``costs``.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return costs
    parts: list[MeasuredCosts | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, costs)
    return merged([part for part in parts if part is not None])


def all_measured(failure: Exception | None) -> None:
    """Raise on every process rank where one of them could not measure: who went on alone would wait
    for it for ever.
    """
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(
        reasons, None if failure is None else f"{type(failure).__name__}: {failure}"
    )
    failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        rank, reason = failed[0]
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise InputError(
            f"process rank {rank}{more} could not measure its operators: {reason}; repair that and"
            " measure again"
        ) from failure
