"""Settings for equal times of equal steps: processors that do not sleep, memory that stays, a core
for each process rank. Linux.

In a virtual machine the host wakes a processor that sleeps: that took 0.4 to 3 ms here, where a
processor that waits takes 20 us, and a step has a hundred messages. Memory that goes back to the
kernel is zeroed page by page when it returns: 4,000 to 14,000 page faults in a step of 0.6 s, a few
us each. A GPU has neither: its streams wait awake, and its allocator keeps its memory.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LATENCY = Path("/dev/cpu_dma_latency")
_HEAP = {"mmap_threshold": 2**30, "trim_threshold": 2**34, "arena_max": 1, "hugetlb": 1}
"""glibc: freed memory stays in one heap, of large pages."""

ENVIRONMENT = {
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _HEAP.items())
}
"""Environment of the processes whose steps are timed."""


@contextmanager
def processors_awake() -> Iterator[bool]:
    """Keep all processors from sleeping until the body ends; yields whether this machine lets its
    user ask for that.

    The kernel holds to a latency of 0 us as long as the file is open
    (Documentation/power/pm_qos_interface.rst).
    """
    try:
        asked = os.open(_LATENCY, os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        os.write(asked, (0).to_bytes(4, "little"))
        yield True
    finally:
        os.close(asked)


def own_core(process_rank: int) -> None:
    """Let this process run on one processor, another one for each process rank while there are so
    many; threads to come follow.
    """
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[process_rank % len(allowed)]})
