"""One of several gloo processes that train TorchTitan's debug model through its graph trainer, with
and without apsched; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``

The trainer itself wants CUDA; what is used of it is what traces a step, puts it through a pass
pipeline and runs it.
"""

import copy
import hashlib
import json
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.llama3 import model_registry
from torchtitan.experiments.graph_trainer.registry import (
    MEMORY_POLICY_REGISTRY,
    POST_INIT_HOOKS,
    register_memory_policy,
)
from torchtitan.experiments.graph_trainer.simple_fsdp import (
    MixedPrecisionPolicy,
    _wrap_class_cache,
    data_parallel,
)
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer

from apsched.compiler import schedule_captured
from apsched.compiler.ranks.problem_digest import answer_digest
from apsched.fx.collectives import is_collective
from apsched.integrations.torchtitan import register
from apsched.solver import solve_requested

NUM_LAYERS, NUM_STEPS, SEQ_LEN = 2, 3, 32
CASES = {
    "free": {},
    "bitwise": {"bitwise": True},
    "keep none": {"keep": "none"},
    "keep one block": {"keep": [r"layers\.1\..*"]},
    "keep all": {"keep": "all"},
    "keep auto": {"keep": "auto"},
    "keep all, 31.5 MiB": {"keep": "all", "memory_cap": "31.5MiB"},
    "keep auto, 31.5 MiB": {"keep": "auto", "memory_cap": "31.5MiB"},
}
"""Name -> settings of the pipeline."""
IN_NODES = {
    "two nodes, keep none": {"keep": "none"},
    "two nodes, resharded": {"keep": [".* @node"]},
    "two nodes, keep auto": {"keep": "auto", "memory_cap": "30MiB"},
}
"""Cases on one mesh of four process ranks, two on a node; reductions are those of eager FSDP2."""
TWO_NODES = 'base = "h100-tcpx"\nname = "two-nodes"\nranks_per_node = 2\n'
ON_TWO = ("keep one block", "keep all, 31.5 MiB")
"""Cases that run on two processes only."""
SOLVED: list[str] = []
"""Digests of what the solver was called for, for joint graphs of the case that runs."""
ACCUMULATED = {
    "accumulated": None,
    "joined": {"micro_batches": 2},
    "joined, keep all": {"micro_batches": 2, "keep": "all"},
    "joined, reduced once": {"micro_batches": 2, "reduce": "once"},
}
"""Cases with two micro-batches; without settings one after the other, untouched."""


def debug_config() -> Any:
    config = copy.deepcopy(model_registry("debugmodel", attn_backend="sdpa").model)
    config.layers = config.layers[:NUM_LAYERS]
    return config


