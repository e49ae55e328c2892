"""Bitwise mode against eager FSDP2 on four gloo processes: the same buffers are reduced, and the
weights stay the same, step after step.
"""

import pytest

from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    return run_processes(
        WORKERS / "training/eager_worker.py", tmp_path_factory.mktemp("eager"), 4, timeout_s=600
    )


def test_each_reduction_gets_the_very_bits_that_fully_shard_sends(reports):
    """Membership, payload order and order of launches: a gradient in another place would change the
    hash. One by one they are others.
    """
    for report in reports:
        assert len(report["eager sent"]) == 3, "two blocks and the root"
        assert report["bitwise sent"] == report["eager sent"]
        assert len(report["alone sent"]) == 21
        assert not set(report["alone sent"]) & set(report["eager sent"])


def test_weights_are_those_of_eager_fsdp2_after_each_step(reports):
    for report in reports:
        assert report["bitwise"] == report["eager"]
        assert len({report["start"], *report["eager"]}) == 4, "each step changes the weights"
    assert len({report["start"] for report in reports}) == 4, (
        "each process rank has shards of its own"
    )
