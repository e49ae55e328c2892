"""What the solver claims of moved compute is what the rewritten graph has, to the tick and to the
byte, under any memory cap.
"""

import pytest

from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_preset
from apsched.problem.build import build_problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.solver.solve import solve
from apsched.writeback.round_trip import round_trip
from apsched.writeback.write_back import write_back
from tests.helpers.problems.random_schedules import compute_moves


@pytest.mark.parametrize(
    ("preset", "mesh", "options"),
    [
        ("llama3-debug", "fsdp=16,tp=2", ModelOptions()),
        ("llama3-debug", "replicate=2,fsdp=8,tp=2", ModelOptions(activation_checkpoint="full")),
        ("deepseek-v3-debug", "fsdp=16,ep=4", ModelOptions()),
    ],
    ids=["tensor parallel", "hybrid, recomputed", "experts"],
)
@pytest.mark.slow
def test_solved_schedules_with_moves_are_exact(preset, mesh, options):
    capture = capture_preset(preset, mesh=MeshSpec.parse(mesh), seq_len=256, options=options)
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    for captured in capture.graphs:
        problem = build_problem(export_graph(captured, costs, group_ranks=capture.group_ranks))
        peak_bytes = simulate(problem, as_captured(problem.num_nodes)).peak_memory_bytes
        num_moved, exact = 0, []
        for cap_bytes in (None, peak_bytes, int(0.97 * peak_bytes)):
            best = solve(
                problem,
                Caps(memory_cap_bytes=cap_bytes, max_compute_move=200),
                SolveOptions(budget=0.5),
            ).best
            if best is None:
                continue  # nothing fits, which is no matter of write-back
            num_moved += sum(map(bool, compute_moves(problem, best.schedule)))
            module = write_back(
                captured.module, problem, best.schedule, process_rank_of=lambda group: 0
            )
            trip = round_trip(
                module, captured, costs, capture.group_ranks, simulate(problem, best.schedule)
            )
            assert cap_bytes is None or trip.peak_memory_bytes <= cap_bytes
            exact.append(trip.difference)
        assert num_moved > 0
        assert exact == [""] * len(exact)
        assert len(exact) >= 2
