"""The graphs of several micro-batches in a row: run on real processes, bit for bit what the pair of
one micro-batch gives.
"""

import pytest

from tests.helpers.processes import WORKERS, run_processes
from tests.workers.graphs.accumulate_worker import CASES, SHARDS

COLLECTIVES = {
    "kept": [[2, 2]] * 3,
    "stay gathered": [[2, 4], [0, 4], [0, 4]],
    "gathered once": [[2, 2], [0, 2], [0, 2]],
    "reduced once": [[2, 2], [2, 2], [2, 4]],
    "once": [[2, 0], [0, 0], [0, 2]],
    "some": [[2, 2], [1, 2], [1, 3]],
    SHARDS: [[2, 3], [0, 3], [0, 4]],
}
"""Gathers of forward; gathers and reductions of backward."""


@pytest.mark.ranks
def test_losses_and_gradients_are_those_of_the_same_choice_by_hand(tmp_path) -> None:
    script = WORKERS / "graphs/accumulate_worker.py"
    for report in run_processes(script, tmp_path, 4, timeout_s=240):
        assert set(report) == {*CASES, SHARDS}
        for name, found in report.items():
            assert found["losses"], name
            assert found["gradients"], name
            assert all(found["moved"])
            assert found["collectives"] == COLLECTIVES[name], name
