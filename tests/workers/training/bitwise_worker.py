"""One of four gloo processes that run a backward graph in bitwise mode, and reduce its gradients as
eager FSDP2 does; writes JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from apsched.problem.build import build_problem
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.bitwise import fsdp_units
from apsched.problem.plan.rules import Plan
from apsched.solver import solve
from apsched.writeback.write_back import write_back


class Reductions(torch.fx.Interpreter):
    """Runs a graph, keeps what each reduce-scatter takes, and puts ``given`` in the place of its
    result where there is one.
    """

    def __init__(self, module: torch.fx.GraphModule, given: dict[str, torch.Tensor]) -> None:
        super().__init__(module)
        self.given, self.taken = given, {}

    def run_node(self, n: torch.fx.Node) -> object:
        if "reduce_scatter_tensor" not in str(n.target):
            return super().run_node(n)
        self.taken[n.name] = self.fetch_args_kwargs_from_env(n)[0][0].clone()
        return self.given[n.name].clone() if n.name in self.given else super().run_node(n)


def as_fsdp2(gradients: list[torch.Tensor], world_size: int) -> list[torch.Tensor]:
    """Return the shards of one unit's gradients: chunked and concatenated, reduced at once (torch:
    ``foreach_reduce``).
    """
    sent = torch.cat([gradient.reshape(world_size, -1) for gradient in gradients], dim=1).flatten()
    result = sent.new_empty(sent.numel() // world_size)
    dist.reduce_scatter_tensor(result, sent)
    shards = result.split([gradient.numel() // world_size for gradient in gradients])
    return [
        shard.view(g.shape[0] // world_size, *g.shape[1:])
        for shard, g in zip(shards, gradients, strict=True)
    ]


def compare(world_size: int) -> dict[str, object]:
    options = ModelOptions(param_dtype=torch.float32, reduce_dtype=torch.float32)
    mesh = MeshSpec(fsdp=world_size)
    built = build(
        "llama3-debug", mesh=mesh, seq_len=32, options=options, materialize=True, num_layers=2
    )
    capture = capture_built(built)
    forward, backward = capture.graphs
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    problem = restricted(
        build_problem(export_graph(backward, costs, group_ranks=capture.group_ranks)),
        Plan(),
        bitwise=True,
    )
    best = solve(problem, Caps(), SolveOptions(budget=0.0)).best
    assert best is not None
    rewritten = write_back(backward.module, problem, best.schedule)
    inputs: list[tuple[torch.Tensor, ...]] = []

    def remembered(*args: torch.Tensor) -> object:
        inputs.append(tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
        return rewritten(*args)

    run_step(built, forward.module, remembered)
    taken = Reductions(backward.module, {})
    alone = taken.run(*inputs[0])
    reduced: dict[str, torch.Tensor] = {}
    units = [
        [problem.node_names[problem.collectives[c].start] for c in unit]
        for unit in fsdp_units(problem)
    ]
    for unit in units:
        reduced |= dict(
            zip(unit, as_fsdp2([taken.taken[name] for name in unit], world_size), strict=True)
        )
    expected = Reductions(backward.module, reduced).run(*inputs[0])
    found = rewritten(*inputs[0])

    def unequal(outputs: tuple[object, ...]) -> int:
        pairs = zip(expected, outputs, strict=True)
        return sum(isinstance(a, torch.Tensor) and not torch.equal(a, b) for a, b in pairs)

    return {
        "units": len(units),
        "gradients": len(reduced),
        "unequal": unequal(found),
        "unequal_alone": unequal(alone),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    (folder / f"{rank}.json").write_text(json.dumps(compare(world_size)))
    dist.barrier()
    dist.destroy_process_group()
