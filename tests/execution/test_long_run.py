"""Two hundred steps of rewritten graphs on four gloo processes: the weights of eager FSDP2 after each, and no more memory at the end."""

import sys
from pathlib import Path

import pytest
from processes import run_processes

NUM_STEPS = 200


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    return run_processes(Path(__file__).parent / "long_run_worker.py", tmp_path_factory.mktemp("long"), 4, timeout_s=850)


def test_weights_are_those_of_eager_fsdp2_after_each_of_two_hundred_steps(reports):
    for report in reports:
        assert len(set(report["rewritten"])) == NUM_STEPS, "each step changes the weights"
        assert report["rewritten"] == report["eager"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow(reports):
    for report in reports:
        resident = report["resident_bytes"]
        settled, end = max(resident[40:60]), max(resident[-20:])
        assert end - settled < 2 * 2**20, f"{(end - settled) / 2**20:.1f} MiB more after {NUM_STEPS} steps than after 60"
