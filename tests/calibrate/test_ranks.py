"""Process ranks that measured different things get the same costs, by the median; what goes wrong
on one, all hear. Real gloo processes.
"""

import pytest

from apsched.costs.measured_file import load_costs
from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks

WORLD_SIZE = 3


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    return run_processes(
        WORKERS / "ranks/agree_worker.py",
        tmp_path_factory.mktemp("agree"),
        WORLD_SIZE,
        timeout_s=300,
    )


def test_all_get_the_median_byte_for_byte(reports, tmp_path):
    assert len({report["costs"] for report in reports}) == 1
    path = tmp_path / "costs.toml"
    path.write_text(reports[0]["costs"])
    costs = load_costs(path)
    assert costs.compute["mm"].time_us == 11.0  # the one that was disturbed does not count
    assert costs.compute["add"].time_us == 50.0  # two of the three found it
    assert costs.transfers[0].points == ((1024, 11.0), (4096, 33.0))
    assert costs.launch_us == {"all_gather": 11.0}
    assert costs.copies == ((512, 11.0),)


def test_another_device_is_refused_by_all(reports):
    assert len({report["refused"] for report in reports}) == 1
    assert "found another (cpu), cpu, made up (cpu)" in reports[0]["refused"]


def test_what_fails_on_one_all_hear(reports):
    for report in reports:
        assert report["failed"].startswith(
            "process rank 1 could not measure its operators: RuntimeError: out of memory"
        )
