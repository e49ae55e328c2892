"""One process rank compiles again, alone: it may not fall back, since the others run code that was
scheduled before.
"""

import shutil

import pytest

from tests.helpers.processes import WORKERS, run_processes

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Dynamo needs a C++ compiler"),
]


def test_it_stops_with_an_error_that_names_the_remedy(tmp_path):
    script = WORKERS / "ranks/compiled_again_worker.py"
    reports = run_processes(script, tmp_path, 2, timeout_s=400)
    assert reports[0]["error"] == ""
    assert "process rank 0 has not reported" in reports[1]["error"]
    assert "torch.compile(..., dynamic=True)" in reports[1]["error"]
