"""Four gloo processes train experts and masks, whose sizes no graph knows before the step, under
``torch.compile`` with apsched as they do without.
"""

import pytest

from tests.helpers.processes import WORKERS, run_processes

NUM_ROWS, NUM_RANKS = 24, 4
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("unbacked")
    script = WORKERS / "training/unbacked_worker.py"
    return run_processes(script, folder, NUM_RANKS, timeout_s=800)


def test_losses_and_gradients_are_the_same_bits_whatever_the_sizes_are(reports):
    for report in reports:
        assert report["num_unequal"] == 0
        assert len({str(splits) for splits in report["splits"]}) == len(report["splits"]) > 1
        balanced = [NUM_ROWS // NUM_RANKS] * NUM_RANKS
        assert all(balanced not in splits for splits in report["splits"]), "no size is as assumed"


def test_one_graph_each_is_compiled_and_scheduled(reports):
    for report in reports:
        assert [name for name, _, _ in report["graphs"]] == ["forward", "backward"]
        assert all(launches < captured for _, captured, launches in report["graphs"])
        assert report["exact"]


def test_all_process_ranks_have_one_answer(reports):
    assert len({str(report["schedules"]) for report in reports}) == 1


def test_the_answer_says_what_it_assumes(reports):
    """Balanced splits in both directions; of a mask nothing is known but how many rows there
    are.
    """
    for report in reports:
        for assumed in report["assumed"]:
            by_source = {source: value for _, value, source in assumed}
            assert by_source == {"balanced": NUM_ROWS // NUM_RANKS, "fallback": NUM_ROWS}
            assert len(assumed) == 2 * NUM_RANKS + 1
        for time_share, peak_share in report["shares"]:
            assert 0 < time_share < 1
            assert 0 < peak_share < 1
