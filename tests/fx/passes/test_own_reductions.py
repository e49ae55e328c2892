"""A reduction for each gradient, also of parameters whose gradients are equal."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

import apsched
from apsched.capture.fake_world import world
from apsched.capture.fsdp2 import capture_fsdp2
from apsched.capture.function import capture_own
from apsched.fx.collectives import collective_kind
from apsched.fx.passes.own_reductions import with_own_reductions
from apsched.fx.passes.parameters import PARAMETER_KEY
from apsched.integrations.fsdp2 import apply_fsdp2, fsdp2_plan
from apsched.kinds import CollectiveKind
from apsched.models.mesh import MeshSpec
from apsched.torch_compat.graphs import gradient_of

_REDUCTIONS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


class Sum(nn.Module):
    """Three layers of one input: their gradients are equal. 10 rows, so that shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 10) for _ in range(3))
        self.last = nn.Linear(10, 8)

    def forward(self, x):
        return self.last(torch.relu(self.first(x) + self.second(x) + self.third(x))).sum()


def reductions(graph) -> dict[str, list[str]]:
    """Return parameter -> the kinds of the reductions behind its gradient, from the output on."""
    output = graph.output_node()
    found: dict[str, list[str]] = {}
    for node, descriptor in zip(output.args[0], output.meta["desc"], strict=True):
        name = gradient_of(descriptor)
        while name and node.all_input_nodes and len(node.all_input_nodes) == 1:
            if (kind := collective_kind(node)) in _REDUCTIONS:
                assert node.meta["custom"][PARAMETER_KEY] == name
                found.setdefault(name, []).append(kind)
            (node,) = node.all_input_nodes
    return found


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    [
        ("fsdp=4", ["reduce_scatter"]),
        ("replicate=4", ["all_reduce"]),
        ("replicate=2,fsdp=2", ["all_reduce", "reduce_scatter"]),
    ],
)
def test_each_parameter_of_a_module_is_reduced_by_itself(mesh, kinds):
    with world(4):
        capture = capture_own(
            Sum(), (torch.ones(4, 8),), source="sum", num_ranks=4, mesh=MeshSpec.parse(mesh)
        )
    graph = capture.graphs[1].module.graph
    assert reductions(graph) == dict.fromkeys((name for name, _ in Sum().named_parameters()), kinds)
    num_reductions = sum(collective_kind(node) in _REDUCTIONS for node in graph.nodes)
    assert num_reductions == 8 * len(kinds)
    assert with_own_reductions(capture.graphs[1].module) is capture.graphs[1].module


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16}])
def test_units_with_equal_gradients_are_tuned(replicas, policy):
    """FSDP2 reduces each parameter; the graph had one reduction for several, and no bucket was one
    unit.
    """
    with world(4):
        shape, names = ((4,), None) if replicas == 1 else ((2, 2), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = Sum()
        policy = MixedPrecisionPolicy(**policy, reduce_dtype=torch.float32)
        fully_shard(model.first, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        x = (torch.ones(4, 8),)
        found = reductions(capture_fsdp2(model, x).graphs[1].module.graph)
        assert {len(kinds) for kinds in found.values()} == {replicas}
        assert len(found) == 8
        tuning = apsched.tune_fsdp2(model, x, budget=0.0)
        assert [unit.name for unit in tuning.settings.units] == ["(root)", "first"]


def test_a_plan_of_units_with_equal_gradients_can_be_set():
    graphs = apsched.capture(Sum(), (torch.ones(4, 8),), "fsdp=4")
    with world(4):
        model = fully_shard(Sum(), mesh=init_device_mesh("cpu", (4,)))
        results = [
            apsched.solve(graph, plan=fsdp2_plan(model, graph), max_compute_move=0, budget=0)
            for graph in graphs
        ]
        assert len(apply_fsdp2(model, results).units) == 1
