"""One of several gloo processes that train on two micro-batches in a row, and on both as one step,
compiled and as graphs in merged orders; writes how far apart they are as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import apsched
from apsched.capture.micro_batches import MicroBatchChoice
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.kinds import CollectiveKind
from apsched.models.build import BuiltModel, build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from apsched.problem.build import build_problem
from apsched.problem.permuted import brought_back, permuted
from apsched.problem.problem import Problem
from apsched.solver.interleave.merge import Merge, merged
from apsched.torch_compat.graphs import process_group_names
from apsched.writeback.write_back import write_back
from tests.helpers.problems.random_schedules import random_schedule
from tests.workers.training.compiler_worker import MESHES, QUICK, compare

NUM_STEPS, RATE = 3, 0.1
MERGES = [Merge(by_turns=True), Merge(), Merge(apart=3)]

Inputs = tuple[torch.Tensor, ...]


def preset(world_size: int) -> BuiltModel:
    return build(
        "llama3-debug",
        mesh=MeshSpec.parse(MESHES[world_size]),
        seq_len=32,
        options=ModelOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        materialize=True,
        num_layers=1,
    )


def trained(module: nn.Module, losses) -> list[torch.Tensor]:
    """Return losses, gradients and weights of a few steps; the module is as before."""
    start = [parameter.detach().clone() for parameter in module.parameters()]
    record = []
    for _ in range(NUM_STEPS):
        record.append(losses())
        for parameter in module.parameters():
            record.append(parameter.grad.to_local().clone())
            with torch.no_grad():
                parameter -= RATE * parameter.grad
            record.append(parameter.detach().to_local().clone())
            parameter.grad = None
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), start, strict=True):
            parameter.copy_(value)
    return record


def in_a_row(module: nn.Module, batches: list[Inputs]) -> list[torch.Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")

    def losses() -> torch.Tensor:
        found = []
        for batch in batches:
            loss = compiled(*batch)
            loss.backward()
            found.append(loss.detach())
        return found[0] + found[1]

    return trained(module, losses)


def as_one_step(module: nn.Module, batches: list[Inputs], **settings: object):
    torch._dynamo.reset()
    backend = apsched.backend(**{**QUICK, **settings})
    compiled = torch.compile(apsched.micro_batches(module, 2), backend=backend)

    def losses() -> torch.Tensor:
        loss = compiled(*batches)
        loss.backward()
        return loss.detach()

    return trained(module, losses), backend.results


def problem_of(graph, group_ranks) -> Problem:
    model = ClusterCostModel(load_cluster("h100"), group_ranks)
    return build_problem(export_graph(graph, model, group_ranks=group_ranks))


def gathered(problem: Problem) -> list[str]:
    """Return the parameters that a graph gathers, each as often as it does."""
    return sorted(
        one.module
        for one in problem.collectives
        if problem.keys[one.key].kind == CollectiveKind.ALL_GATHER and not one.on_path
    )


def num_reductions(problem: Problem) -> int:
    kinds = [problem.keys[one.key].kind for one in problem.collectives]
    return kinds.count(CollectiveKind.REDUCE_SCATTER)


def in_merged_orders(built: BuiltModel, batches: list[Inputs]) -> dict[str, object]:
    """Return how far graphs in merged orders, with random buckets, are from those as captured, and
    gradients added first from those reduced each.
    """
    several = replace(built, inputs=tuple(tensor for batch in batches for tensor in batch))
    records = {}
    unequal = []
    for reduce in ("each", "once"):
        choice = MicroBatchChoice(count=2, reduce=reduce)
        capture = capture_built(built, micro_batches=choice)
        forward, backward = capture.graphs
        loss, gradients = run_step(several, forward.module, backward.module)
        records[reduce] = [loss, *gradients.values()]
        problems = [problem_of(graph, process_group_names()) for graph in capture.graphs]
        for seed, merge in enumerate(MERGES):
            modules = []
            for graph, problem in zip(capture.graphs, problems, strict=True):
                order = merged(problem, merge)
                schedule = brought_back(
                    problem, order, random_schedule(permuted(problem, order), seed)
                )
                modules.append(write_back(graph.module, problem, schedule))
            loss, gradients = run_step(several, *modules)
            unequal.append(compare(records[reduce], [loss, *gradients.values()])["num_unequal"])
    return {"unequal": unequal, **compare(records["each"], records["once"])}


def main(process_rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meet'}",
        rank=process_rank,
        world_size=world_size,
        timeout=timedelta(seconds=200),
    )
    built = preset(world_size)
    batches = [built.inputs, tuple(tensor.flip(1) for tensor in built.inputs)]
    expected = in_a_row(built.module, batches)
    found, results = as_one_step(built.module, batches)
    num_parameters = len(list(built.module.parameters()))
    first_step = slice(1 + 2 * num_parameters)  # gradients and weights
    once, summed = as_one_step(built.module, batches, reduce="once", reshard_after_forward=True)
    report = {
        "compiled": compare(expected, found),
        "num_parameters": num_parameters,
        "parameters": sorted(name for name, _ in built.module.named_parameters()),
        "kept": [gathered(result.problem) for result in results],
        "again": [gathered(result.problem) for result in summed],
        "reduced": [num_reductions(result.problem) for result in results],
        "once": compare(expected[first_step], once[first_step])
        | {"reduced": [num_reductions(result.problem) for result in summed]},
        "graphs": [
            {
                "name": result.problem.name,
                "chains": max(result.problem.chains) + 1,
                "exact": result.round_trip_exact,
                "solved_by": result.answer.solved_by,
                "collectives": len(result.problem.collectives),
                "launches": result.best.num_launches,
            }
            for result in results
        ],
        "merged": in_merged_orders(built, batches),
    }
    (folder / f"{process_rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
