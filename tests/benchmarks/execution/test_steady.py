"""Settings that keep times steady, on this machine."""

import ctypes
import os
import subprocess
import sys

import pytest

from benchmarks.execution.machine import steady
from benchmarks.execution.machine.steady import ENVIRONMENT, own_core, processors_awake

_FAULTS = """
import resource, torch
def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([touched() for _ in range(8)][-1])
"""


def _asked_latency_us() -> int:
    """Return what the kernel holds to at this moment."""
    with open(steady._LATENCY, "rb") as asked:
        return int.from_bytes(asked.read(4), "little", signed=True)


@pytest.mark.alone
def test_processors_stay_awake_until_the_body_ends():
    """Where the kernel lets this user ask; where not, it says so. Alone: another process that asks
    would be seen.
    """
    if not os.access(steady._LATENCY, os.R_OK | os.W_OK):
        with processors_awake() as awake:
            assert not awake
        return
    before = _asked_latency_us()
    with processors_awake() as awake:
        assert awake
        assert _asked_latency_us() == 0
    assert _asked_latency_us() == before > 0


def test_a_machine_that_lets_nobody_ask_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(steady, "_LATENCY", tmp_path / "missing")
    with processors_awake() as awake:
        assert not awake


def test_memory_that_was_freed_is_not_faulted_in_again():
    """16 MiB, four thousand pages; glibc gives them back and takes them again."""
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("not glibc")
    ran = subprocess.run(
        [sys.executable, "-c", _FAULTS],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ran.stdout) < 100


def test_each_process_rank_has_a_core_of_its_own():
    allowed = os.sched_getaffinity(0)
    try:
        found = []
        for rank in range(len(allowed) + 1):
            own_core(rank)
            found.append(os.sched_getaffinity(0))
            os.sched_setaffinity(0, allowed)
        assert all(len(cores) == 1 for cores in found)
        assert set().union(*found[:-1]) == allowed
        assert found[-1] == found[0]
    finally:
        os.sched_setaffinity(0, allowed)
