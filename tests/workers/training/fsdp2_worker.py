"""One of several gloo processes that train a model under ``fully_shard``, as torch has it and as a
schedule says; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

import apsched
from apsched.capture.keep import keep, keepable
from apsched.config import SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.fx.node_shards import node_groups
from apsched.graph.export.export import export_graph
from apsched.integrations.fsdp2 import apply_fsdp2, fsdp2_plan
from apsched.models.build import BuiltModel, build, initial_values
from apsched.models.layers import RotaryTable
from apsched.models.llama import Llama
from apsched.models.mesh import ALONE, MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.presets import PRESETS
from apsched.names import in_node
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, StepKind
from tests.helpers.graphs.eager_fsdp2 import digest, shards_of

SEQ_LEN, NUM_LAYERS, NUM_STEPS = 32, 3, 2
CASES: dict[str, dict[str, Any]] = {
    "free": {},
    "near": {"max_prefetch": 30},
    "kept": {"reshard_after_forward": False},
    "some kept": {"units": ("layers.2", "norm+output")},
}
IN_NODE = {"units": ("layers.1", "layers.2"), "node_size": 2}
"""A case of its own, for four process ranks."""


def built_model(
    world_size: int, *, reshard_after_forward: bool = True, num_replicas: int = 1
) -> BuiltModel:
    options = ModelOptions(
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        reshard_after_forward=reshard_after_forward,
    )
    return build(
        "llama3-debug",
        mesh=MeshSpec(fsdp=world_size // num_replicas, replicate=num_replicas),
        seq_len=SEQ_LEN,
        num_layers=NUM_LAYERS,
        options=options,
        materialize=True,
    )


def eager_model(
    world_size: int,
    node_size: int = 0,
    units: tuple[str, ...] = (),
    *,
    root_has_all: bool = False,
    num_replicas: int = 1,
) -> Llama:
    """Return the model of :func:`built_model` under ``fully_shard``: each block, norm with output,
    the root with the embedding, or with ``root_has_all`` with all of these. The blocks ``units``
    are resharded to ``node_size`` process ranks. With several replicas it is HSDP.
    """
    config = PRESETS["llama3-debug"]
    with torch.device("meta"):
        model = Llama(
            config,
            seq_len=SEQ_LEN,
            dtype=torch.float32,
            tp=ALONE,
            global_tokens=SEQ_LEN * world_size,
        )
        model.layers.extend(
            type(model.layers[0])(config) for _ in range(NUM_LAYERS - len(model.layers))
        )
    model = model.to_empty(device="cpu")
    values = initial_values(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(name, parameter.shape))
    for table in (child for child in model.modules() if isinstance(child, RotaryTable)):
        table.fill(torch.device("cpu"))
    mesh = None
    if num_replicas > 1:
        sizes = (num_replicas, world_size // num_replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    for k, block in enumerate(model.layers):
        resharded = node_size and f"layers.{k}" in units
        fully_shard(block, mesh=mesh, reshard_after_forward=node_size if resharded else None)
    if not root_has_all:
        fully_shard([model.norm, model.output], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for unit in (child for child in model.modules() if isinstance(child, FSDPModule)):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def watched(model: Llama) -> list[str]:
    """Return the list that fills with what happens: gathers, reductions, their ends, of HSDP behind
    the all-reduce, and units that begin to compute.
    """
    events: list[str] = []

    def gather(name: str) -> DefaultAllGather:
        class Watched(DefaultAllGather):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                events.append(f"gather {name}")
                return super().__call__(*args, **kwargs)

        return Watched()

    def reduce(name: str) -> DefaultReduceScatter:
        class Watched(DefaultReduceScatter):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                events.append(f"reduce {name}")
                return super().__call__(*args, **kwargs)

        return Watched()

    units = {"(root)": model, "norm+output": model.norm}
    units |= {f"layers.{k}": block for k, block in enumerate(model.layers)}
    for name, module in units.items():
        module.set_custom_all_gather(gather(name))
        module.set_custom_reduce_scatter(reduce(name))
        module.set_all_reduce_hook(lambda _, name=name: events.append(f"all-reduce {name}"))
        module.register_forward_pre_hook(lambda *_, name=name: events.append(f"compute {name}"))
        module.register_full_backward_pre_hook(
            lambda *_, name=name: events.append(f"compute {name}")
        )
    return events


def trained(model: Llama, inputs: tuple[torch.Tensor, ...], events: list[str]) -> dict[str, Any]:
    """Train for some steps; returns the losses, what happened in forward and backward of the last
    step, and digests of its gradients and of the weights behind it.
    """
    losses: list[float] = []
    seen: list[list[str]] = []
    gradients = ""
    for _ in range(NUM_STEPS):
        events.clear()
        loss = model(*inputs)
        forward = list(events)
        events.clear()
        loss.backward()
        seen = [forward, list(events)]
        losses.append(loss.item())
        gradients = digest({name: p.grad.to_local() for name, p in model.named_parameters()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.5)
                parameter.grad = None
    weights = digest(shards_of(model))
    return {"losses": losses, "seen": seen, "gradients": gradients, "weights": weights}


def unit_of(parameter: str) -> str:
    """Return the unit of a parameter, by its name alone."""
    first, second = parameter.split(".")[:2]
    return {"norm": "norm+output", "output": "norm+output", "tok_embeddings": "(root)"}.get(
        first, f"{first}.{second}"
    )


def in_schedule(problem: Problem, schedule: Schedule, kind: str) -> list[tuple[str, int]]:
    """Return unit of each launch of a kind, in order, and the compute nodes before it: read off the
    steps, one by one.
    """
    done, found = 0, []
    starts = {c.start: k for k, c in enumerate(problem.collectives)}
    for step in schedule.steps:
        members: tuple[int, ...] = ()
        if step.kind is StepKind.START:
            members = schedule.buckets[step.index].members
        elif step.kind is StepKind.NODE and step.index in starts:
            members = (starts[step.index],)
        elif step.kind is StepKind.NODE and step.index in problem.captured_order:
            done += 1
        if members and problem.keys[problem.collectives[members[0]].key].kind == kind:
            (unit,) = {unit_of(problem.collectives[c].module) for c in members}
            found.append((unit, done))
    return found


@cache
def captured(
    world_size: int,
    reshard_after_forward: bool,
    units: tuple[str, ...] = (),
    node_size: int = 0,
) -> tuple[tuple[torch.Tensor, ...], list[Problem]]:
    """Return inputs of the model, and its forward and backward graph as problems (those of process
    rank 0), with the parameters of ``units`` kept, or resharded to ``node_size`` process ranks.
    """
    built = built_model(world_size, reshard_after_forward=reshard_after_forward)
    problems: list[Any] = [None, None]
    if dist.get_rank() == 0:
        capture = capture_built(built)
        nodes = node_groups(capture.group_ranks, node_size) if node_size else {}
        names = (k.name for k in keepable(*capture.graphs))
        chosen = [name for name in names if unit_of(name) in units]
        kept = [in_node(name) for name in chosen] if node_size else chosen
        ranks = {**capture.group_ranks, **{node.name: node.ranks for node in nodes.values()}}
        costs = ClusterCostModel(load_cluster("h100"), ranks)
        problems = [
            build_problem(export_graph(graph, costs, group_ranks=ranks))
            for graph in keep(*capture.graphs, kept, nodes)
        ]
    dist.broadcast_object_list(problems, src=0)
    return built.inputs, problems


def run_case(world_size: int, name: str, chosen: dict[str, Any]) -> dict[str, Any]:
    chosen = dict(chosen)
    units, node_size = chosen.pop("units", ()), chosen.pop("node_size", 0)
    again = chosen.pop("reshard_after_forward", True)
    inputs, problems = captured(world_size, again, units, node_size)
    model = eager_model(world_size, node_size, units)
    chosen |= {"max_compute_move": 0, "options": SolveOptions(budget=0.0)}
    results: list[Any] = [None, None]
    if dist.get_rank() == 0:
        results = [apsched.solve(p, plan=fsdp2_plan(model, p), **chosen) for p in problems]
    dist.broadcast_object_list(results, src=0)
    settings = apply_fsdp2(model, results)
    found = trained(model, inputs, watched(model))
    compute_order = {p.name: {node: k for k, node in enumerate(p.compute_order)} for p in problems}
    needs: dict[str, dict[str, int]] = {p.name: {} for p in problems}
    for p in problems:
        for c, needed in zip(p.collectives, p.needs, strict=True):
            if p.keys[c.key].kind == "all_gather" and needed:
                unit = unit_of(c.module)
                needs[p.name][unit] = min(
                    needs[p.name].get(unit, 10**9), compute_order[p.name][needed[0]]
                )
    return found | {
        "gathers": [in_schedule(r.problem, r.schedule, "all_gather") for r in results],
        "reductions": in_schedule(results[1].problem, results[1].schedule, "reduce_scatter"),
        "needs": [needs[p.name] for p in problems],
        "settings": asdict(settings),
        "in flight at most": model._get_fsdp_state()._comm_ctx.reduce_scatter_max_input_buffers,
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    report: dict[str, Any] = {
        name: run_case(world_size, name, chosen) for name, chosen in CASES.items()
    }
    if world_size == 4:
        report["in node"] = run_case(world_size, "in node", IN_NODE)
    model = eager_model(world_size)
    report["untouched"] = trained(model, captured(world_size, True)[0], watched(model))
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
