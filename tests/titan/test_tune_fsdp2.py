"""``tune_fsdp2`` on the models that TorchTitan's trainer sets up: tensor parallelism with sequences
in parts, FSDP2 on the other dimension, activation checkpointing; experts on another mesh.
"""

from pathlib import Path

import pytest

from tests.helpers.processes import Job, run_jobs

pytest.importorskip("torchtitan", reason="needs the extra torchtitan")

from tests.titan.eager_worker import CASES


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[dict]:
    asked = Job(folder=tmp_path_factory.mktemp("titan-eager") / "four", world_size=4)
    (found,) = run_jobs(Path(__file__).parent / "eager_worker.py", [asked], timeout_s=500)
    return found


@pytest.mark.alone
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_the_untuned_model(job, case):
    for report in job:
        found = report[case]
        assert len({*found["as it was"]}) == 4, "each step changes the loss"
        for way in ("tuned", "kept"):
            assert found[way]["trained"] == found["as it was"]
            predicted, untuned = found[way]["times"]
            assert 0 < predicted < untuned
