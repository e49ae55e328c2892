"""Machine code of the inner loops: which part is missing, and how to compile a part ahead of a
solve, on a small problem. numba keeps it on disk, and processes that begin later load it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apsched.config import Caps, SolveOptions
from apsched.costs.price_curve import PriceCurve
from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Collective, Key, Problem, Storage
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.jit import has_machine_code
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.bound import loose_program
from apsched.solver.bounds.any_order.chain import longest_way
from apsched.solver.bounds.any_order.compute_chain import compute_chain_bound
from apsched.solver.bounds.best import best_bound
from apsched.solver.bounds.launch_sequence import Stream, least_step
from apsched.solver.bounds.linear_program import costs_of
from apsched.solver.program.program import NODE
from apsched.solver.reorder.fill_stalls import FillLimits, Pass, Units, refill
from apsched.solver.search.decoder import evaluate_labels
from apsched.solver.solve import solve

SEARCH = "search"
"""Functions that every solve runs."""
ORDERS = "orders"
"""Functions that search for orders of the compute, and bound them."""
_LAYERS = 16
"""So many that the problem is searched and not decided as a whole."""
_BUDGET = 8.0
_SIZE_BYTES = 1 << 20


def missing_parts() -> tuple[str, ...]:
    """Return the names of the parts without machine code."""
    return tuple(name for name, probe in _PROBES.items() if not has_machine_code(probe))


def compile_part(name: str) -> None:
    """Compile the part ``name``. Contention is left out: numba compiles the loops with it apart."""
    _PARTS[name]()


def _search() -> None:
    least_step(_stream(), np.inf)
    solve(layered_problem(_LAYERS), Caps(max_compute_move=0), SolveOptions(budget=_BUDGET))


def _stream() -> Stream:
    """Return a stream of one cell."""
    one = np.ones(1)
    return Stream(
        after=one,
        behind=one,
        way=one,
        flat=np.ones(2),
        copy=1.0,
        alone_cells=np.ones(1, np.int64),
        alone=one,
        counted_after=one,
        counted_way=one,
        lead=1.0,
        compute=1.0,
        work=1.0,
    )


def _orders() -> None:
    instance = Instance.of(layered_problem(_LAYERS), Caps())
    orders = Orders(instance)
    best_bound(instance, orders)
    limited = instance.within(Caps(max_compute_move=1))
    loose = loose_program(limited, orders, costs_of(limited))
    compute_chain_bound(limited, loose, longest_way(loose))
    blocks = np.arange(len(orders.precedence.block_ticks))
    program = Pass(blocks, np.full(len(blocks), NODE), blocks, np.zeros_like(blocks))
    refill(orders.precedence, _alone(instance), program, 0, 0, FillLimits(0, 1.0))


def _alone(instance: Instance) -> Units:
    """Return buckets of one member each that take no time."""
    num = len(instance.problem.collectives)
    each, zeros, none = np.arange(num), np.zeros(num, np.int64), np.zeros(0, np.int64)
    ends, never = np.arange(num + 1), np.zeros(num, np.bool_)
    begin = np.zeros(num + 1, np.int64)
    return Units(each, ends, each, zeros, zeros, zeros, zeros, zeros, never, begin, none, 1)


_PARTS: Mapping[str, Callable[[], None]] = {SEARCH: _search, ORDERS: _orders}
_PROBES: Mapping[str, Callable[..., Any]] = {SEARCH: evaluate_labels, ORDERS: refill}
"""The function of each part that is compiled last."""


@dataclass(slots=True)
class _Nodes:
    """The nodes, storages and collectives of a problem that is being made."""

    names: list[str] = field(default_factory=list)
    kinds: list[NodeKind] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    predecessors: list[tuple[int, ...]] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    """The node that makes each storage; -1 for an input."""
    uses: list[set[int]] = field(default_factory=list)
    storage_of: list[int] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)

    def add(self, kind: NodeKind, duration_ticks: int, *before: int, is_view: bool = False) -> int:
        """Add a node behind those ``before``, and return its rank."""
        rank = len(self.names)
        self.names.append(f"{kind.value}_{rank}")
        self.kinds.append(kind)
        self.ticks.append(duration_ticks)
        self.predecessors.append(tuple(sorted(before)))
        for p in before:
            self.uses[self.storage_of[p]].add(rank)
        if is_view:
            self.storage_of.append(self.storage_of[before[0]])
        else:
            self.storage_of.append(len(self.births))
            self.births.append(-1 if kind is NodeKind.INPUT else rank)
            self.uses.append({rank})
        return rank

    def communicate(self, kind: CollectiveKind, source: int, *, on_path: bool = False) -> int:
        """Add a collective of the node ``source``, and return its wait."""
        start = self.add(NodeKind.START, 2, source)
        wait = self.add(NodeKind.WAIT, 0, start, is_view=True)
        self.uses[self.storage_of[source]].add(wait)
        self.collectives.append(
            Collective(
                start=start,
                wait=wait,
                key=_KINDS.index(kind),
                size_bytes=_SIZE_BYTES,
                input_bytes=_SIZE_BYTES,
                output_bytes=_SIZE_BYTES,
                input_storage=self.storage_of[source],
                output_storage=self.storage_of[start],
                holds_input=True,
                on_path=on_path,
                bucketable=not on_path,
                prologue=(),
                epilogue=(),
                module="",
            )
        )
        return wait


def layered_problem(num_layers: int) -> Problem:
    """Return a model of ``num_layers`` equal layers. In each a weight is gathered for one compute
    node, an all-reduce on the path follows, and the result of a second compute node is reduced.
    """
    nodes = _Nodes()
    shards = [nodes.add(NodeKind.INPUT, 0) for _ in range(num_layers)]
    hidden, results = nodes.add(NodeKind.INPUT, 0), []
    for shard in shards:
        weight = nodes.communicate(CollectiveKind.ALL_GATHER, shard)
        partial = nodes.add(NodeKind.COMPUTE, 100, hidden, weight)
        gradient = nodes.add(NodeKind.COMPUTE, 50, hidden)
        hidden = nodes.communicate(CollectiveKind.ALL_REDUCE, partial, on_path=True)
        results.append(nodes.communicate(CollectiveKind.REDUCE_SCATTER, gradient))
    nodes.add(NodeKind.OUTPUT, 0, hidden, *results)
    return Problem(
        name="layers",
        graph_hash="",
        node_names=tuple(nodes.names),
        kinds=tuple(nodes.kinds),
        duration_ticks=tuple(nodes.ticks),
        predecessors=tuple(nodes.predecessors),
        modules=("",) * len(nodes.names),
        storages=tuple(
            Storage(size_bytes=_SIZE_BYTES, birth=birth, kept=False, uses=tuple(sorted(use)))
            for birth, use in zip(nodes.births, nodes.uses, strict=True)
        ),
        keys=tuple(_key(kind) for kind in _KINDS),
        collectives=tuple(nodes.collectives),
        streams=("ranks",),
        copy_price=_COPY_PRICE,
    )


def _key(kind: CollectiveKind) -> Key:
    """Return the key of all collectives of a kind."""
    return Key(
        kind=kind,
        group="ranks",
        group_size=2,
        reduce_op="" if kind is CollectiveKind.ALL_GATHER else "sum",
        dtype="bfloat16",
        device="cuda",
        stream=0,
        price=_PRICE,
        launch_ticks=2,
        coalesced_member_ticks=5,
    )


_KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
_PRICE = PriceCurve(size_bytes=(0, _SIZE_BYTES), price_ticks=(20, 60))
_COPY_PRICE = PriceCurve(size_bytes=(0, _SIZE_BYTES), price_ticks=(3, 6))
