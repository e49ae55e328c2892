"""Edges of the DAG: data, and the orders that data do not show (mutation, random state,
effects, communication).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from apsched.fx.collectives import ANY_GROUP
from apsched.fx.effects.effects import Effects
from apsched.graph.export.storages import NodeStorages
from apsched.kinds import NodeKind


def order_edges(
    effects: Sequence[Effects],
    kinds: Sequence[NodeKind],
    storages: Sequence[NodeStorages],
    holds: Iterable[tuple[int, int]],
    extra_waits: Iterable[tuple[int, int]],
    group_of_start: Mapping[int, str],
    read_beside_waits: Iterable[int],
) -> list[tuple[int, int]]:
    """Return pairs (earlier rank, later rank) that keep the meaning of the graph beside its data
    edges.

    ``holds`` are pairs of a start that reads its input until its wait, and that wait;
    ``extra_waits`` pairs of the wait of a collective and a later one for the same work;
    ``group_of_start`` has the process groups of the collectives that nodes of this graph start.
    ``read_beside_waits`` are storages of transfers that a node reads by another way than through
    the wait. Linear in the accesses: each access is paired with the last write only.
    """
    edges = _mutation_edges(kinds, storages, holds, read_beside_waits)
    edges += extra_waits
    edges += _chain(rank for rank, e in enumerate(effects) if e.draws)
    edges += _chain(rank for rank, e in enumerate(effects) if e.acts)
    edges += _around(
        barriers={rank for rank, e in enumerate(effects) if e.unknown},
        others=[rank for rank, used in enumerate(storages) if used.writes or effects[rank].any],
    )
    edges += _around(
        barriers={rank for rank, e in enumerate(effects) if e.sets_context},
        others=[
            rank for rank, kind in enumerate(kinds) if kind not in (NodeKind.INPUT, NodeKind.OUTPUT)
        ],
    )
    edges += _communication_edges(effects, group_of_start)
    return edges


def _communication_edges(
    effects: Sequence[Effects], group_of_start: Mapping[int, str]
) -> list[tuple[int, int]]:
    """Return edges by which no start crosses a node that communicates on its group inside of its
    call: that communication may differ between process ranks.
    """
    communicating = {rank: e.communicates for rank, e in enumerate(effects) if e.communicates}
    named = {group for groups in communicating.values() for group in groups}
    edges: list[tuple[int, int]] = []
    for group in sorted(named | set(group_of_start.values()) if communicating else ()):
        barriers = {rank for rank, on in communicating.items() if group in on or ANY_GROUP in on}
        starts = {rank for rank, on in group_of_start.items() if on == group}
        edges += _around(barriers=barriers, others=sorted(barriers | starts))
    return edges


def _around(barriers: set[int], others: Sequence[int]) -> list[tuple[int, int]]:
    """Return edges by which none of ``others`` (ascending, barriers among them) crosses a
    barrier.
    """
    edges: list[tuple[int, int]] = []
    last, since = -1, list[int]()
    for rank in others if barriers else ():
        if last >= 0:
            edges.append((last, rank))
        if rank in barriers:
            edges += ((before, rank) for before in since)
            last, since = rank, []
        else:
            since.append(rank)
    return edges


def _mutation_edges(
    kinds: Sequence[NodeKind],
    storages: Sequence[NodeStorages],
    holds: Iterable[tuple[int, int]],
    read_beside_waits: Iterable[int],
) -> list[tuple[int, int]]:
    mutated = {*(s for used in storages for s in used.writes), *read_beside_waits}
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
            writes = (*used.aliases, *used.writes)
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
