"""The benchmark of real execution, on a small scale: what is predicted of memory is what is counted while each schedule runs."""

import json

import pytest

from benchmarks.execution import inversions, main
from benchmarks.slow_network import why_not

pytestmark = pytest.mark.alone


@pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")
def test_every_schedule_runs_and_holds_the_memory_that_was_predicted(tmp_path, capsys):
    small = ["--rates", "400", "--rounds", "2", "--seq", "32", "--budget", "0.05", "-o", str(tmp_path)]
    assert main(small) == 0
    table = capsys.readouterr().out
    (numbers,) = tmp_path.glob("*.json")
    (report,) = json.loads(numbers.read_text())["rates"].values()
    names = {"as_captured", "transformer_block", "greedy_bytes", "greedy_bytes_span", "torch", "apsched, no cap", "apsched, tight cap"}
    assert {row["name"] for row in report["schedules"]} == names
    for row in report["schedules"]:
        assert row["name"] in table
        assert len(row["measured_us"]) == 2
        for graph in row["memory"]:
            assert graph["nodes_apart"] == 0, row["name"]
            assert graph["counted_bytes"] == graph["predicted_bytes"]
    fits = {row["name"]: row["fits"] for row in report["schedules"]}
    assert fits["apsched, tight cap"] == [True, True]


def test_an_order_that_was_not_predicted_is_named():
    def row(name, predicted, *measured):
        return {"name": name, "predicted_contended_us": predicted, "measured_us": list(measured)}

    assert inversions([row("a", 1, 10, 11, 12), row("b", 2, 5, 6, 7), row("c", 3, 20, 21, 22)]) == [("b", "a")]
    assert inversions([row("a", 1, 10, 11, 12), row("b", 2, 9, 10, 11)]) == []
