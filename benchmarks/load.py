"""What programs other than this job take of the machine meanwhile; a step that they disturbed is no measurement. Linux."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist

Found = TypeVar("Found")
_MOST_TRIES = 2

QUIET_CORES = 0.15
"""A step during which others kept more cores busy than that is disturbed; the machine's clock ticks every 10 ms, which is 0.03 of 0.3 s."""


@dataclass(frozen=True, slots=True)
class Load:
    """Time on processors: of the whole machine, and of this process; and by the clock."""

    machine_s: float
    own_s: float
    clock_s: float

    @classmethod
    def now(cls) -> Self:
        """Return them so far. Interrupts are nobody's: most are the network's."""
        user, nice, system = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:4])
        return cls((user + nice + system) / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic())

    def since(self, before: "Load") -> "Load":
        """Return what went by since ``before``."""
        return Load(self.machine_s - before.machine_s, self.own_s - before.own_s, self.clock_s - before.clock_s)


def others_cores(loads: Sequence[Load]) -> float:
    """Return how many cores others kept busy on average; ``loads`` are those of all process ranks over the same span."""
    return max(0.0, (loads[0].machine_s - sum(load.own_s for load in loads)) / loads[0].clock_s)


def undisturbed(cores: Sequence[float]) -> list[int]:
    """Return the places of the steps that count: the quiet ones, or where these are fewer than four, the four that were least disturbed."""
    quiet = [k for k, busy in enumerate(cores) if busy <= QUIET_CORES]
    least = sorted(sorted(range(len(cores)), key=lambda k: cores[k])[:4])
    return quiet if len(quiet) >= len(least) else least


def everywhere(mine: Any) -> list[Any]:
    """Return what each process rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def least_disturbed(measure: Callable[[], Found]) -> tuple[Found, float]:
    """Return what ``measure`` finds, and how many cores others kept busy; it is called once more unless they kept quiet.

    Every process rank calls this. A calibration beside another program is one of another machine: with a third of a core taken, what it
    said of compute and transfers was a fifth too high.
    """
    best: tuple[Found, float] | None = None
    for _ in range(_MOST_TRIES):
        before = Load.now()
        found = measure()
        cores = others_cores(everywhere(Load.now().since(before)))
        if best is None or cores < best[1]:
            best = (found, cores)
        if cores <= QUIET_CORES:
            break
    assert best is not None
    return best
