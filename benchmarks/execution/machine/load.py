"""The load of other programs and of other virtual machines; a step that they disturbed is no
measurement. Linux.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist

Found = TypeVar("Found")
MOST_TRIES = 3
"""Of a measurement, until others disturb none."""

QUIET_CORES = 0.15
"""A step during which others kept more cores busy than that is disturbed; the machine's clock ticks
every 10 ms, which is 0.03 of 0.3 s.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """Processor time of the whole machine and of this process, and time by the clock."""

    machine_s: float
    stolen_s: float
    """Time that the host gave to other virtual machines while this one had work."""
    own_s: float
    clock_s: float

    @classmethod
    def now(cls) -> Self:
        """Return them so far. Interrupts belong to no process: most are the network's."""
        user, nice, system, _idle, _io, _hard, _soft, steal = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        )
        ticks_in_s = os.sysconf("SC_CLK_TCK")
        return cls(
            (user + nice + system) / ticks_in_s,
            steal / ticks_in_s,
            time.process_time(),
            time.monotonic(),
        )

    def since(self, before: "Load") -> "Load":
        """Return the times from ``before`` to this load."""
        return Load(
            self.machine_s - before.machine_s,
            self.stolen_s - before.stolen_s,
            self.own_s - before.own_s,
            self.clock_s - before.clock_s,
        )


def others_cores(loads: Sequence[Load]) -> float:
    """Return how many cores others kept busy on average; ``loads`` are those of all process ranks
    over the same span.
    """
    by_programs_s = max(0.0, loads[0].machine_s - sum(load.own_s for load in loads))
    return (by_programs_s + loads[0].stolen_s) / loads[0].clock_s


def is_quiet(cores: float) -> bool:
    """Whether others that kept so many cores busy disturbed nothing."""
    return cores <= QUIET_CORES


def undisturbed(cores: Sequence[float]) -> list[int]:
    """Return the places of the steps that count: the quiet ones, or where these are fewer than
    four, the four that were least disturbed.
    """
    quiet = [k for k, busy in enumerate(cores) if is_quiet(busy)]
    least = sorted(sorted(range(len(cores)), key=lambda k: cores[k])[:4])
    return quiet if len(quiet) >= len(least) else least


def everywhere(mine: Any) -> list[Any]:
    """Return the values of ``mine`` on all process ranks, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def least_disturbed(
    measure: Callable[[], Found], most_tries: int = MOST_TRIES
) -> tuple[Found, float]:
    """Return the least disturbed result of ``measure``, and the number of cores that others kept
    busy. The function calls ``measure`` up to ``most_tries`` times, until the others keep quiet.

    Every process rank calls this. A calibration beside another program describes another machine:
    with a third of a core taken, its times of compute and transfers were a fifth too high.
    """
    best: tuple[Found, float] | None = None
    for _ in range(most_tries):
        before = Load.now()
        found = measure()
        cores = others_cores(everywhere(Load.now().since(before)))
        if best is None or cores < best[1]:
            best = (found, cores)
        if is_quiet(cores):
            break
    assert best is not None
    return best
