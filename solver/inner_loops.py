"""Machine code of the inner loops: which part is missing, and how to compile a part ahead of a
solve, on a small problem. numba keeps it on disk, and processes that begin later load it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from apsched.config import Caps, SolveOptions
from apsched.costs.price_curve import PriceCurve
from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Collective, Key, Problem, Storage
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.jit import has_machine_code
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.best import best_bound
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
    solve(layered_problem(_LAYERS), Caps(max_compute_move=0), SolveOptions(budget=_BUDGET))


def _orders() -> None:
    instance = Instance.of(layered_problem(_LAYERS), Caps())
    orders = Orders(instance)
    best_bound(instance, orders)
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


def layered_problem(num_layers: int) -> Problem:
    """Return a model of ``num_layers`` equal layers. In each a weight is gathered for one compute
    node, an all-reduce on the path follows, and the result of a second compute node is reduced.
    """
    names: list[str] = []
    kinds: list[NodeKind] = []
    ticks: list[int] = []
    predecessors: list[tuple[int, ...]] = []
    uses: list[set[int]] = []
    births: list[int] = []
    storage_of: dict[int, int] = {}
    collectives: list[Collective] = []

    def node(kind: NodeKind, duration_ticks: int, *before: int, is_view: bool = False) -> int:
        rank = len(names)
        names.append(f"{kind.value}_{rank}")
        kinds.append(kind)
        ticks.append(duration_ticks)
        predecessors.append(tuple(sorted(before)))
        for p in before:
            uses[storage_of[p]].add(rank)
        if is_view:
            storage_of[rank] = storage_of[before[0]]
        else:
            storage_of[rank] = len(births)
            births.append(-1 if kind is NodeKind.INPUT else rank)
            uses.append({rank})
        return rank

    def communicated(kind: CollectiveKind, source: int, *, on_path: bool = False) -> int:
        start = node(NodeKind.START, 2, source)
        wait = node(NodeKind.WAIT, 0, start, is_view=True)
        uses[storage_of[source]].add(wait)
        collectives.append(
            Collective(
                start=start,
                wait=wait,
                key=list(_KINDS).index(kind),
                size_bytes=_SIZE_BYTES,
                input_bytes=_SIZE_BYTES,
                output_bytes=_SIZE_BYTES,
                input_storage=storage_of[source],
                output_storage=storage_of[start],
                holds_input=True,
                on_path=on_path,
                bucketable=not on_path,
                prologue=(),
                epilogue=(),
                module="",
            )
        )
        return wait

    shards = [node(NodeKind.INPUT, 0) for _ in range(num_layers)]
    hidden, results = node(NodeKind.INPUT, 0), []
    for shard in shards:
        weight = communicated(CollectiveKind.ALL_GATHER, shard)
        partial = node(NodeKind.COMPUTE, 100, hidden, weight)
        gradient = node(NodeKind.COMPUTE, 50, hidden)
        hidden = communicated(CollectiveKind.ALL_REDUCE, partial, on_path=True)
        results.append(communicated(CollectiveKind.REDUCE_SCATTER, gradient))
    node(NodeKind.OUTPUT, 0, hidden, *results)
    return Problem(
        name="layers",
        graph_hash="",
        node_names=tuple(names),
        kinds=tuple(kinds),
        duration_ticks=tuple(ticks),
        predecessors=tuple(predecessors),
        modules=("",) * len(names),
        storages=tuple(
            Storage(size_bytes=_SIZE_BYTES, birth=birth, kept=False, uses=tuple(sorted(use)))
            for birth, use in zip(births, uses, strict=True)
        ),
        keys=tuple(
            Key(
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
            for kind in _KINDS
        ),
        collectives=tuple(collectives),
        streams=("ranks",),
        copy_price=_COPY_PRICE,
    )


_KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
_PRICE = PriceCurve(size_bytes=(0, _SIZE_BYTES), price_ticks=(20, 60))
_COPY_PRICE = PriceCurve(size_bytes=(0, _SIZE_BYTES), price_ticks=(3, 6))
