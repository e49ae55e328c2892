"""One of four gloo processes that train a preset as graphs in bitwise mode, and under eager
``fully_shard``; writes hashes as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
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
from apsched.models.layers import RotaryTable
from apsched.models.llama import Llama
from apsched.models.mesh import ALONE, MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.presets import PRESETS, LlamaConfig
from apsched.models.training import descend, run_step
from apsched.problem.build import build_problem
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.solver import solve
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.eager_fsdp2 import bits, digest, fully_sharded, shards_of, trained_eagerly

NUM_STEPS, SEQ_LEN, RATE = 3, 32, 0.5


def nothing() -> None:
    """The default action after a step: none."""


def built_model(world_size: int) -> BuiltModel:
    options = ModelOptions(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return build(
        "llama3-debug",
        mesh=MeshSpec(fsdp=world_size),
        seq_len=SEQ_LEN,
        options=options,
        materialize=True,
    )


class Sent(torch.fx.Interpreter):
    """Runs a graph and keeps a hash of each buffer that goes into a reduce-scatter, in the order of
    launches.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.hashes: list[str] = []

    def run_node(self, n: torch.fx.Node) -> object:
        if "reduce_scatter_tensor" in str(n.target):
            self.hashes.append(bits(self.fetch_args_kwargs_from_env(n)[0][0]))
        return super().run_node(n)


def eager(
    whole: dict[str, torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    world_size: int,
    num_steps: int = NUM_STEPS,
) -> tuple[list[str], list[str]]:
    """Train under ``fully_shard`` on each block and the root; gradients are summed, as the graphs
    do it.

    Returns the hash of the weights after each step, and of the buffers that the first step reduces.
    """
    config = PRESETS["llama3-debug"]
    assert isinstance(config, LlamaConfig)
    with torch.device("meta"):
        model = Llama(
            config,
            seq_len=SEQ_LEN,
            dtype=torch.float32,
            tp=ALONE,
            global_tokens=SEQ_LEN * world_size,
        )
    model = model.to_empty(device="cpu")
    model.load_state_dict(whole)
    for table in (child for child in model.modules() if isinstance(child, RotaryTable)):
        table.fill(torch.device("cpu"))
    return trained_eagerly(fully_sharded(model, model.layers), inputs, num_steps, RATE)


def graphs_of(built: BuiltModel, *, bitwise: bool) -> list[GraphModule]:
    """Return forward and backward graph as solved; without ``bitwise``, with gradients reduced one
    by one, as captured.
    """
    capture = capture_built(built)
    if not bitwise:
        return [graph.module for graph in capture.graphs]
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    made = []
    for graph in capture.graphs:
        problem: Problem = build_problem(
            export_graph(graph, costs, group_ranks=capture.group_ranks)
        )
        problem = restricted(problem, Plan(), bitwise=True)
        best = solve(problem, Caps(), SolveOptions(budget=0.0)).best
        assert best is not None
        made.append(write_back(graph.module, problem, best.schedule))
    return made


def trained(
    world_size: int,
    *,
    bitwise: bool,
    num_steps: int = NUM_STEPS,
    after_step: Callable[[], None] = nothing,
) -> tuple[list[str], list[str]]:
    """Return the hash of the weights after each step, and of the buffers that the first step
    reduces.
    """
    built = built_model(world_size)
    forward, backward = graphs_of(built, bitwise=bitwise)
    found: list[str] = []
    sent: list[str] = []
    with torch.no_grad():
        for _ in range(num_steps):
            watched = Sent(backward)
            _, gradients = run_step(built, forward, backward if sent else watched.run)
            sent = sent or watched.hashes
            descend(built, gradients, rate=RATE)
            found.append(digest(shards_of(built.module)))
            del gradients
            after_step()
    return found, sent


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    built = built_model(world_size)
    start = digest(shards_of(built.module))
    whole = {
        name: parameter.detach().full_tensor()
        for name, parameter in built.module.named_parameters()
    }
    report = {"start": start}
    report["bitwise"], report["bitwise sent"] = trained(world_size, bitwise=True)
    report["alone"], report["alone sent"] = trained(world_size, bitwise=False)
    report["eager"], report["eager sent"] = eager(whole, built.inputs, world_size)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
