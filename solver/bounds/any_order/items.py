"""Compute nodes and collectives as one acyclic graph of items, for the bounds that hold whatever
the order of the compute.

Items are compute nodes and collectives in captured order, by the rank of the node or of the start.
An item takes ``span_ticks`` from its begin to its end at least: a compute node its duration, a
collective its launch and its transfer.
"""

from dataclasses import dataclass

import numpy as np

from apsched.solver.arrays.problem_arrays import Ints, ProblemArrays
from apsched.solver.arrays.reordered import Orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """N items, the items before each, and their captured places."""

    of_compute: Ints
    """(m,) item of each compute node."""
    of_collective: Ints
    """(C,) item of each collective."""
    before_begin: Ints
    before_list: Ints
    """Items that end before an item begins."""
    place: Ints
    """(N,) place among the compute nodes as captured; -1 for collectives."""

    def __len__(self) -> int:
        return len(self.place)

    def spread(self, of_compute: Ints, of_collective: Ints) -> Ints:
        """Return one array over items."""
        values = np.empty(len(self), dtype=np.int64)
        values[self.of_compute], values[self.of_collective] = of_compute, of_collective
        return values

    def backwards(self) -> "Items":
        """Return the items with time reversed: the last is the first, and the items after an item
        are before it.
        """
        last = len(self) - 1
        after = np.repeat(np.arange(len(self)), np.diff(self.before_begin))
        begin, before = rows_from(last - self.before_list, last - after, len(self))
        place = self.place[::-1]
        return Items(
            of_compute=last - self.of_compute,
            of_collective=last - self.of_collective,
            before_begin=begin,
            before_list=before,
            place=np.where(place < 0, -1, len(self.of_compute) - 1 - place),
        )


def items_of(arrays: ProblemArrays, orders: Orders) -> Items:
    """Return the items of the problem of ``orders``, whose compact form as captured is
    ``compact``.
    """
    compute_order = np.array(orders.problem.captured_order, dtype=np.int64)
    num_compute, num_collectives = len(compute_order), len(arrays.start_rank)
    item = np.empty(num_compute + num_collectives, dtype=np.int64)
    item[np.argsort(np.concatenate((compute_order, arrays.start_rank)))] = np.arange(len(item))
    of_compute, of_collective = item[:num_compute], item[num_compute:]
    needed_begin, needed_list = orders.needed
    p = orders.precedence
    pairs = [  # (later, earlier)
        (of_compute[_owners(orders.before[0])], of_compute[orders.before[1]]),
        (of_compute[needed_list], of_collective[_owners(needed_begin)]),
        (of_collective[_owners(p.ready_begin)], of_compute[p.ready_list]),
        (of_collective[_owners(arrays.after_begin)], of_collective[arrays.after_list]),
    ]
    begin, before = rows_from(
        np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs]), len(item)
    )
    place = np.full(len(item), -1, dtype=np.int64)
    place[of_compute] = np.arange(num_compute)
    return Items(
        of_compute=of_compute,
        of_collective=of_collective,
        before_begin=begin,
        before_list=before,
        place=place,
    )


def _owners(begin: Ints) -> Ints:
    """Return the row of each entry of a CSR pair."""
    owners: Ints = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
    return owners


def rows_from(row: Ints, value: Ints, num_rows: int) -> tuple[Ints, Ints]:
    """Return as CSR the pairs (row, value)."""
    begin = np.zeros(num_rows + 1, dtype=np.int64)
    begin[1:] = np.cumsum(np.bincount(row, minlength=num_rows))
    return begin, value[np.argsort(row, kind="stable")]