def sharded_model(config: Any, world_size: int, *, replicated: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    annotate_module_fqns(model)
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    if not replicated:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
        return data_parallel(model, mesh, "fully_shard", policy)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    return data_parallel(
        model, mesh, "hybrid_shard", policy
    )  # every sum is one of two values, which has one order


@register_memory_policy("saving attention on the CPU")
def save_attention(gm: torch.fx.GraphModule, *, config: Any) -> torch.fx.GraphModule:
    """TorchTitan's default knows attention by the names that it has on CUDA, and refuses to
    recompute others.
    """
    gm = MEMORY_POLICY_REGISTRY["default"](gm, config=config)
    for node in gm.graph.nodes:
        if "flash_attention_for_cpu" in str(node.target) and "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return gm


def graph_trainer(
    model: torch.nn.Module, model_config: Any, pipeline: str | None, num_micro_batches: int
) -> GraphTrainer:
    """Return a trainer with just what a step needs; without a pipeline the traced graph runs as it
    is.
    """
    trainer: Any = object.__new__(GraphTrainer)
    trainer.loss_fn = CrossEntropyLoss.Config().build()
    trainer.train_context = nullcontext
    trainer.parallel_dims = SimpleNamespace(pp_enabled=False, cp_enabled=False)
    trainer.model_parts, trainer.model_config = [model], model_config
    trainer.ntokens_seen = 0
    trainer.gradient_accumulation_steps = num_micro_batches
    trainer._traced_step = None
    compile_config = GraphTrainerCompileConfig(
        enable=True,
        mode="aot_fx_trace",
        enable_passes=pipeline is not None,
        pass_pipeline=pipeline or "default",
        memory_policy="saving attention on the CPU",
        disable_passes=["cudagraph_pass"],
    )
    trainer.config = SimpleNamespace(
        compile=compile_config,
        model_spec=SimpleNamespace(model=model_config),
        parallelism=SimpleNamespace(
            pipeline_parallel_degree=1,
            fsdp_reshard_after_forward="default",
            spmd_backend="default",
        ),
    )
    if pipeline is not None:
        POST_INIT_HOOKS[pipeline](trainer)
    return trainer


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 2048, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(
    world_size: int,
    pipeline: str | None,
    num_micro_batches: int = 1,
    *,
    replicated: bool | None = None,
) -> dict[str, Any]:
    """Train for some steps; returns the losses, a hash of the weights after each, and the trainer's
    graph.
    """
    config = debug_config()
    replicated = world_size == 4 if replicated is None else replicated
    model = sharded_model(config, world_size, replicated=replicated)
    trainer = graph_trainer(model, config, pipeline, num_micro_batches)
    batches = [batch(dist.get_rank() + world_size * k) for k in range(num_micro_batches)]
    parameters = list(model.parameters())
    valid = torch.tensor(float(SEQ_LEN * world_size))
    losses, weights = [], []
    for _ in range(NUM_STEPS):
        loss = torch.zeros(())
        for inputs, labels in batches:
            loss += trainer.forward_backward_step(
                input_dict={"input": inputs}, labels=labels, global_valid_tokens=valid
            ).detach()
        losses.append(loss.item())
        digest = hashlib.sha256()
        with torch.no_grad():
            for parameter in parameters:
                local = parameter.to_local()
                local.sub_(parameter.grad.to_local(), alpha=0.1)
                parameter.grad = None
                digest.update(local.contiguous().numpy().tobytes())
        weights.append(digest.hexdigest())
    gm = trainer._traced_step.gm
    return {
        "losses": losses,
        "weights": weights,
        "launches": sum(is_collective(node) for node in gm.graph.nodes),
        "state": trainer._traced_step.state_fqns,
        "result": gm.meta.get("apsched_result"),
    }


def solve_and_note(problem: Any, caps: Any, options: Any, **more: Any) -> Any:
    """Stands in for the solver of graphs in a job."""
    SOLVED.append(answer_digest(problem, caps, options))
    return solve_requested(problem, caps, options, **more)


def told(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a report can hold: of the result its buckets, by name of the parameter."""
    result = found.pop("result")
    if result is None:
        return found
    problem = result.problem
    members = [
        [problem.collectives[c] for c in bucket.members] for bucket in result.best.schedule.buckets
    ]
    gathered = [c for c in problem.collectives if problem.keys[c.key].kind == "all_gather"]
    return found | {
        "again": sorted(c.module for c in gathered if c.direction == "backward"),
        "sizes": sorted(
            {
                (c.direction, problem.keys[c.key].group_size, c.may_share)
                for c in problem.collectives
                if c in gathered
            }
        ),
        "buckets": [[problem.keys[m[0].key].kind, [c.module for c in m]] for m in members],
        "named": all(c.module for c in problem.collectives),
        "directions": sorted(
            {f"{c.direction} {problem.keys[c.key].kind}" for c in problem.collectives}
        ),
        "exact": result.round_trip_exact,
        "step_us": result.step_time_us,
        "solved": list(SOLVED),
        "reductions": len(problem.collectives) - len(gathered),
        "micro_batches": len({chain for chain in problem.chains if chain >= 0}),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
    )
    schedule_captured.solve_requested = solve_and_note
    report = {"untouched": told(trained(world_size, None))}
    for name, settings in CASES.items():
        if world_size > 2 and name in ON_TWO:
            continue
        SOLVED.clear()
        register(budget=0.0, **settings)
        report[name] = told(trained(world_size, "apsched"))
    for name, settings in ACCUMULATED.items() if world_size == 2 else ():
        if settings is not None:
            register(budget=0.0, **settings)
        report[name] = told(trained(world_size, settings and "apsched", 2))
    cluster = folder / f"two_nodes_{rank}.toml"
    cluster.write_text(TWO_NODES)
    _wrap_class_cache.clear()  # it has the mesh of the first model of a class
    for name, settings in IN_NODES.items() if world_size == 4 else ():
        SOLVED.clear()
        register(budget=0.0, bitwise=True, cluster=cluster, **settings)
        report[name] = told(trained(world_size, "apsched", replicated=False))
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
