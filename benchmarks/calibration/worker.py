"""One of several gloo processes: run ``llama3-debug`` under the profiler, calibrate on every other
step, predict the rest and a schedule.

usage: calibration_worker.py PROCESS_RANK WORLD_SIZE FOLDER NUM_STEPS
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from apsched.calibrate.measure_collectives import part_ranks
from apsched.calibrate.profile.predict import Prediction, predicted
from apsched.calibrate.profile.profile import Profile, profile_costs
from apsched.calibrate.profile.trace import load_trace
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.graph.reprice import repriced
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from apsched.problem.build import build_problem
from apsched.schedule.simulate import simulate
from apsched.solver import solve
from apsched.torch_compat.gloo import avoid_coalesced_gathers
from apsched.units import ticks_to_us
from apsched.writeback.write_back import write_back
from benchmarks.calibration.second_profile import second_profile

CPU = load_cluster("cpu")
SEQ_LEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number, measured and predicted, in microseconds."""

    what: str
    measured_us: float
    predicted_us: float


def main(process_rank: int, world_size: int, folder: Path, num_steps: int) -> None:
    """Run the job and write the report of this process rank to ``FOLDER``; that of rank 0 is
    ``0.json``.
    """
    avoid_coalesced_gathers()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=process_rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )
    options = ModelOptions(param_dtype=torch.float32, reduce_dtype=torch.float32)
    built = build(
        "llama3-debug",
        mesh=MeshSpec.parse(f"fsdp={world_size}"),
        seq_len=SEQ_LEN,
        options=options,
        materialize=True,
    )
    capture = capture_built(built)
    modules = [captured.module for captured in capture.graphs]
    formulas = ClusterCostModel(CPU, capture.group_ranks)
    dags = [
        export_graph(captured, formulas, group_ranks=capture.group_ranks, cluster_name="cpu")
        for captured in capture.graphs
    ]

    others = max(num_steps // 4, 4)
    plain_us = run(lambda: run_step(built, *modules), others)
    run(lambda: run_step(built, *modules), num_steps, folder / f"trace.{process_rank}.json")
    figures: list[Figure] = []
    found: list[Any] = [None]
    if process_rank == 0:
        traces = [load_trace(folder / f"trace.{rank}.json") for rank in range(world_size)]
        even, odd = (
            profile_costs(dags, [replace(t, steps=t.steps[k::2]) for t in traces], CPU, "cpu")
            for k in (0, 1)
        )
        figures += _figures(odd, predicted(dags, even.costs, CPU))
        problems = [build_problem(repriced(dag, even.costs, CPU)) for dag in dags]
        answers = [solve(problem, Caps(), SolveOptions(budget=2)) for problem in problems]
        schedules = [answer.best.schedule for answer in answers if answer.best is not None]
        promised_us = sum(
            ticks_to_us(simulate(*pair).step_time_ticks)
            for pair in zip(problems, schedules, strict=True)
        )
        found = [(problems, schedules, promised_us)]
    dist.broadcast_object_list(found)
    problems, schedules, promised_us = found[0]
    fast = [write_back(*given) for given in zip(modules, problems, schedules, strict=True)]
    fast_us = run(lambda: run_step(built, *fast), others, folder / f"fast.{process_rank}.json")
    fast_plain_us = run(lambda: run_step(built, *fast), others)
    figures.append(
        Figure(what="step of the schedule found", measured_us=fast_us, predicted_us=promised_us)
    )
    report = {"figures": [asdict(figure) for figure in figures], "plain_us": plain_us}
    report["fast_plain_us"] = fast_plain_us
    (folder / f"{process_rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def _figures(measured: Profile, said: Prediction) -> list[Figure]:
    (group,) = measured.transfer_us
    return [
        Figure(what="step", measured_us=measured.step_us, predicted_us=said.step_us),
        Figure(
            what="compute stream", measured_us=measured.compute_us, predicted_us=said.compute_us
        ),
        Figure(
            what="group's stream",
            measured_us=measured.transfer_us[group],
            predicted_us=said.transfer_us[group],
        ),
    ]


def run(step: Callable[[], object], num_steps: int, trace: Path | None = None) -> float:
    """Return the mean over the middle half of ``num_steps`` steps, after one to warm up; profiled
    where a trace is wanted.
    """
    times: list[float] = []

    def timed() -> None:
        dist.barrier()
        part_ranks()
        begin = time.perf_counter_ns()
        with torch.no_grad():
            step()
        times.append((time.perf_counter_ns() - begin) / 1e3)

    if trace is None:
        for _ in range(1 + num_steps):
            timed()
    else:
        second_profile(timed, num_steps, trace)
    dist.barrier()
    ordered = sorted(times[-num_steps:])
    return fmean(ordered[num_steps // 4 : num_steps - num_steps // 4])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
