"""Middle-size cases of the MILP: two layers of a real model, a module's collectives merged."""

import pytest

from apsched.capture.fake_world import world
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.milp.model import solve_milp
from tests.helpers.problems.coarse import coarse

STRICT = SolveOptions(time_slack=0.0)


@pytest.fixture(scope="module")
def two_layers() -> dict[str, Problem]:
    """Forward and backward of two layers; what belongs to a layer is one collective of each key."""
    mesh = MeshSpec(fsdp=2)
    with world(mesh.world_size):
        capture = capture_preset("llama3-debug", mesh=mesh, seq_len=64, num_layers=2)
        cost_model = ClusterCostModel(load_cluster(), capture.group_ranks)
        graphs = {
            g.name: export_graph(
                g, cost_model, group_ranks=capture.group_ranks, cluster_name="h100"
            )
            for g in capture.graphs
        }
    return {
        name: coarse(build_problem(graph), lambda module: ".".join(module.split(".")[:2]))
        for name, graph in graphs.items()
    }


@pytest.mark.slow
def test_what_the_solver_finds_is_proven_by_another_formulation(
    two_layers: dict[str, Problem],
) -> None:
    """Step time, peak and launches of the forward pass: no schedule of the MILP is better."""
    problem = two_layers["forward"]
    best = solve(problem, Caps(), STRICT).best
    assert best is not None
    assert len(problem.collectives) >= 5
    result = solve_milp(problem, Caps(), known=best.schedule)
    assert (result.status, result.proven) == ("optimal", (True, True, True))
    assert (result.step_time_ticks, result.peak_memory_bytes, result.num_launches) == (
        best.step_time_ticks,
        best.peak_memory_bytes,
        best.num_launches,
    )
    assert result.bound_ticks == best.step_time_ticks


def test_out_of_time_the_bound_is_valid_and_says_something(two_layers: dict[str, Problem]) -> None:
    """The backward pass; the schedule is the one that was known, and the bound no lower than
    compute.
    """
    problem = two_layers["backward"]
    best = solve(problem, Caps(), STRICT).best
    assert best is not None
    result = solve_milp(problem, Caps(), known=best.schedule, time_limit_s=5.0)
    assert result.schedule is not None
    assert verify(problem, result.schedule, Caps()) == ()
    assert result.step_time_ticks == best.step_time_ticks
    compute = sum(problem.duration_ticks[node] for node in problem.compute_order)
    assert compute <= result.bound_ticks <= best.step_time_ticks
