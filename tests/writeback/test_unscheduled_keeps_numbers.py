"""What is not scheduled stays where it is, and the rest is scheduled around it: the same numbers in
whatever order (2 processes)."""

import pytest

from tests.helpers.graphs.programs_of_communication import NAMES, NUM_LAYERS
from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks

ALSO_SCHEDULED = {"a wait of a view": 1, "resize_storage_bytes_": 1, "resize_": 1}
ALSO_SCHEDULED |= {"one start of several results": 2, "gathers of bytes": 1}
ALSO_SCHEDULED |= {"results used by their place": 4, "gathers of autograd, and complex sums": 2}
ALSO_SCHEDULED |= {"sums that are reduced again in place": 4}
ALSO_SCHEDULED |= {"in place, and a wait in the caller": 1, "cond with a collective": 2}
"""Collectives of the thing in each layer that are, beside a gather and a reduce-scatter."""


def test_steps_compute_what_they_did(tmp_path):
    """Results and mutated inputs, of random orders and of those that ``optimize`` finds."""
    script = WORKERS / "graphs/communication_worker.py"
    for report in run_processes(script, tmp_path, 2, timeout_s=600):
        assert set(report) == set(NAMES)
        for name, found in report.items():
            assert found["optimized"] == [], name
            assert found["shuffled"] == {}, name
            assert found["inexact"] == [], name
            assert found["num_orders"] > 3, f"{name}: nothing was moved"
            assert found["num_scheduled"] == NUM_LAYERS * (2 + ALSO_SCHEDULED.get(name, 0)), name
