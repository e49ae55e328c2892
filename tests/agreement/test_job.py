"""Real processes that schedule their graphs together: one answer, and an error on every one of them where that cannot be."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import run_processes

from apsched.agreement.job import DEFAULT_DEADLINE_S
from apsched.agreement.round import _ORDERS_BY
from apsched.compiler.settings import Settings

pytestmark = pytest.mark.alone

WORKER = Path(__file__).parent / "job_worker.py"
Found = list[dict]


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Found:
    """What each of four processes found."""
    return run_processes(WORKER, tmp_path_factory.mktemp("four"), 4, timeout_s=500)


def of(four: Found, case: str) -> Found:
    return [report[case] for report in four]


def same_error(found: Found, kind: str) -> str:
    """Return the text of the error that all process ranks got."""
    assert {report.get("error") for report in found} == {kind}, found
    messages = {report["message"] for report in found}
    assert len(messages) == 1, messages
    return messages.pop()


@pytest.mark.parametrize("case", ["usual", "a bit late", "again"])
def test_one_solves_for_all(four, case):
    found = of(four, case)
    if case == "a bit late":
        found = [report["value"] for report in found]
    assert [report["solves"] for report in found] == [1, 0, 0, 0], found


@pytest.mark.parametrize("case", ["usual", "cache, first", "cache, again", "cache, damaged", "no cache", "alone", "again"])
def test_all_launch_the_same_and_compute_what_they_did(four, case):
    values = [report["value"] for report in of(four, case)]
    assert values == [values[0]] * 4
    assert values[0]["moved"]
    assert values[0]["close"]
    assert values[0]["orders"] == four[0]["usual"]["value"]["orders"]


def test_without_talk_each_solves(four):
    assert [report["solves"] for report in of(four, "alone")] == [1] * 4


def test_another_graph_is_named(four):
    text = same_error(of(four, "another graph"), "AgreementError")
    assert text.startswith("process rank 2 would not launch what process ranks 0, 1, 3 would in group ")
    assert "of process ranks 0 to 3: launch 1 is all_gather bfloat16 " in text


def test_another_schedule_is_named(four):
    text = same_error(of(four, "another schedule"), "AgreementError")
    assert text.startswith("process rank 1 would not launch what process ranks 0, 2, 3 would")
    assert re.search(
        r"in group '0' of process ranks 0 to 3: launch 5 is reduce_scatter avg float32 .*, there it is reduce_scatter", text
    ), text


def test_an_error_of_the_solver_is_the_same_on_all(four):
    text = same_error(of(four, "broken solver"), "ApschedError")
    assert text == "process rank 0: unexpected ZeroDivisionError: a bug (a bug of apsched)"


def test_one_that_is_too_late_is_an_error_on_all_and_on_itself(four):
    found = [report["value"] for report in of(four, "too late")]
    text = same_error(found, "AgreementError")
    assert text.startswith("process rank 3 has not said what to launch in group ")


def test_what_fits_nowhere_is_the_same_error_or_the_same_fallback(four):
    found = of(four, "nothing fits")
    assert "memory" in same_error(found, "InfeasibleError")
    assert [report["value"] for report in of(four, "nothing fits, fallback")] == [True] * 4


def test_one_that_falls_back_alone_is_found_out(four):
    """It would launch its collectives as captured, the others in buckets."""
    text = same_error(of(four, "own error"), "AgreementError")
    assert text.startswith("process rank 1 would not launch what process ranks 0, 2, 3 would")


def test_stages_of_a_pipeline_agree_among_themselves(four):
    values = [report["value"] for report in of(four, "stages")]
    assert [len(value) for value in values] == [2, 2, 1, 1]
    assert values[0] == values[1]
    assert values[2] == values[3]
    assert [report["solves"] for report in of(four, "stages")] == [2, 0, 1, 0]


def test_other_settings_are_named(four):
    found = of(four, "other settings")
    assert "process rank 3 and process rank 0 have the same graph" in same_error(found, "AgreementError")
    assert "max_prefetch 3 here, None there" in found[0]["message"]


def test_the_cache_is_used_and_repaired(four):
    solves = {case: [r["solves"] for r in of(four, f"cache, {case}")] for case in ("first", "again", "damaged", "after")}
    assert solves == {"first": [1, 0, 0, 0], "again": [0] * 4, "damaged": [1, 0, 0, 0], "after": [0] * 4}


def test_graphs_of_a_mesh_are_the_same_on_all_process_ranks(four):
    """FSDP times tensor parallelism: two groups, and others on every process rank."""
    hashes = of(four, "llama hashes")
    assert hashes == [hashes[0]] * 4
    assert hashes[0][0] != hashes[0][1]
    assert of(four, "llama groups") == [2] * 4
    found = of(four, "llama")
    assert [report["solves"] for report in found] == [2, 0, 0, 0]
    assert [report["value"] for report in found] == [found[0]["value"]] * 4


def run_two(folder: Path, scenario: str, *, hosted: bool) -> dict:
    """Run two processes, of which process rank 0 comes to harm while it solves; return what process rank 1 found."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if hosted else None
    port = [str(server.port)] if server is not None else []
    paths = [str(WORKER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    logs = [(folder / f"{rank}.log").open("w") for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(folder), scenario, *port],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        assert processes[1].wait(timeout=200) == 0, (folder / "1.log").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()  # also one that is stopped
        for log in logs:
            log.close()
    return json.loads((folder / "1.json").read_text())


def test_one_that_dies_while_it_solves_is_named(tmp_path):
    found = run_two(tmp_path, "dies", hosted=True)
    assert (found["error"], found["solves"]) == ("AgreementError", 0)
    assert found["message"].startswith("process rank 0 has not said the answer in group ")


@pytest.mark.parametrize(
    ("scenario", "text"), [("dies", "the store of the job is gone"), ("stopped", "the store of the job has not answered")]
)
def test_one_that_takes_the_store_with_it_is_an_error(tmp_path, scenario, text):
    found = run_two(tmp_path, scenario, hosted=False)
    assert found["error"] == "AgreementError"
    assert found["message"].startswith(text)


def test_the_deadline_that_is_documented():
    """20 s late is waited for, 30 s is the end of it."""
    assert Settings().deadline_s == DEFAULT_DEADLINE_S == 30.0
    assert 20 < _ORDERS_BY * DEFAULT_DEADLINE_S < 30
