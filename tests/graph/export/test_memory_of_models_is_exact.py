"""The memory of the DAG of captured models is what an interpreter counts on them with real
tensors.
"""

import pytest

from apsched.capture.fake_world import world
from apsched.graph.export.export import export_graph
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built
from benchmarks.common.live_bytes import live_bytes_of, run_counting
from tests.helpers.graphs.instrumented import UnitCosts, real_inputs


@pytest.mark.parametrize(
    ("preset", "mesh"), [("llama3-debug", "fsdp=4,tp=2"), ("deepseek-v3-debug", "fsdp=4,ep=2")]
)
def test_forward_and_backward(preset, mesh):
    mesh = MeshSpec.parse(mesh)
    with world(mesh.world_size, 0):
        capture = capture_built(build(preset, mesh=mesh, seq_len=64))
        for graph in capture.graphs:
            dag = export_graph(graph, UnitCosts(), group_ranks=capture.group_ranks)
            _, counted = run_counting(
                graph.module, real_inputs(graph.module), dag, graph.kept_inputs
            )
            told = live_bytes_of(dag)
            names = [node.name for node in graph.module.graph.nodes]
            assert counted == told, [
                row for row in zip(names, counted, told, strict=True) if row[1] != row[2]
            ][:20]
