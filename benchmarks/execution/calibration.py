"""The costs of operators, messages and contention on this link, updated by profiles of steps as
captured.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import networkx as nx
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity, profile

from apsched.calibrate.measure_collectives import part_ranks
from apsched.calibrate.profile.profile import profile_costs
from apsched.calibrate.profile.trace import load_trace
from apsched.calibrate.ranks import job
from apsched.capture.captured import Capture
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.measured import MeasuredCosts, completed
from apsched.costs.measured_model import MeasuredCostModel
from apsched.graph.export.export import export_graph
from apsched.kinds import NodeKind
from apsched.models.build import BuiltModel
from apsched.models.training import run_step
from apsched.problem.contention import Contention
from benchmarks.execution.compute_only import without_collectives
from benchmarks.execution.machine.load import (
    MOST_TRIES,
    Load,
    everywhere,
    least_disturbed,
    others_cores,
    undisturbed,
)
from benchmarks.execution.queued_gathers import with_queued_gathers
from benchmarks.execution.slowdown import Beside, Messages, Slowdown, contention_of

CPU = load_cluster("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The costs that follow from some observations."""

    queues: MeasuredCostModel
    """Where gathers queue."""
    no_queues: MeasuredCostModel
    """Where none does."""
    contention: Contention


class Calibration:
    """The times of operators and messages, and the mutual slowdown of compute and collectives,
    measured on this link.

    The speed of a virtual machine changes by some per cent from one minute to the next. So each
    round of timed steps also observes steps: schedules are solved with the costs observed before,
    and predicted with the times of operators and messages in that round.
    """

    def __init__(
        self, built: BuiltModel, capture: Capture, folder: Path, *, most_tries: int = MOST_TRIES
    ) -> None:
        self._most_tries = most_tries
        self._built, self._capture, self._folder = built, capture, folder
        self._formulas = ClusterCostModel(CPU, capture.group_ranks)
        self._dags = [
            export_graph(
                captured, self._formulas, group_ranks=ranks_of(capture), cluster_name="cpu"
            )
            for captured in capture.graphs
        ]
        graphs = list(zip(captured_modules(capture), self._dags, strict=True))
        with job() as here:
            self._measured, beside_measuring = least_disturbed(
                lambda: here.measure(graphs, "cpu", CPU, fused=False).costs, most_tries
            )
        self.cores = [beside_measuring]
        """Cores that others kept busy during each part."""
        alone = [without_collectives(module) for module in captured_modules(capture)]
        self._slowdown = Slowdown(partial(run, built, alone))
        self._beside: list[Mapping[Messages, Beside]] = []
        self.steps: list[tuple[float, float]] = []
        """Step times in microseconds beside the profiler, of the slowest process rank each, and the
        cores that others kept busy.
        """

    def observe(self) -> None:
        """Profile a step as captured, after another one like it, and run steps beside messages; all
        process ranks call this.

        The call first collects the garbage of earlier profiles, which slowed steps by a fifth.
        """
        gc.collect()
        modules = captured_modules(self._capture)
        step = partial(run, self._built, modules)
        timed_step(step)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            before = Load.now()
            mine = timed_step(step), Load.now().since(before)
        profiler.export_chrome_trace(str(self._trace(len(self.steps), dist.get_rank())))
        of_ranks = everywhere(mine)
        self.steps.append(
            (max(time_us for time_us, _ in of_ranks), others_cores([load for _, load in of_ranks]))
        )
        self._beside.append(self._slowdown.sample())

    def found(self, since: int) -> Found:
        """Return the costs by the undisturbed steps from ``since`` on; all process ranks call this.

        A profile has the times of operators and messages in a step; copies are timed alone, buckets
        and gathers one behind the other.
        """
        counted = self._counted(since, len(self.steps))
        traces = [
            load_trace(self._trace(k, rank))
            for rank in range(dist.get_world_size())
            for k in counted
        ]
        alone = profile_costs(self._dags, traces, CPU, "cpu").costs
        queued, beside_queues = least_disturbed(
            lambda: with_queued_gathers(alone), self._most_tries
        )
        self.cores += [fmean(self.steps[k][1] for k in counted), beside_queues]
        latency_us = fmean(transfers.points[0][1] for transfers in alone.transfers)
        return Found(
            queues=self._model(queued),
            no_queues=self._model(alone),
            contention=contention_of(
                [self._beside[k] for k in counted], _compute_us(self._dags, alone), latency_us
            ),
        )

    def _model(self, costs: MeasuredCosts) -> MeasuredCostModel:
        return MeasuredCostModel(
            completed(costs, self._measured), self._formulas, self._capture.group_ranks
        )

    def profiled_us(self, begin: int, end: int) -> list[float]:
        """Return the undisturbed times of these steps."""
        return [self.steps[k][0] for k in self._counted(begin, end)]

    def _counted(self, begin: int, end: int) -> list[int]:
        return [begin + k for k in undisturbed([cores for _, cores in self.steps[begin:end]])]

    def _trace(self, step: int, process_rank: int) -> Path:
        return self._folder / f"trace.{step}.{process_rank}.json"


def _compute_us(dags: Sequence[nx.DiGraph], costs: MeasuredCosts) -> float:
    records = (dag.nodes[rank]["record"] for dag in dags for rank in range(dag.number_of_nodes()))
    return sum(
        costs.compute[r.operation].time_us
        for r in records
        if r.kind is NodeKind.COMPUTE and r.operation in costs.compute
    )


def captured_modules(capture: Capture) -> tuple[GraphModule, GraphModule]:
    """Return the modules of both graphs, as captured."""
    forward, backward = capture.graphs
    return forward.module, backward.module


def ranks_of(capture: Capture) -> dict[str, tuple[int, ...]]:
    """Return the process ranks of every group."""
    return {name: ranks for name, ranks in capture.group_ranks.items() if ranks}


def timed_step(step: Callable[[], object]) -> float:
    """Return the microseconds of ``step``, which begins after a barrier and after work that takes
    the process ranks apart, as in a job.

    Some schedules begin with a large gather. Right after a barrier it takes two thirds of its time
    in a job.
    """
    dist.barrier()
    part_ranks()
    begin = time.perf_counter_ns()
    step()
    return (time.perf_counter_ns() - begin) / 1e3


def run(
    built: BuiltModel, modules: Sequence[GraphModule]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run a step; returns the loss, and the gradients by name."""
    forward, backward = modules
    with torch.no_grad():
        return run_step(built, forward, backward)
