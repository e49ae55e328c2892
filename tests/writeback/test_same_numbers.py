"""Whatever the schedule, the rewritten graph computes the bits of the captured one (two real
processes: sums have one order).
"""

import pytest

from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks


def test_random_schedules_give_the_same_bits(tmp_path):
    for report in run_processes(WORKERS / "graphs/writeback_worker.py", tmp_path, 2, timeout_s=300):
        assert report["unequal"] == []
        assert report["kinds"] == ["all_gather", "all_reduce", "reduce_scatter"]
        assert report["coalesced"] == ["all_gather", "reduce_scatter"]
        assert report["input_graph_unchanged"]
        assert report["num_outputs"] == 9
