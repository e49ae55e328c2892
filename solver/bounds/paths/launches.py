"""Where the gathers of a key are launched, for the rows of memory: ``docs/formulation.md``, (W6).

A gather holds its output from its launch to its need. At a full compute node there is no room for
all gathers that are needed behind it, so some are launched behind it, and transferred behind that.
Each row of memory has a price for a byte; a bucket is launched where the transfers that paths count
behind its launch, and the bytes that it holds until its members are needed, cost least.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.bounds.paths.bucket_costs import BucketCosts
from apsched.solver.bounds.paths.network import Network

Floats = npt.NDArray[np.float64]
Prices = tuple[Floats, Floats, Floats, Floats, Floats]
"""The rate and the fee of each head, (n, options); and for each member its bytes, the cost that it
adds as a rider, and its price alone, (n,).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """The launches that can be cheapest for some weights: positions of sampled slots, each with all
    slots up to the next one.
    """

    place: Ints
    """(n, K) for a bucket of each head; the last is that of the own need."""
    alone: Ints
    """(n,) the cheapest for each gather alone."""

    def of_members(self, head: Ints, option: Ints) -> Ints:
        """Return the positions of all members: ``head`` as ``cheapest_buckets`` gives it, and the
        options of :func:`with_launches`.
        """
        chosen = self.place[np.arange(len(head)), np.maximum(option, 0) % self.place.shape[1]]
        return np.where(head >= 0, chosen[np.maximum(head, 0)], self.alone)

    def lines(self, option: Ints) -> Ints:
        """Return the lines of the options."""
        return np.where(option >= 0, option // self.place.shape[1], -1)


def with_launches(
    net: Network, part: BucketCosts, need: Ints, flow: Floats, prices: Prices
) -> tuple[Prices, Launches]:
    """Return ``prices`` with an option for each line and each launch, (W6); ``need`` is the last
    position at or before the need of each gather.

    A launch at or behind position j costs the weight of the paths that leave, at j or before, for
    all that is launched behind; and each member the prices of memory from there to its need.
    """
    rate, fee, size, ride, alone = prices
    num = len(size)
    behind = np.cumsum(_leaving(net, part, flow))
    held = np.cumsum(flow[net.block("memory")]) * net.byte_ticks * part.held_share
    steps = np.append(np.nonzero(np.diff(behind) > 0)[0], 0)[: len(net.slots)]
    place = np.column_stack((np.broadcast_to(steps, (num, len(steps))), need))
    allowed: Bools = place <= need[:, None]
    weight, saved = behind[place], held[place]
    late = rate[:, :, None] + weight[:, None] * part.lines[:, 1, None] - saved[:, None]
    begun = fee[:, :, None] + weight[:, None] * part.lines[:, 0, None]
    holds = size * held[need]
    each = np.where(allowed, weight * part.transfer[:, None] - saved * size[:, None], np.inf)
    cheapest = each.argmin(axis=1)
    extended = (
        late.reshape(num, -1),
        np.where(allowed[:, None], begun, np.inf).reshape(num, -1),
        size,
        ride + holds,
        alone + holds + each.min(axis=1),
    )
    return extended, Launches(place=place, alone=place[np.arange(num), cheapest])


def add_launches(
    net: Network, part: BucketCosts, need: Ints, place: Ints, load: Floats, added: Floats
) -> None:
    """Add the costs of gathers launched at ``place`` to the arcs: their transfers, ``load`` (of a
    bucket at its head), to paths that leave at or before that, and their bytes to rows of memory
    behind it, up to the need.
    """
    num_slots = len(net.slots)
    behind = np.cumsum(np.bincount(place, load, num_slots)[::-1])[::-1]
    for block in net.leaves_for_all(part.stream):
        added[block] += behind
    bytes_ticks = part.size_bytes * part.held_share * net.byte_ticks
    begun, ended = (np.bincount(at + 1, bytes_ticks, num_slots + 1) for at in (place, need))
    added[net.block("memory")] += np.cumsum(begun - ended)[:num_slots]


def _leaving(net: Network, part: BucketCosts, flow: Floats) -> Floats:
    total = np.zeros(len(net.slots))
    for block in net.leaves_for_all(part.stream):
        total += flow[block]
    return total
