"""Sums of reduced gradients at the end of the graph."""

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.fake_world import world
from apsched.capture.function import capture_own
from apsched.capture.micro_batches import REDUCE_EACH, MicroBatchChoice
from apsched.fx.collectives import is_reduce_scatter
from apsched.fx.passes.lists import add_at_the_end
from apsched.fx.passes.run_passes import run_passes
from apsched.fx.passes.sums_last import put_sums_last
from apsched.graph.export.export import export_graph
from apsched.kinds import CollectiveKind, NodeKind
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset
from apsched.problem.build import build_problem
from tests.helpers.graphs.instrumented import UnitCosts

_c10d = torch.ops._c10d_functional


def scattered(x):
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, "sum", 2, "0"))


def summed(x):
    return _c10d.wait_tensor(_c10d.all_reduce(x, "sum", "0"))


def moved(function) -> list[str]:
    """Return the nodes of compute and communication, in order, after the pass."""
    with world(2):
        graph = make_fx(function, tracing_mode="fake")(torch.ones(4), torch.ones(4))
        graph = run_passes(graph, add_at_the_end()).module
    return [node.name for node in graph.graph.nodes if node.op == "call_function"]


def test_a_sum_goes_behind_the_compute_that_follows_it():
    def step(x, y):
        total = scattered(x.sin()) + scattered(y.sin())
        return total / 2, x.cos()

    assert moved(step)[-3:] == ["cos", "add", "div"]


def test_a_sum_of_three_keeps_its_order():
    def step(x, y):
        total = scattered(x.sin()) + scattered(y.sin()) + scattered(x.exp())
        return total, summed(y.cos()) + summed(y.exp()), y.tan()

    names = moved(step)
    assert names[-4:] == ["tan", "add", "add_1", "add_2"]


def test_only_sums_of_reductions_that_go_to_outputs_move():
    def used(x, y):
        total = scattered(x) + scattered(y)
        return total.sin()

    def with_a_value(x, y):
        return scattered(x) + y.exp()[:2], y.cos()

    def reduced_again(x, y):
        return summed(scattered(x) + scattered(y)), y.cos()

    def of_gathers(x, y):
        first, second = (
            _c10d.wait_tensor(_c10d.all_gather_into_tensor(each, 2, "0")) for each in (x, y)
        )
        return first + second, y.cos()

    assert moved(used)[-2:] == ["add", "sin"]
    for step in (with_a_value, reduced_again, of_gathers):
        assert moved(step)[-1] == "cos", step


def test_values_stay():
    def step(x, y):
        a, b = (x * k for k in (2, 3))
        return scattered(a) + scattered(b), y.cos()

    with world(2):
        graph = make_fx(step, tracing_mode="fake")(torch.ones(4), torch.ones(4))
        uses = {node.name: sorted(u.name for u in node.users) for node in graph.graph.nodes}
        put_sums_last(graph.graph)
        graph.graph.lint()
        assert uses == {n.name: sorted(u.name for u in n.users) for n in graph.graph.nodes}


class RunsTwice(nn.Module):
    """A block that runs twice in a pass, as all layers of ALBERT are one."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x):
        return self.block(self.block(x).tanh()).sum()


def test_reductions_of_a_module_that_runs_twice_share_launches():
    mesh = MeshSpec.parse("fsdp=2")
    with world(mesh.world_size):
        capture = capture_own(
            RunsTwice(), torch.ones(4, 8), source="RunsTwice", num_ranks=2, mesh=mesh
        )
        problem = build_problem(export_graph(capture.graphs[1], UnitCosts()))
    reductions = [
        one
        for one in problem.collectives
        if problem.keys[one.key].kind is CollectiveKind.REDUCE_SCATTER
    ]
    assert len(reductions) == 4
    assert all(one.may_share for one in reductions)
    last = problem.captured_order[-2:]
    assert all(problem.node_names[node].startswith("add") for node in last)
    assert max(one.wait for one in reductions) < min(last)


def test_reductions_of_each_micro_batch_share_launches():
    capture = capture_preset(
        "llama3-debug",
        mesh=MeshSpec.parse("fsdp=8"),
        seq_len=32,
        num_layers=2,
        micro_batches=MicroBatchChoice(count=3, reduce=REDUCE_EACH),
    )
    backward = capture.graphs[1]
    ranks = {name: ranks for name, ranks in capture.group_ranks.items() if ranks}
    dag = export_graph(backward, UnitCosts(), group_ranks=ranks)
    records = [dag.nodes[rank]["record"] for rank in range(dag.number_of_nodes())]
    reductions = [
        records[rank].collective
        for rank, node in enumerate(backward.module.graph.nodes)
        if is_reduce_scatter(node)
    ]
    assert len(reductions) == 3 * 21
    assert all(one.bucketable and not one.on_path for one in reductions)
    waits = {one.wait for one in reductions}
    last = [r.name for r in records if r.kind is NodeKind.COMPUTE][-2 * 21 :]
    assert all(name.startswith("add") for name in last), "two sums a parameter, behind all compute"
    assert max(waits) < dag.number_of_nodes() - 2 * 21
