"""Process ranks that pass different schedules to eager FSDP2: all refuse them, and none is set."""

import pytest

import apsched
from apsched.capture.fake_world import world
from apsched.integrations.fsdp2 import apply_fsdp2
from tests.helpers.graphs.small_models import Residual
from tests.helpers.processes import WORKERS, run_processes


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("fsdp2_ranks")
    return run_processes(WORKERS / "training/fsdp2_agree_worker.py", folder, 2, timeout_s=120)


@pytest.mark.ranks
def test_the_same_results_are_set_on_all(reports):
    for report in reports:
        for case in ("same", "same again"):
            assert report[case]["error"] is None
            assert report[case]["changed"]
            assert report[case]["losses"] == report["untouched"]["losses"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("differ", "is the setting backward_prefetch () of (root), there it is the setting"),
        ("micro-batches", "is micro-batch 0: the setting backward_prefetch () of (root)"),
        ("fails", "missing: expected the files that `apsched solve -o` writes"),
    ],
)
def test_where_process_ranks_differ_all_refuse_and_none_is_changed(reports, case, found):
    for report in reports:
        kind, text = report[case]["error"]
        assert kind == "InputError"
        assert found in text
        assert not report[case]["changed"]
        assert report[case]["losses"] == report["untouched"]["losses"]
    advice = "FSDP2 is not changed on any process rank: pass the same results on all; solve on one"
    told = [report[case]["error"][1] for report in reports]
    assert advice in told[0]
    assert "process rank 1" in told[0]
    assert case == "fails" or told[0] == told[1]


@pytest.mark.ranks
@pytest.mark.parametrize("accumulate", ["1", "3"])
def test_a_step_in_the_job_has_the_most_that_any_process_rank_has_in_use(reports, accumulate):
    first, second = (report["in use"][accumulate] for report in reports)
    assert first == second
    assert {"forward", "backward"} <= first.keys()
    assert {other_bytes for other_bytes, _ in first.values()} == {2 * 2**30}
    assert all(cap_bytes < 78 * 2**30 for _, cap_bytes in first.values())


@pytest.mark.ranks
def test_a_process_rank_that_does_not_call_is_named(reports):
    kind, text = reports[0]["late"]["error"]
    assert kind == "AgreementError"
    assert "process rank 1 has not reported its launches" in text
    assert not reports[0]["late"]["changed"]


def test_a_deadline_of_no_seconds_is_refused():
    with world(2), pytest.raises(apsched.InputError, match="deadline_s: expected a finite number"):
        apply_fsdp2(Residual(), (), deadline_s=0.0)
