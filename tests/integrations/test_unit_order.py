"""A schedule in the order in which FSDP2 gathers and reduces units."""

from dataclasses import replace

import pytest
import torch

import apsched
from apsched.capture.fake_world import world
from apsched.capture.fsdp2 import capture_fsdp2
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InfeasibleError
from apsched.graph.export.export import export_graph
from apsched.integrations.fsdp2 import fsdp2_plan
from apsched.integrations.fsdp2_units import launches_of, units_of
from apsched.integrations.unit_order import as_units_run
from apsched.kinds import CollectiveKind
from apsched.pipeline.result import Result
from apsched.problem.build import build_problem
from apsched.schedule.verify import verify
from tests.helpers.graphs.unit_layouts import LAYOUTS


@pytest.fixture(scope="module", params=["units in units", "every part a unit, kept"])
def solved(request) -> tuple[tuple, list[Result]]:
    """Units, and the results of both graphs under the plan of the units."""
    with world(2):
        model = LAYOUTS[request.param]()
        capture = capture_fsdp2(model, (torch.zeros(4, 8, dtype=torch.long),))
        costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
        graphs = [export_graph(g, costs, group_ranks=capture.group_ranks) for g in capture.graphs]
        problems = [build_problem(graph) for graph in graphs]
        results = [
            apsched.solve(
                problem,
                plan=fsdp2_plan(model, problem),
                max_compute_move=0,
                options=SolveOptions(budget=0.0),
            )
            for problem in problems
        ]
        return units_of(model), results


def launched(units, result, schedule, kind) -> list[str]:
    by_parameter = {name: unit for unit in units for name in unit.parameters}
    return [one.unit for one in launches_of(result.problem, schedule, kind, by_parameter)]


def test_reductions_run_in_any_order_of_units(solved):
    units, (_, backward) = solved
    units = [unit for unit in units if unit.parameters]
    for order in (units, units[::-1], [*units[1::2], *units[::2]]):
        parameters = [unit.parameters for unit in order]
        found = as_units_run(backward.problem, backward.caps, backward.answer, parameters)
        assert not verify(backward.problem, found.best.schedule, backward.caps)
        reduced = launched(units, backward, found.best.schedule, CollectiveKind.REDUCE_SCATTER)
        assert reduced == [unit.name for unit in reversed(order)]
        assert found.best.step_time_ticks >= backward.answer.best.step_time_ticks


def test_the_unit_that_runs_first_is_gathered_first(solved):
    units, (forward, _) = solved
    for unit in units:
        if unit.parameters:
            found = as_units_run(forward.problem, forward.caps, forward.answer, [unit.parameters])
            gathered = launched(units, forward, found.best.schedule, CollectiveKind.ALL_GATHER)
            assert gathered[0] == unit.name


def test_an_order_that_breaks_a_cap_is_an_error_that_names_it(solved):
    units, (_, backward) = solved
    late = [unit.parameters for unit in units if unit.parameters][::-1]
    caps = Caps(memory_cap_bytes=1, max_compute_move=0)
    answer = replace(backward.answer, baselines=())
    with pytest.raises(InfeasibleError, match=r"in the order in which FSDP2 .* state a higher cap"):
        as_units_run(backward.problem, caps, answer, late)
