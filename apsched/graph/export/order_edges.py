"""Edges of the DAG: data, and the orders that data do not show (mutation, random state,
effects).
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from apsched.fx.collectives import argument
from apsched.graph.export.storages import NodeStorages
from apsched.kinds import NodeKind

_EFFECTFUL_HIGHER_ORDER = frozenset(
    ("with_effects", "print", "call_torchbind", "while_loop_with_effects")
)
_RANDOM_HIGHER_ORDER = frozenset(
    ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")
)


def order_edges(
    nodes: Sequence[torch.fx.Node],
    kinds: Sequence[NodeKind],
    storages: Sequence[NodeStorages],
    holds: Iterable[tuple[int, int]],
    extra_waits: Iterable[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Return pairs (earlier rank, later rank) that keep the meaning of the graph beside its data
    edges.

    ``holds`` are pairs of a start that reads its input until its wait, and that wait;
    ``extra_waits`` pairs of the wait of a collective and a later one for the same work. Linear in
    the accesses: each access is paired with the last write only.
    """
    edges = _mutation_edges(kinds, storages, holds)
    edges += extra_waits
    edges += _chain(rank for rank, node in enumerate(nodes) if _is_random(node))
    edges += _chain(rank for rank, node in enumerate(nodes) if _is_effectful(node))
    return edges


def _mutation_edges(
    kinds: Sequence[NodeKind], storages: Sequence[NodeStorages], holds: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    mutated = {s for used in storages for s in used.writes}
    if not mutated:
        return []
    read_until = {wait: start for start, wait in holds}
    last_writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {s: [] for s in mutated}
    edges: list[tuple[int, int]] = []
    for rank, used in enumerate(storages):
        if kinds[rank] in (
            NodeKind.VIEW,
            NodeKind.INPUT,
        ):  # touches no bytes; who reads through it is seen on its own
            continue
        writes = (*used.writes, *used.allocates)
        reads = used.reads
        if (
            kinds[rank] is NodeKind.WAIT
        ):  # the transfer reads its input and writes its output until here
            writes = tuple(used.aliases)
            reads = (*reads, *(storages[read_until[rank]].reads if rank in read_until else ()))
        for s in reads:
            if s in mutated and s not in writes:
                edges += ((last_writer[s], rank),) if s in last_writer else ()
                readers[s].append(rank)
        for s in writes:
            if s in mutated:
                edges += ((last_writer[s], rank),) if s in last_writer else ()
                edges += ((reader, rank) for reader in readers[s])
                readers[s].clear()
                last_writer[s] = rank
    return edges


def _chain(ranks: Iterable[int]) -> list[tuple[int, int]]:
    ordered = list(ranks)
    return list(pairwise(ordered))


def _is_random(node: torch.fx.Node) -> bool:
    """Whether ``node`` draws from the generator; attention without dropout carries the tag but
    draws nothing.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return (
            torch.Tag.nondeterministic_seeded in node.target.tags
            and argument(node, "dropout_p", 1.0) != 0.0
        )
    return getattr(node.target, "__name__", "") in _RANDOM_HIGHER_ORDER


def _is_effectful(node: torch.fx.Node) -> bool:
    """Whether ``node`` is there for what it does: it returns nothing and writes no argument
    (asserts, prints), or says so.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.returns and not node.target._schema.is_mutable
    return node.op == "call_function" and (
        node.target is print or getattr(node.target, "__name__", "") in _EFFECTFUL_HIGHER_ORDER
    )
