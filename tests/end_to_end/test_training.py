"""Rewritten graphs train like captured ones on four gloo processes: the same bits, or close (see
``training_cases``).
"""

import pytest

from tests.helpers.graphs.training_cases import CASES, NUM_STEPS, WORLD_SIZE
from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """Return the results of each process; one start of four processes runs all cases."""
    folder = tmp_path_factory.mktemp("training")
    return run_processes(WORKERS / "training/training_worker.py", folder, WORLD_SIZE, timeout_s=800)


@pytest.mark.parametrize("maker", ["layers", "random", "solved"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_the_captured_graphs(reports, case, maker):
    for report in reports:
        found = report[str(case)][maker]
        assert found["num_buckets"] > 0
        assert found["finite"]
        if case.tolerance:
            assert found["largest_distance"] <= case.tolerance
        else:
            assert found["unequal"] == []


@pytest.mark.parametrize(
    "case", [case for case in CASES if "tp=" in case.mesh or "ep=" in case.mesh], ids=str
)
def test_compute_was_moved_where_it_hides_what_is_on_the_path(reports, case):
    for report in reports:
        assert min(report[str(case)]["solved"]["num_moved"]) > 0
        assert min(report[str(case)]["random"]["num_moved"]) > 50


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_model_learns(reports, case):
    losses = [
        sum(report[str(case)]["layers"]["losses"][step] for report in reports)
        for step in range(NUM_STEPS)
    ]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == NUM_STEPS
