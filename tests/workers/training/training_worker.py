"""One of four gloo processes that train presets with captured and with rewritten graphs; writes
what it found as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.build import BuiltModel, build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import descend, forward_inputs, run_step
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule
from apsched.solver.solve import solve
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.training_cases import CASES, NUM_STEPS, Case
from tests.helpers.problems.random_schedules import compute_moves, layer_schedule, random_schedule

ScheduleMaker = Callable[[Problem], Schedule]


def layer_of(module: str) -> str:
    """``layers.N`` of a module's name, or what stands before its first point."""
    return re.match(r"(layers\.\d+|[^.]*)", module).group()


def solved_with_moves(problem: Problem) -> Schedule:
    """Return what process rank 0 solves with compute free to move, on every process rank."""
    answer = [None]
    if dist.get_rank() == 0:
        best = solve(problem, Caps(max_compute_move=200), SolveOptions(budget=0.5)).best
        answer = [best.schedule]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


MAKERS: dict[str, ScheduleMaker] = {
    "layers": lambda problem: layer_schedule(problem, layer_of),
    "random": lambda problem: random_schedule(problem, 1, max_members=12),
    "solved": solved_with_moves,
}

Record = list[dict[str, torch.Tensor]]
"""For each training step the loss and the gradients, by name."""


def parameters_of(built: BuiltModel) -> list[torch.Tensor]:
    return forward_inputs(built)[: len(list(built.module.parameters()))]


@torch.no_grad()
def train(built: BuiltModel, forward: GraphModule, backward: GraphModule) -> Record:
    """Train for some steps, and put the parameters back."""
    start = [parameter.clone() for parameter in parameters_of(built)]
    record = []
    for _ in range(NUM_STEPS):
        loss, gradients = run_step(built, forward, backward)
        record.append(
            {
                "loss": loss.clone(),
                **{name: gradient.clone() for name, gradient in gradients.items()},
            }
        )
        descend(built, gradients, rate=0.1)
    for parameter, value in zip(parameters_of(built), start, strict=True):
        parameter.copy_(value)
    return record


def run_case(case: Case) -> dict[str, dict[str, object]]:
    """Train with the captured graphs, then with those that each maker's schedules give; return how
    far apart they are.
    """
    options = ModelOptions(
        param_dtype=getattr(torch, case.param_dtype), reduce_dtype=getattr(torch, case.reduce_dtype)
    )
    built = build(
        case.preset,
        mesh=MeshSpec.parse(case.mesh),
        seq_len=32,
        options=options,
        materialize=True,
        num_layers=2,
    )
    capture = capture_built(built)
    modules = [captured.module for captured in capture.graphs]
    expected = train(built, *modules)
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    problems = [
        build_problem(export_graph(captured, costs, group_ranks=capture.group_ranks))
        for captured in capture.graphs
    ]
    report = {}
    for name, make in MAKERS.items():
        schedules = [make(problem) for problem in problems]
        rewritten = [write_back(*given) for given in zip(modules, problems, schedules, strict=True)]
        report[name] = compare(expected, train(built, *rewritten)) | {
            "num_buckets": sum(len(s.buckets) for s in schedules),
            "num_moved": [
                sum(map(bool, compute_moves(*given)))
                for given in zip(problems, schedules, strict=True)
            ],
        }
    return report


def compare(expected: Record, found: Record) -> dict[str, object]:
    """Say how far apart two trainings are: relative to the largest entry of each tensor."""
    pairs = [
        (name, step[name], other[name])
        for step, other in zip(expected, found, strict=True)
        for name in step
    ]
    distance = {
        name: max(
            ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item()
            for n, a, b in pairs
            if n == name and a.numel()
        )
        for name in expected[0]
        if expected[0][name].numel()
    }
    return {
        "unequal": sorted({name for name, a, b in pairs if not torch.equal(a, b)}),
        "largest_distance": max(distance.values()),
        "losses": [step["loss"].item() for step in expected],
        "finite": all(bool(a.isfinite().all()) for _, a, _ in pairs),
    }


def main(process_rank: int, world_size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=process_rank,
        world_size=world_size,
        timeout=timedelta(seconds=600),
    )  # it compiles the solver first
    report = {str(case): run_case(case) for case in CASES}
    dist.barrier()
    (folder / f"{process_rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
