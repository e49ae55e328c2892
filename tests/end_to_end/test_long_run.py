"""Two hundred steps of rewritten graphs on four gloo processes: the weights of eager FSDP2 after
each, and no more memory at the end.
"""

import sys

import pytest

from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks

NUM_STEPS = 200


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    return run_processes(
        WORKERS / "training/long_run_worker.py", tmp_path_factory.mktemp("long"), 4, timeout_s=850
    )


def test_weights_are_those_of_eager_fsdp2_after_each_of_two_hundred_steps(reports):
    for report in reports:
        assert len(set(report["rewritten"])) == NUM_STEPS, "each step changes the weights"
        assert report["rewritten"] == report["eager"]


def test_no_tensor_and_no_collective_is_left_over(reports):
    for report in reports:
        settled, *later = [
            {name: number for name, number in look.items() if name != "resident_bytes"}
            for look in report["held"][2:]
        ]
        assert settled["tensor_bytes"] > 0
        assert settled["collectives"] == 0
        assert all(look == settled for look in later)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_does_not_grow(reports):
    """By less than 64 KiB a step: gloo, malloc and the interpreter grow by up to 3 MiB in as many
    steps, eager FSDP2's, too.
    """
    for report in reports:
        settled, end = (report["held"][i]["resident_bytes"] for i in (2, -1))
        assert end - settled < 64 * 2**10 * (NUM_STEPS - 60), (
            f"{(end - settled) / 2**20:.1f} MiB more after {NUM_STEPS} steps than after 60"
        )
