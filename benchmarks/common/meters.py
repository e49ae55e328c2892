"""The processor time, wall time and memory of a piece of work."""

import gc
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Used:
    """Seconds that the body of :func:`timed` took; set when it ends."""

    cpu_s: float = 0.0
    """Processor time of this process, all its threads, and the ended processes that it started."""
    wall_s: float = 0.0


def cpu_s() -> float:
    """Return the processor time of this process so far, and of those that it started and that have
    ended.
    """
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def timed() -> Iterator[Used]:
    """Time the body; garbage of earlier code is collected first, so that it is not charged to the
    body.
    """
    gc.collect()
    used = Used()
    cpu_began_s, wall_began_s = cpu_s(), time.perf_counter()
    try:
        yield used
    finally:
        used.cpu_s, used.wall_s = cpu_s() - cpu_began_s, time.perf_counter() - wall_began_s


def held_bytes() -> int:
    """Return the memory that this process holds now (resident), garbage collected."""
    gc.collect()
    return _status_bytes("VmRSS")


def reset_peak() -> None:
    """Let :func:`peak_bytes` count from now on; where the system cannot, it counts from the start
    of the process.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size


def peak_bytes() -> int:
    """Return the most memory that this process has held (resident)."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )  # of systems without /proc: a peak, for want of better
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
