"""Python functions, overload packets and higher-order operators compute, draw and write as
captured, in whatever order (2 processes)."""

import pytest

from tests.helpers.graphs.programs_of_functions import THINGS
from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks


def test_steps_of_functions_leave_behind_what_they_did(tmp_path):
    """Results, mutated inputs and the state of the generator, of random orders and of those that
    ``optimize`` finds."""
    for report in run_processes(WORKERS / "graphs/functions_worker.py", tmp_path, 2, timeout_s=600):
        assert set(report) == set(THINGS)
        for name, found in report.items():
            assert found["optimized"] == [], name
            assert found["shuffled"] == {}, name
            assert found["num_orders"] > 3, f"{name}: nothing was moved"
