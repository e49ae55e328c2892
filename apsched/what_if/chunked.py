"""``apsched audit --what-if-chunked``: the largest possible gain of asynchronous tensor
parallelism.

A collective on the path (tensor or expert parallel) waits for a matrix product, and the next matrix
product waits for it. Suppose both products and the nodes between them are split in two along the
rows: the first half is on the wire while the second is computed. The bound gives the largest gain
of such kernels before they are written; it knows no price of smaller products (see
``apsched.solver.bounds.any_order.chunked``).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import networkx as nx

from apsched.config import Caps
from apsched.graph.records import NodeRecord
from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.quantities import show_us
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.relaxed import without_copies
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.bound import loose_program
from apsched.solver.bounds.any_order.chunked import chunked_bound
from apsched.solver.bounds.best import any_order_bound
from apsched.solver.bounds.linear_program import costs_of
from apsched.units import ticks_to_us

NUM_PARTS = 2
_PRODUCTS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "_scaled_mm",
        "_int_mm",
        "_addmm_activation",
        "_grouped_mm",
        "_scaled_grouped_mm",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfChunked:
    """Two bounds on step time with compute anywhere: as the graph is, and in parts."""

    num_parts: int
    num_collectives: int
    num_compute_nodes: int
    whole_us: float
    bound_us: float
    """Idealised: no schedule of this graph, nor necessarily one of any graph, reaches it."""


def what_if_chunked(dag: nx.DiGraph, problem: Problem, caps: Caps) -> WhatIfChunked:
    """Return the bounds of ``problem``, which ``dag`` states, with everything around collectives on
    the path whole and in parts.
    """
    instance = Instance.of(problem, caps)
    orders = Orders(instance)
    split = around_path(dag)
    anywhere = instance.within(replace(caps, max_compute_move=None))
    whole = any_order_bound(anywhere, orders).ticks
    instance = without_copies(instance)
    parts = chunked_bound(
        loose_program(instance, orders, costs_of(instance)),
        instance.problem,
        split,
        NUM_PARTS,
    ).ticks
    return WhatIfChunked(
        num_parts=NUM_PARTS,
        num_collectives=sum(c.start in split for c in problem.collectives),
        num_compute_nodes=sum(node in split for node in problem.captured_order),
        whole_us=ticks_to_us(whole),
        bound_us=ticks_to_us(parts),
    )


def around_path(dag: nx.DiGraph) -> frozenset[int]:
    """Return the starts of collectives on the path, and the compute back to the matrix products
    before and on to those behind them.
    """
    records: list[NodeRecord] = [dag.nodes[rank]["record"] for rank in range(dag.number_of_nodes())]
    split: set[int] = set()
    for record in records:
        collective = record.collective
        if collective is not None and collective.on_path and not collective.bucketable:
            split.add(record.rank)
            split |= _reached(records, dag.predecessors, record.rank) | _reached(
                records, dag.successors, collective.wait
            )
    return frozenset(split)


def _reached(
    records: list[NodeRecord], step: Callable[[int], Iterable[int]], start: int
) -> set[int]:
    """Return the compute that is reached from ``start`` through views and compute, up to matrix
    products and before attention.
    """
    seen, found, stack = {start}, set(), [start]
    while stack:
        for node in step(stack.pop()):
            record = records[node]
            if (
                node in seen
                or record.kind not in (NodeKind.VIEW, NodeKind.COMPUTE)
                or "attention" in record.target
            ):
                continue
            seen.add(node)
            if record.kind is NodeKind.COMPUTE:
                found.add(node)
            if not _is_product(record):
                stack.append(node)
    return found


def _is_product(record: NodeRecord) -> bool:
    return not _PRODUCTS.isdisjoint(record.target.split("."))


def line(name: str, found: WhatIfChunked) -> str:
    """Return a one-line summary of the potential gain."""
    if not found.num_collectives:
        return f"{name}: no collective on the path to split"
    share = max(1 - found.bound_us / found.whole_us, 0.0) if found.whole_us else 0.0
    return (
        f"{name}: with its {found.num_collectives} collectives on the path, and the"
        f" {found.num_compute_nodes} compute nodes around them, split in {found.num_parts} the"
        f" bound would be {show_us(found.bound_us)}, whole and with compute anywhere it is"
        f" {show_us(found.whole_us)}: {100 * share:.2f} % to win at best (idealised: parts of a"
        " product are as efficient as the whole)"
    )
