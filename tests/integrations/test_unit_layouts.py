"""``tune_fsdp2`` on other layouts of units: tied parameters, units in units, kept embeddings."""

import pytest
import torch

from apsched.capture.fake_world import world
from apsched.capture.fsdp2 import capture_fsdp2
from apsched.integrations.fsdp2_units import units_of
from tests.helpers.graphs.unit_layouts import LAYOUTS
from tests.helpers.processes import WORKERS, Job, run_jobs

TOKENS = torch.zeros(4, 8, dtype=torch.long)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[dict]:
    asked = Job(folder=tmp_path_factory.mktemp("layouts") / "two", world_size=2)
    (found,) = run_jobs(WORKERS / "training/tune_layouts_worker.py", [asked], timeout_s=600)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tuned_model_computes_what_it_did(job, name):
    for report in job:
        case = report[name]
        assert case["tuned"] == case["as it was"]
        assert len({*case["tuned"]}) == 4, "each step changes the loss"
        predicted, untuned = case["times"]
        assert 0 < predicted <= untuned


@pytest.mark.parametrize("name", ["tied in the root", "tied in a unit"])
def test_a_tied_parameter_is_gathered_and_reduced_once(name):
    """As FSDP2 does, which has one shard of it; its name is the first one."""
    with world(2):
        model = LAYOUTS[name]()
        graphs = capture_fsdp2(model, (TOKENS,)).graphs
        known = {parameter for unit in units_of(model) for parameter in unit.parameters}
    for graph, kind in zip(
        graphs, ("all_gather_into_tensor", "reduce_scatter_tensor"), strict=True
    ):
        served = [
            node.meta["custom"]["apsched_parameter"]
            for node in graph.module.graph.nodes
            if kind in str(node.target)
        ]
        assert sorted(served) == sorted(known)
