"""A graph file under measured costs is what an export at these costs would have been; sources of
costs add up.
"""

import pytest

from apsched.capture.fake_world import world
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.measured import MeasuredCosts, Price, Transfers
from apsched.costs.measured_model import MeasuredCostModel
from apsched.graph.cost_shares import cost_shares
from apsched.graph.export.export import export_graph
from apsched.graph.reprice import repriced
from apsched.kinds import NodeKind
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset
from apsched.problem.build import build_problem

H100 = load_cluster("h100")


def _costs(dag, mesh_ranks: int) -> MeasuredCosts:
    """Half of the operations, one kind of collective, launches and copies."""
    records = [dag.nodes[rank]["record"] for rank in range(dag.number_of_nodes())]
    operations = sorted({r.operation for r in records if r.kind is NodeKind.COMPUTE})
    return MeasuredCosts(
        device="d",
        cluster="h100",
        compute={
            operation: Price(time_us=7.5 + k, source="profile")
            for k, operation in enumerate(operations[::2])
        },
        transfers=(
            Transfers(
                kind="all_gather",
                num_ranks=mesh_ranks,
                num_nodes=max(1, mesh_ranks // 8),
                source="measured",
                points=((4096, 55.0), (49152, 56.0), (50_000, 99.5)),  # a step between two samples
                bytes_per_us=321.0,
            ),
        ),
        launch_us={"all_gather": 3.25, "all_reduce": 4.0},
        copies=((1024, 1.5), (2**20, 9.0)),
    )


@pytest.mark.parametrize("mesh", ["fsdp=4", "replicate=2,fsdp=16", "replicate=4"])
def test_a_graph_at_measured_costs_is_what_an_export_at_them_is(mesh):
    spec = MeshSpec.parse(mesh)
    with world(spec.world_size):
        capture = capture_preset("llama3-debug", mesh=spec, seq_len=64, num_layers=1)
        formulas = ClusterCostModel(H100, capture.group_ranks)
        for graph in capture.graphs:
            dag = export_graph(
                graph, formulas, group_ranks=capture.group_ranks, cluster_name="h100"
            )
            costs = _costs(dag, spec.fsdp)
            model = MeasuredCostModel(costs, formulas, capture.group_ranks)
            expected = export_graph(
                graph, model, group_ranks=capture.group_ranks, cluster_name="h100"
            )
            found = repriced(dag, costs, H100)
            for rank in range(dag.number_of_nodes()):
                assert found.nodes[rank]["record"] == expected.nodes[rank]["record"]
            assert found.graph == expected.graph
            assert build_problem(found) == build_problem(expected)
            assert dict(dag.nodes(data="record")) != dict(found.nodes(data="record"))
            for name, curve in found.graph["curves"].items():
                if name.startswith("all_gather:"):
                    assert [curve(n) for n in (4096, 49152, 50_000)] == [55_000, 56_000, 99_500]
            shares = cost_shares(found)
            assert sum(shares.values()) == pytest.approx(1)
            assert list(shares.values()) == sorted(shares.values(), reverse=True)
            assert set(shares) <= {"formula", "profile", "measured"}
            assert shares["profile"] > 0


def test_costs_of_nothing_change_nothing():
    with world(4):
        capture = capture_preset(
            "llama3-debug", mesh=MeshSpec.parse("fsdp=4"), seq_len=64, num_layers=1
        )
        formulas = ClusterCostModel(H100, capture.group_ranks)
        dag = export_graph(
            capture.graphs[0], formulas, group_ranks=capture.group_ranks, cluster_name="h100"
        )
    found = repriced(dag, MeasuredCosts(device="d", cluster="h100"), H100)
    assert dict(found.nodes(data="record")) == dict(dag.nodes(data="record"))
    assert found.graph == dag.graph
    assert cost_shares(dag) == {"formula": 1.0}
