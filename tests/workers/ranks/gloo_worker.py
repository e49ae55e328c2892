"""One of several gloo processes that run a preset under the profiler, and measure it; writes
traces, graphs and what was measured.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

import apsched
from apsched.artifacts.replay import replay
from apsched.artifacts.schedule_file import load_schedule
from apsched.capture.captured import Capture
from apsched.cli import main as main_of_apsched
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.measured_file import dump_costs
from apsched.graph.export.export import export_graph
from apsched.graph.graph_file import save_graph
from apsched.models.build import BuiltModel, build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from apsched.pipeline.load import loaded_graph
from apsched.pipeline.steps import rewrite
from apsched.progress import Progress

NUM_STEPS = 8
OPTIONS = ModelOptions(param_dtype=torch.float32, reduce_dtype=torch.float32)


def main(process_rank: int, world_size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=process_rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    built = build(
        "llama3-debug",
        mesh=MeshSpec.parse(f"fsdp={world_size}"),
        seq_len=512,
        options=OPTIONS,
        materialize=True,
    )
    capture = capture_built(built)
    forward, backward = (captured.module for captured in capture.graphs)

    def step() -> None:
        dist.barrier()
        with torch.no_grad():
            run_step(built, forward, backward)

    step()
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=NUM_STEPS),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(
            str(folder / f"trace.{process_rank}.json")
        ),
    ) as profiler:
        for _ in range(1 + NUM_STEPS):
            step()
            profiler.step()
    if process_rank == 0:
        costs = ClusterCostModel(load_cluster("cpu"), capture.group_ranks)
        for captured in capture.graphs:
            save_graph(
                export_graph(captured, costs, group_ranks=capture.group_ranks, cluster_name="cpu"),
                folder / f"step.{captured.name}.graph",
            )
        assert (
            main_of_apsched(
                ["solve", str(folder / "step.graph"), "--budget", "0.1", "-o", str(folder / "run")]
            )
            == 0
        )
    dist.barrier()
    profile_solved(built, capture, process_rank, folder)
    model = apsched.measure_costs(forward, cluster="cpu", fused=False)
    again = apsched.measure_costs(forward, cluster="cpu", known=model.costs, fused=False)
    fast = apsched.optimize(forward, cost_model=model)
    report = {
        "costs": dump_costs(model.costs).decode(),
        "compute_again": {name: price.time_us for name, price in again.costs.compute.items()},
        "compute": {name: price.time_us for name, price in model.costs.compute.items()},
        "order": [node.name for node in fast.graph.nodes],
        "shares": dict(fast.apsched_result.cost_shares),
        "exact": fast.apsched_result.round_trip_exact,
    }
    (folder / f"{process_rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def profile_solved(built: BuiltModel, capture: Capture, process_rank: int, folder: Path) -> None:
    """Run the schedules that ``apsched solve`` wrote, on the rewritten graphs, and write a trace of
    that.
    """
    costs = ClusterCostModel(load_cluster("cpu"), capture.group_ranks)
    modules = []
    for captured in capture.graphs:
        graph = loaded_graph(
            captured,
            costs,
            cluster="cpu",
            group_ranks=capture.group_ranks,
            device_memory_bytes=None,
            progress=Progress(quiet=True),
        )
        schedule_file = load_schedule(folder / "run" / f"{captured.name}.schedule.json")
        modules.append(
            rewrite(graph, replay(graph.problem, schedule_file), Progress(quiet=True)).module
        )
    with (
        torch.no_grad(),
        profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=2),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(
                str(folder / f"solved.{process_rank}.json")
            ),
        ) as profiler,
    ):
        for _ in range(3):
            dist.barrier()
            run_step(built, *modules)
            profiler.step()
