"""What breaks while rewritten graphs run ends the job with an error that names the cause, or does
not end it: nothing hangs.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.execution.machine.slow_network import SlowNetwork, why_not
from tests.helpers.processes import WORKERS, Interpreter, Job, interpreter

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}"),
]

TIMEOUT_S = 5
PATIENT_TIMEOUT_S = 120
"""Timeout of ranks that must live through a fault: several buckets wait behind each other on a link
of 20 Mb/s, and the last one's timeout runs all the time.
"""
SLACK_S = 120
"""A busy machine; a hang would last for ever."""


class Rank:
    """A process rank in a network namespace, a fork of an interpreter of its own."""

    def __init__(self, number: int, namespace: str, folder: Path, *more: str) -> None:
        self.number = number
        self._interpreter: Interpreter = interpreter(number)
        job = asdict(Job(folder=folder, world_size=2, more=(*more, namespace)))
        (self._process,) = self._interpreter.begin(
            WORKERS / "training/fault_worker.py", [number], [job | {"folder": str(folder)}]
        )
        self._ended = False

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; return whether it came."""
        channel, deadline = self._interpreter.channel, time.monotonic() + seconds
        while not self._ended and channel.poll(max(0.0, deadline - time.monotonic())):
            self._ended = channel.recv()[0] == self._process
        return self._ended

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)


Fault = Callable[[SlowNetwork, list[Rank]], None]


def run_with_fault(
    folder: Path,
    schedule: str,
    fault: Fault,
    *,
    wait_for: tuple[int, ...],
    timeout_s: int = TIMEOUT_S,
) -> dict[int, dict]:
    """Train on two ranks, do ``fault`` after some steps, and return how the ranks of ``wait_for``
    ended.
    """
    with SlowNetwork(2, 200) as network:
        ranks = []
        try:
            for number, namespace in enumerate(network.namespaces):
                ranks.append(Rank(number, namespace, folder, schedule, str(timeout_s)))
            wait_until_steps(folder, 3, ranks)
            fault(network, ranks)
            for number in wait_for:
                assert ranks[number].ends_within(timeout_s + SLACK_S), said_by_ranks(folder)
        finally:
            for rank in ranks:
                rank.kill()
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in wait_for}


def steps_of(folder: Path) -> int:
    files = [folder / f"steps.{rank}" for rank in (0, 1)]
    return min(int(file.read_text() or 0) if file.exists() else 0 for file in files)


def wait_until_steps(folder: Path, number: int, ranks: list[Rank]) -> None:
    deadline = time.monotonic() + 240
    while steps_of(folder) < number:
        assert time.monotonic() < deadline, said_by_ranks(folder)
        assert not any(rank.ends_within(0.0) for rank in ranks), said_by_ranks(folder)
        time.sleep(0.02)


def said_by_ranks(folder: Path) -> str:
    """Return the end of each rank's log, and its report where it wrote one."""
    files = [folder / f"{rank}.{kind}" for rank in (0, 1) for kind in ("log", "json")]
    return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in files if file.exists())


SCHEDULES = pytest.mark.parametrize("schedule", ["captured", "random"])


@SCHEDULES
def test_a_killed_rank_ends_the_others_with_an_error(tmp_path, schedule):
    found = run_with_fault(tmp_path, schedule, lambda _, ranks: ranks[1].kill(), wait_for=(0,))
    assert (
        "onnection" in found[0]["error"]
        or "Timed out" in found[0]["error"]
        or "peer" in found[0]["error"]
    ), found
    assert found[0]["last_step_seconds"] < TIMEOUT_S + SLACK_S


@SCHEDULES
def test_a_cut_link_ends_the_job_within_the_timeout(tmp_path, schedule):
    found = run_with_fault(tmp_path, schedule, lambda network, _: network.cut(1), wait_for=(0, 1))
    for report in found.values():
        assert any(cause in report["error"] for cause in ("imed out", "timeout", "onnection")), (
            found
        )
        assert report["last_step_seconds"] < TIMEOUT_S + SLACK_S


@SCHEDULES
def test_a_link_that_comes_back_and_a_slow_rank_only_take_time(tmp_path, schedule):
    def fault(network: SlowNetwork, ranks: list[Rank]) -> None:
        network.cut(1)
        time.sleep(1)
        network.restore(1)
        wait_until_steps(tmp_path, steps_of(tmp_path) + 2, ranks)
        network.set_rate(1, 20)
        wait_until_steps(tmp_path, steps_of(tmp_path) + 2, ranks)
        (tmp_path / "stop").touch()

    found = run_with_fault(tmp_path, schedule, fault, wait_for=(0, 1), timeout_s=PATIENT_TIMEOUT_S)
    assert [report["error"] for report in found.values()] == ["", ""]
    assert found[0]["steps"] == found[1]["steps"] >= 7
