"""A pass that takes collectives away, on real process groups: the same bits with fewer of them."""

import pytest

from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks


def test_gradients_that_are_added_before_they_are_reduced_are_the_same_bits(tmp_path):
    reports = run_processes(WORKERS / "graphs/passes_worker.py", tmp_path, 4, timeout_s=400)
    for report in reports:
        assert report["before"] == [{"all_gather": 2, "reduce_scatter": 2}]
        assert report["after"] == [{"all_gather": 2, "reduce_scatter": 1}]
        assert report["equal"]
        assert report["results"] == 2
