"""A slow network on one machine: a network namespace for each process rank, joined by a bridge, at
a limited rate (Linux, root).

Every rank's namespace has one interface, ``eth0``, a veth pair whose other end lies on the bridge
in a namespace of its own. Both ends are limited by ``tc tbf``, so that a rank sends and receives at
no more than the rate. None of them has a route to anywhere else.

The name of a namespace contains the process that made it, and the module touches no other
namespaces. When the body of ``with`` ends, with or without an error, the namespaces and the
processes in them are removed; where the process is killed, a guard that it started removes them.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from apsched.errors import InputError

_MTU_BYTES = 9000
_BURST_MS = 0.55
"""Size of a burst that an idle link passes at once, as milliseconds of the link's rate. A larger
burst makes a message on an idle link cheaper than one that queues behind another (with 128 KiB at
200 Mb/s, by 5 ms). At 1 Gb/s a burst holds one of the 64 KiB that TCP sends as one; where those do
not fit, ``tbf`` cuts them into packets, which costs compute time.
"""
_LEAST_BURST_BYTES = _MTU_BYTES + 1000
_LATENCY_MS = 400
"""Time that a packet may queue before it is dropped."""


class SlowNetwork:
    """Namespaces of ``num_ranks`` process ranks, each with a link of ``megabits_per_s``."""

    def __init__(self, num_ranks: int, megabits_per_s: float) -> None:
        if not 2 <= num_ranks <= 64:
            raise InputError(f"a slow network joins 2 to 64 process ranks; found {num_ranks}")
        if not 1 <= megabits_per_s <= 100_000:
            raise InputError(f"a rate is 1 to 100000 Mb/s; found {megabits_per_s}")
        self.num_ranks, self.megabits_per_s = num_ranks, megabits_per_s
        prefix = f"apsched-{os.getpid()}"
        self.namespaces = tuple(f"{prefix}-{rank}" for rank in range(num_ranks))
        self._switch = f"{prefix}-switch"
        self._queues = itertools.count(1)  # a handle of its own makes a queue a new one
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        why = why_not()
        if why:
            raise InputError(f"a slow network cannot be made here: {why}")
        there = set(_run("ip", "netns", "list").split())
        taken = sorted(there.intersection((self._switch, *self.namespaces)))
        if taken:
            raise InputError(
                f"network namespaces {', '.join(taken)} exist and are not of this process: remove"
                " them"
            )
        self._guard = _start_guard((self._switch, *self.namespaces))
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces and the processes that still run in them."""
        _remove((*self.namespaces, self._switch))
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait(timeout=30)
            self._guard = None

    def popen(
        self, rank: int, command: Sequence[str], *, log: IO[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` as process rank ``rank``, its gloo on the slow link. It is in its
        namespace at the return: a removal finds it there.
        """
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[rank], *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment | {"GLOO_SOCKET_IFNAME": "eth0"},
        )
        while process.poll() is None and process.pid not in _inside(self.namespaces[rank]):
            time.sleep(0.001)
        return process

    def set_rate(self, rank: int, megabits_per_s: float) -> None:
        """Change the rate of one rank's link, both ways. Packets that wait in its queue are lost,
        and TCP sends them again: a queue that is changed in place keeps them, and never passes one
        that is larger than the new burst (``tbf_dequeue`` of Linux).
        """
        for name, interface in ((self.namespaces[rank], "eth0"), (self._switch, f"port{rank}")):
            _run(
                "ip",
                "netns",
                "exec",
                name,
                "tc",
                "qdisc",
                "replace",
                "dev",
                interface,
                "root",
                "handle",
                f"{next(self._queues):x}:",
                *_tbf(megabits_per_s),
            )

    def cut(self, rank: int) -> None:
        """Cut the link of ``rank``."""
        _run("ip", "-n", self._switch, "link", "set", f"port{rank}", "down")

    def restore(self, rank: int) -> None:
        """Join the link of ``rank`` again."""
        _run("ip", "-n", self._switch, "link", "set", f"port{rank}", "up")

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "mtu", str(_MTU_BYTES), "up")
        for rank, name in enumerate(self.namespaces):
            _run("ip", "netns", "add", name)
            port = f"port{rank}"
            _run(
                "ip",
                "-n",
                self._switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            _run(
                "ip",
                "-n",
                self._switch,
                "link",
                "set",
                port,
                "mtu",
                str(_MTU_BYTES),
                "master",
                "bridge",
                "up",
            )
            _run("ip", "-n", name, "address", "add", f"10.203.0.{rank + 1}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "mtu", str(_MTU_BYTES), "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            self.set_rate(rank, self.megabits_per_s)


def why_not() -> str:
    """Return why no slow network can be made here; empty where it can."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "it needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return (
            f"{' and '.join(missing)} (iproute2) {'is' if len(missing) == 1 else 'are'} not"
            " installed"
        )
    return ""


def _tbf(megabits_per_s: float) -> tuple[str, ...]:
    burst_bytes = max(round(megabits_per_s * 125 * _BURST_MS), _LEAST_BURST_BYTES)
    return (
        "tbf",
        "rate",
        f"{round(megabits_per_s * 1000)}kbit",
        "burst",
        str(burst_bytes),
        "latency",
        f"{_LATENCY_MS}ms",
    )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}; may this"
            " process make network namespaces?"
        )
    return done.stdout


def _inside(name: str) -> list[int]:
    """Return the processes in the namespace ``name``."""
    found = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
    )
    return [int(process) for process in found.stdout.split()]


def _remove(names: Sequence[str]) -> None:
    for name in names:
        for process in _inside(name):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _start_guard(names: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that removes ``names`` when this process has ended, and lives no longer than
    that.
    """
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *names],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _guard(names: Sequence[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()  # ends with the process that started this one, whatever ended it
    _remove(names)


if __name__ == "__main__":
    _guard(sys.argv[1:])
