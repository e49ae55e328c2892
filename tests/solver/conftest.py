"""Fixtures of the solver's tests: graphs of small presets with several layers, captured once."""

import pytest

from apsched.problem.problem import Problem


@pytest.fixture(scope="session")
def layered_presets() -> dict[str, Problem]:
    """Small presets: one with experts; one with HSDP and tensor parallelism, of which every second
    layer is recomputed.
    """
    from apsched.capture.fake_world import world
    from apsched.costs.cluster_model import ClusterCostModel
    from apsched.costs.clusters.cluster import load_cluster
    from apsched.graph.export.export import export_graph
    from apsched.models.mesh import MeshSpec
    from apsched.models.options import ModelOptions
    from apsched.models.preset_capture import capture_preset
    from apsched.problem.build import build_problem

    problems = {}
    for label, preset, mesh, checkpoint, num_layers in (
        ("moe", "deepseek-v3-debug", MeshSpec(fsdp=4, ep=2), "none", 5),
        ("llama", "llama3-debug", MeshSpec(replicate=2, fsdp=2, tp=2), "every-2", 7),
    ):
        with world(mesh.world_size):
            options = ModelOptions(activation_checkpoint=checkpoint)
            capture = capture_preset(
                preset, mesh=mesh, seq_len=64, num_layers=num_layers, options=options
            )
            cost_model = ClusterCostModel(load_cluster(), capture.group_ranks)
            for graph in capture.graphs:
                dag = export_graph(
                    graph, cost_model, group_ranks=capture.group_ranks, cluster_name="h100"
                )
                problems[f"{label} {graph.name}"] = build_problem(dag)
    return problems
