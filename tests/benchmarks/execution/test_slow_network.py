"""The slow network: as fast as it says, joined to nothing else, gone however its maker ends. Root
on Linux, as CI is.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from apsched.errors import InputError
from benchmarks.execution.machine.slow_network import SlowNetwork, why_not
from tests.helpers.processes import runs

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}"),
]

SEND = """
import json, socket, sys, time
rank = int(sys.argv[1])
if rank == 0:
    server = socket.create_server(("10.203.0.1", 5000))
    connection, _ = server.accept()
    size, begin = 0, time.perf_counter()
    while data := connection.recv(1 << 16):
        size += len(data)
    print(json.dumps({"bytes": size, "seconds": time.perf_counter() - begin}))
else:
    for _ in range(600):
        try:
            connection = socket.create_connection(("10.203.0.1", 5000), timeout=5)
            break
        except OSError:
            time.sleep(0.1)
    connection.sendall(bytes(2_500_000))
    connection.close()
"""

MESSAGES = """
import json, socket, sys, time
rank, size_bytes = int(sys.argv[1]), 100_000
if rank == 0:
    server = socket.create_server(("10.203.0.1", 5000))
    connection, _ = server.accept()
    for _ in range(20):
        connection.recv(size_bytes, socket.MSG_WAITALL)
        connection.sendall(b"!")
else:
    for _ in range(600):
        try:
            connection = socket.create_connection(("10.203.0.1", 5000), timeout=60)
            break
        except OSError:
            time.sleep(0.1)
    seconds = []
    for _ in range(20):
        time.sleep(0.05)
        begin = time.perf_counter()
        connection.sendall(bytes(size_bytes))
        connection.recv(1)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds))
"""

MANY = """
import pathlib, socket, sys, time
rank, number, size_bytes = int(sys.argv[1]), 200, 12_000
if rank == 0:
    server = socket.create_server(("10.203.0.1", 5000), backlog=number)
    connections = [server.accept()[0] for _ in range(number)]
    for connection in connections:
        assert len(connection.recv(size_bytes, socket.MSG_WAITALL)) == size_bytes
else:
    connections = []
    while len(connections) < number:
        try:
            connections.append(socket.create_connection(("10.203.0.1", 5000), timeout=60))
        except OSError:
            time.sleep(0.1)
    for connection in connections:
        connection.sendall(bytes(size_bytes))
    pathlib.Path(sys.argv[2]).touch()
    time.sleep(600)
"""


def namespaces() -> set[str]:
    return {
        line.split()[0]
        for line in subprocess.check_output(["ip", "netns", "list"], text=True).splitlines()
        if line.strip()
    }


def test_it_is_as_slow_as_it_says_and_leads_nowhere_else(tmp_path):
    with SlowNetwork(2, 20) as network, (tmp_path / "log").open("w") as log:
        assert set(network.namespaces) < namespaces()
        processes = [
            network.popen(
                rank, [sys.executable, "-c", SEND, str(rank)], log=log, environment=dict(os.environ)
            )
            for rank in (0, 1)
        ]
        assert [process.wait(200) for process in processes] == [0, 0]
        routes = subprocess.check_output(
            ["ip", "-n", network.namespaces[0], "route"], text=True
        ).split("\n")
        assert [route.split()[0] for route in routes if route] == ["10.203.0.0/24"]
    assert namespaces().isdisjoint(network.namespaces)
    found = json.loads((tmp_path / "log").read_text())
    assert (
        found["bytes"] == 2_500_000
    )  # a second at 20 Mb/s; more where the machine is busy, never less
    assert found["seconds"] > 0.9


@pytest.mark.parametrize("megabits_per_s", [50, 200])
def test_an_idle_link_lets_nothing_through_for_nothing(tmp_path, megabits_per_s):
    """A message after idle time takes as long as its bytes say: were it cheaper, costs measured one
    by one would be too low.
    """
    with SlowNetwork(2, megabits_per_s) as network, (tmp_path / "log").open("w") as log:
        environment = dict(os.environ)
        processes = [
            network.popen(
                rank, [sys.executable, "-c", MESSAGES, str(rank)], log=log, environment=environment
            )
            for rank in (0, 1)
        ]
        assert [process.wait(200) for process in processes] == [0, 0]
    seconds = json.loads((tmp_path / "log").read_text())
    assert min(seconds) > 0.75 * 100_000 * 8e-6 / megabits_per_s  # more where the machine is busy


def test_a_full_queue_gets_through_after_a_change_of_the_rate(tmp_path):
    """Each of its packets is smaller than a burst of the old rate, and larger than one of the new
    rate.
    """
    sent = tmp_path / "sent"
    with SlowNetwork(2, 200) as network, (tmp_path / "log").open("w") as log:
        receiver, sender = (
            network.popen(
                rank,
                [sys.executable, "-c", MANY, str(rank), str(sent)],
                log=log,
                environment=dict(os.environ),
            )
            for rank in (0, 1)
        )
        while not sent.exists():
            assert sender.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.001)
        network.set_rate(1, 20)
        assert receiver.wait(120) == 0, (tmp_path / "log").read_text()


def test_a_process_is_in_its_namespace_once_it_is_started(tmp_path):
    """A removal right behind its start finds it, also where a busy machine is slow to enter."""
    slow = tmp_path / "ip"
    slow.write_text(f'#!/bin/sh\nsleep 0.5\nexec {shutil.which("ip")} "$@"\n')
    slow.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with SlowNetwork(2, 100) as network, (tmp_path / "log").open("w") as log:
        started = network.popen(0, ["sleep", "600"], log=log, environment=environment)
    try:
        assert started.wait(10) == -signal.SIGKILL
    finally:
        started.kill()


@pytest.mark.parametrize("how", ["raise", "SIGINT", "SIGTERM", "SIGKILL"])
def test_it_is_gone_with_its_processes_however_its_maker_ends(how):
    code = f"""
import os, sys, time
from benchmarks.execution.machine.slow_network import SlowNetwork
with SlowNetwork(3, 100) as network:
    environment = dict(os.environ)
    inside = [
        network.popen(rank, ["sleep", "600"], log=sys.stderr, environment=environment).pid
        for rank in (0, 2)
    ]
    print(*network.namespaces, *inside, flush=True)
    time.sleep(1 if {how!r} == "raise" else 600)
    raise ValueError
"""
    maker = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    *found, first, second = maker.stdout.readline().split()
    names, first, second = set(found), int(first), int(second)
    assert len(names) == 3
    if how != "raise":
        assert names < namespaces()
        assert runs(first)
        assert runs(second)
        maker.send_signal(getattr(signal, how))
    maker.wait(120)
    maker.stdout.close()
    deadline = time.monotonic() + 120
    names.add(f"apsched-{maker.pid}-switch")
    while (names & namespaces() or runs(first) or runs(second)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert namespaces().isdisjoint(names)
    assert not runs(first)
    assert not runs(second)


def test_what_it_did_not_make_it_does_not_touch():
    name = f"apsched-{os.getpid()}-1"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with pytest.raises(InputError, match="not of this process"), SlowNetwork(2, 100):
            pass
        assert name in namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
