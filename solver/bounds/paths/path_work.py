"""Compute along the paths: the least work between two places of the compute stream."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from apsched.solver.arrays.problem_arrays import Ints, ProblemArrays

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWork:
    """Compute nodes, each between two of the m compute nodes that the paths follow.

    E_g is the time when compute node g begins, R_g the time when the compute stream reaches slot g.
    """

    ticks: Ints
    """(n,) durations."""
    release: Ints
    """(n,) it begins at or after E_g."""
    due: Ints
    """(n,) it has ended at R_g; above m: that is not known of any slot."""
    before: Ints
    """(m+1,) least work from time 0 to R_g, on a path that leaves the compute stream there."""
    after: Ints
    """(m+1,) least work from E_g to the end, on a path that comes to the compute stream there;
    entry 0 is all work.
    """
    own: Ints
    """(C,) work that runs behind the compute node before the ready slot of a reduction, before its
    launch, and for that alone; no other entry counts it, but ``after`` does.
    """

    @classmethod
    def in_order(cls, arrays: ProblemArrays) -> Self:
        """Return the compute of ``arrays`` in its order."""
        place = np.arange(len(arrays.compute_ticks), dtype=np.int64)
        return cls(
            ticks=arrays.compute_ticks,
            release=place,
            due=place + 1,
            before=arrays.time_before,
            after=arrays.time_after,
            own=np.zeros_like(arrays.ready_slot),
        )

    @classmethod
    def between_steps(
        cls, *, ticks: Ints, release: Ints, due: Ints, num_compute: int, own: Ints
    ) -> Self:
        """Return compute nodes between ``num_compute`` others: all that is due runs before a slot,
        and all that is released there behind it.
        """
        done = np.bincount(np.minimum(due, num_compute + 1), ticks, num_compute + 2)
        to_do = np.bincount(release, ticks, num_compute + 2)
        return cls(
            ticks=ticks,
            release=release,
            due=due,
            before=np.cumsum(done)[: num_compute + 1].astype(np.int64),
            after=np.cumsum(to_do[::-1])[::-1][: num_compute + 1].astype(np.int64),
            own=own,
        )

    def between(self, slots: Ints) -> Floats:
        """Return the least work from E_g to R_h, for each g and the next one h of the ascending
        ``slots``.
        """
        first = np.searchsorted(slots, self.release, side="right") - 1
        inside = (first >= 0) & (first < len(slots) - 1)
        inside &= self.due <= slots[np.minimum(first + 1, len(slots) - 1)]
        work = np.bincount(first[inside], self.ticks[inside], len(slots) - 1)
        return work.astype(np.float64)  # of no entries bincount makes integers
