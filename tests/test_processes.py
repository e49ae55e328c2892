"""Process ranks run in forks of a few interpreters: what fails or hangs is reported, and nothing is
left over.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import processes
from tests.helpers.processes import run_processes, runs

pytestmark = [
    pytest.mark.alone,
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SCRIPT = """
import json, os, signal, sys, time
def main(rank, world_size, folder, what):
    if what == "one fails" and rank == 2:
        raise ValueError("of rank 2")
    if what == "one is killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("one fails", "one is killed", "all hang"):
        (folder / f"{rank}.process").write_text(str(os.getpid()))
        time.sleep(600)
    found = {"hash": hash("text"), "value": os.environ.get("VALUE")}
    (folder / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def assert_gone(folder: Path, ranks: tuple[int, ...]) -> None:
    found = [int((folder / f"{rank}.process").read_text()) for rank in ranks]
    deadline = time.monotonic() + 60
    while any(map(runs, found)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(runs, found))


def test_interpreters_stay_and_process_ranks_have_hash_seeds_of_their_own(
    script, tmp_path, monkeypatch
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first = run_processes(script, tmp_path / "first", 6, "", timeout_s=300)
    monkeypatch.setenv("VALUE", "set later")
    again = run_processes(script, tmp_path / "again", 4, "", timeout_s=300)
    other = run_processes(script, tmp_path / "other", 1, "", timeout_s=300, new_interpreters=True)
    assert len({report["hash"] for report in first}) == processes.NUM_INTERPRETERS
    assert [report["hash"] for report in again] == [report["hash"] for report in first[:4]]
    assert other[0]["hash"] not in {report["hash"] for report in first}
    assert [report["value"] for report in (*first, *again)] == [None] * 6 + ["set later"] * 4


@pytest.mark.parametrize(
    ("what", "said", "hanging"),
    [
        ("one fails", "process rank 2 ended with exit status 1", (0, 1, 3)),
        ("one is killed", "process rank 1 ended with exit status 1", (0, 2, 3)),
    ],
)
def test_one_that_fails_is_reported_while_the_others_hang(
    script, tmp_path, monkeypatch, what, said, hanging
):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    with pytest.raises(AssertionError, match=said) as caught:
        run_processes(script, tmp_path, 4, what, timeout_s=300)
    text = str(caught.value)
    assert [
        rank for rank in range(4) if f"process rank {rank} still ran, and was killed" in text
    ] == list(hanging)
    assert {"one fails": "ValueError: of rank 2", "one is killed": "exit status -9"}[what] in text
    assert_gone(tmp_path, hanging)
    assert len(run_processes(script, tmp_path / "next", 4, "", timeout_s=300)) == 4, (
        "the interpreters serve on"
    )


def test_what_takes_too_long_is_killed(script, tmp_path):
    run_processes(script, tmp_path / "before", 2, "", timeout_s=300)
    with pytest.raises(
        AssertionError, match="process rank 0 still ran, and was killed\nprocess rank 1 still ran"
    ):
        run_processes(script, tmp_path, 2, "all hang", timeout_s=3)
    assert_gone(tmp_path, (0, 1))


def test_nothing_outlives_the_process_that_started_it(script, tmp_path):
    code = """
import sys
from pathlib import Path
from tests.helpers.processes import run_processes
run_processes(Path(sys.argv[1]), Path(sys.argv[2]), 2, "all hang", timeout_s=300)
"""
    tests = Path(processes.__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
        )
    }
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(script), str(tmp_path)], env=environment
    )
    deadline = time.monotonic() + 200
    while len(list(tmp_path.glob("*.process"))) < 2:
        assert starter.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert_gone(tmp_path, (0, 1))
