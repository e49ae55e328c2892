"""The compute order in the CP-SAT model: as captured, or one that the model decides.

One description for both. As captured, one compute node stands for all before it: the last that a
launch depends on, the first that needs a result. Where the order is free all of them count, and
storages with fixed lives become lives from their first to their last node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from apsched.config import Caps
from apsched.solver.arrays.problem_arrays import Ints, ProblemArrays
from apsched.solver.arrays.reordered import Orders

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLife:
    """A storage that no launch or wait touches."""

    nodes: tuple[int, ...]
    """Compute nodes that touch it, or that a view of it follows; m stands for the output."""
    users: tuple[int, ...]
    """Compute nodes that use it themselves."""
    from_beginning: bool
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeOrder:
    """Blocks of compute nodes that the model puts in order; nodes of one block stay together."""

    first: tuple[int, ...]
    """(K+1,) first compute node of each block, as captured."""
    sooner: tuple[frozenset[int], ...]
    """(K,) blocks that stand before a block in every order."""
    max_move: int | None
    lives: tuple[FixedLife, ...]

    def pairs(self) -> list[tuple[int, int]]:
        """Return the pairs of blocks whose order is open."""
        count = len(self.sooner)
        return [(a, b) for b in range(count) for a in range(b) if a not in self.sooner[b]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOrder:
    """Rows of compute nodes as captured; m stands for the output."""

    before: Rows
    """(m,) compute nodes that stand before a compute node."""
    ready: Rows
    """(C,) compute nodes that stand before a launch."""
    needed: Rows
    """(C,) compute nodes that need a result."""
    touching: Rows
    """(S,) compute nodes of which the last touches a storage last, among compute nodes."""
    free: FreeOrder | None = None


def as_captured(arrays: ProblemArrays) -> ComputeOrder:
    """Return the compute order in its order."""
    num_compute = len(arrays.compute_ticks)
    return ComputeOrder(
        before=tuple((k - 1,) if k else () for k in range(num_compute)),
        ready=tuple((slot - 1,) if slot else () for slot in arrays.ready_slot.tolist()),
        needed=tuple((slot,) if slot < num_compute else () for slot in arrays.need_slot.tolist()),
        touching=tuple((k,) if k >= 0 else () for k in arrays.storage_last_compute.tolist()),
    )


def in_any_order(orders: Orders, caps: Caps) -> ComputeOrder:
    """Return the compute order with its order open, within ``caps.max_compute_move``."""
    arrays, p = orders.arrays, orders.precedence
    sooner: list[frozenset[int]] = []
    for row in _rows(p.before_begin, p.before_list):
        sooner.append(frozenset(row).union(*(sooner[a] for a in row)))
    needed = [set(row) for row in _rows(*orders.needed)]
    for c in reversed(range(len(needed))):
        for d in arrays.awaited_by(c).tolist():
            needed[d] |= needed[
                c
            ]  # its result is needed by the launch of c, and that by what needs c
    fixed = orders.fixed
    lives = zip(
        _rows(fixed.begin, fixed.nodes),
        _rows(fixed.user_begin, fixed.users),
        fixed.from_beginning.tolist(),
        orders.fixed_bytes.tolist(),
        strict=True,
    )
    return ComputeOrder(
        before=_rows(*orders.surely_before),
        ready=_rows(p.ready_begin, p.ready_list),
        needed=tuple(tuple(sorted(row)) for row in needed),
        touching=_rows(orders.moving.begin, orders.moving.nodes),
        free=FreeOrder(
            first=tuple(p.first.tolist()),
            sooner=tuple(sooner),
            max_move=caps.max_compute_move,
            lives=tuple(
                FixedLife(nodes=nodes, users=users, from_beginning=early, size_bytes=size)
                for nodes, users, early, size in lives
                if nodes or early
            ),
        ),
    )


def _rows(begin: Ints, values: Ints) -> Rows:
    listed: Sequence[int] = values.tolist()
    return tuple(
        tuple(listed[i:j]) for i, j in zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True)
    )
