"""networkx DAG -> Problem: round to ticks and allocated bytes, name the keys, find the nodes that
travel with a collective.
"""

from dataclasses import replace

import networkx as nx

from apsched.costs.price_curve import PriceCurve
from apsched.graph.identity import graph_hash
from apsched.graph.records import (
    CollectiveRecord,
    NodeRecord,
    StorageRecord,
    coalesced_curve_name,
    launch_curve_name,
)
from apsched.kinds import CollectiveKind, KernelCut, NodeKind
from apsched.problem.problem import Collective, Key, Problem, Storage, check_problem
from apsched.units import allocated_bytes, us_to_ticks


def build_problem(dag: nx.DiGraph) -> Problem:
    """Return the scheduling problem that ``dag`` states."""
    records: list[NodeRecord] = [dag.nodes[rank]["record"] for rank in range(dag.number_of_nodes())]
    predecessors = tuple(tuple(sorted(dag.predecessors(rank))) for rank in range(len(records)))
    starts = [r for r in records if r.collective is not None]
    streams = tuple(dict.fromkeys(r.collective.group for r in starts if r.collective is not None))
    keys, key_of_start = _keys(starts, streams, dag.graph["curves"])
    successors: list[list[int]] = [[] for _ in records]
    for node, before in enumerate(predecessors):
        for p in before:
            successors[p].append(node)
    problem = Problem(
        name=dag.graph["name"],
        graph_hash=graph_hash(dag),
        node_names=tuple(r.name for r in records),
        kinds=tuple(r.kind for r in records),
        duration_ticks=tuple(us_to_ticks(r.duration_us) for r in records),
        predecessors=predecessors,
        modules=tuple(r.module for r in records),
        storages=_storages(records, dag.graph["storages"]),
        keys=keys,
        collectives=tuple(
            _collective(r, r.collective, key_of_start[r.rank], records, predecessors, successors)
            for r in starts
            if r.collective
        ),
        streams=streams,
        copy_price=dag.graph["curves"]["copy"],
        kernels=tuple(r.kernel for r in records),
        chains=dag.graph.get("chains", ()),
    )
    problem = replace(
        problem, cuts=tuple(cut for cut in dag.graph.get("cuts", ()) if _may_be_cut(problem, cut))
    )
    check_problem(problem)
    return problem


def _may_be_cut(problem: Problem, cut: KernelCut) -> bool:
    """Whether it is between neighbours among the compute nodes (others may be apart as captured),
    and changes nothing that travels.
    """
    compute_order, places = problem.captured_order, problem.captured_places
    at = places.get(cut.node, 0)
    return (
        at > 0
        and problem.kernels[compute_order[at - 1]] == problem.kernels[cut.node]
        and all(node in places for node in cut.nodes)
    )


def _keys(
    starts: list[NodeRecord], streams: tuple[str, ...], curves: dict[str, PriceCurve]
) -> tuple[tuple[Key, ...], dict[int, int]]:
    """Return the distinct keys in order of appearance, and the index of each start's key.

    The launch of a bucket has a price curve of its own: a captured launch may hold more (a
    functional all-reduce first clones its input, a bucket does not). A collective without such a
    curve is in no bucket.
    """
    index: dict[tuple[str, ...], int] = {}
    key_of_start: dict[int, int] = {}
    members: list[list[NodeRecord]] = []
    for record in starts:
        c = record.collective
        assert c is not None
        priced = coalesced_curve_name(c.kind, c.group) in curves
        several = str(c.num_coalesced) if priced else "0"
        k = index.setdefault(
            (c.kind, c.group, str(c.group_size), c.reduce_op, c.dtype, c.device, several),
            len(index),
        )
        if k == len(members):
            members.append([])
        members[k].append(record)
        key_of_start[record.rank] = k
    return tuple(_key(records, streams, curves) for records in members), key_of_start


def _key(records: list[NodeRecord], streams: tuple[str, ...], curves: dict[str, PriceCurve]) -> Key:
    c = records[0].collective
    assert c is not None
    launch, coalesced = (
        curves.get(launch_curve_name(c.kind, c.group)),
        curves.get(coalesced_curve_name(c.kind, c.group)),
    )
    member_ticks = None if coalesced is None else coalesced(0)
    return Key(
        kind=c.kind,
        group=c.group,
        group_size=c.group_size,
        reduce_op=c.reduce_op,
        dtype=c.dtype,
        device=c.device,
        stream=streams.index(c.group),
        price=_raised(curves[f"{c.kind}:{c.group}"], (member_ticks or 0) * c.num_coalesced),
        launch_ticks=min(us_to_ticks(r.duration_us) for r in records)
        if launch is None
        else launch(0),
        coalesced_member_ticks=member_ticks,
    )


def _raised(price: PriceCurve, ticks: int) -> PriceCurve:
    return (
        PriceCurve(
            size_bytes=price.size_bytes, price_ticks=tuple(p + ticks for p in price.price_ticks)
        )
        if ticks
        else price
    )


def _storages(
    records: list[NodeRecord], storages: tuple[StorageRecord, ...]
) -> tuple[Storage, ...]:
    birth = [-1] * len(storages)
    uses: list[set[int]] = [set() for _ in storages]
    for record in records:
        for s in record.allocates:
            if record.kind is not NodeKind.INPUT:
                birth[s] = record.rank
        for s in (*record.allocates, *record.reads, *record.writes, *record.aliases):
            uses[s].add(record.rank)
        if record.collective is not None and record.collective.holds_input:
            for s in record.reads:
                uses[s].add(record.collective.wait)
    return tuple(
        Storage(
            size_bytes=allocated_bytes(storage.size_bytes),
            birth=birth[s],
            kept=storage.kept,
            uses=tuple(sorted(uses[s])),
        )
        for s, storage in enumerate(storages)
    )


def _collective(
    record: NodeRecord,
    c: CollectiveRecord,
    key: int,
    records: list[NodeRecord],
    predecessors: tuple[tuple[int, ...], ...],
    successors: list[list[int]],
) -> Collective:
    """Return the collective; only a gather has a prologue (the cast of a shard), only a reduction
    has an epilogue.

    Nodes before a reduction (a weight gradient that depends on inputs alone) and after a gather are
    compute, and keep their place.
    """
    gathers = c.kind == CollectiveKind.ALL_GATHER
    prologue = (
        _prologue(record.rank, records, predecessors, successors)
        if gathers and not c.on_path
        else ()
    )
    epilogue = (
        ()
        if gathers or c.on_path
        else _epilogue(record.rank, c.wait, records, predecessors, successors)
    )
    output = (*record.allocates, *record.aliases)[0]
    cast = _cast(record.rank, prologue, records, predecessors) if c.cast_bytes else ()
    return Collective(
        start=record.rank,
        wait=c.wait,
        key=key,
        size_bytes=c.size_bytes,
        input_bytes=c.input_bytes,
        output_bytes=c.output_bytes,
        input_storage=record.reads[0] if record.reads else output,
        output_storage=output,
        holds_input=c.holds_input,
        on_path=c.on_path,
        bucketable=c.bucketable and output in record.allocates,
        prologue=prologue,
        cast=cast,
        cast_bytes=c.cast_bytes if cast else 0,
        epilogue=epilogue,
        module=record.module,
        output_place=c.output_place,
        direction=record.direction,
    )


def _prologue(
    start: int,
    records: list[NodeRecord],
    predecessors: tuple[tuple[int, ...], ...],
    successors: list[list[int]],
) -> tuple[int, ...]:
    """Return the compute nodes before ``start`` that come from inputs alone and serve nothing
    else.
    """
    chain, serving = [], {start}
    stack = list(predecessors[start])
    while stack:
        node = stack.pop()
        if node in serving or records[node].kind not in (NodeKind.COMPUTE, NodeKind.VIEW):
            continue
        if not serving.issuperset(successors[node]):
            continue
        serving.add(node)
        chain.append(node)
        stack += predecessors[node]
    # keep only what depends on nothing but inputs and itself, and serves nothing that was left out
    while True:
        kept = {
            n
            for n in chain
            if all(
                p in chain
                or records[p].kind is NodeKind.INPUT
                or _input_view(p, records, predecessors)
                for p in predecessors[n]
            )
            and all(s in chain or s == start for s in successors[n])
        }
        if len(kept) == len(chain):
            return tuple(sorted(n for n in chain if records[n].kind is NodeKind.COMPUTE))
        chain = [n for n in chain if n in kept]


def _cast(
    start: int,
    prologue: tuple[int, ...],
    records: list[NodeRecord],
    predecessors: tuple[tuple[int, ...], ...],
) -> tuple[int, ...]:
    """Return the cast before ``start`` and the views between them; empty where the cast is compute
    of its own.
    """
    chain: list[int] = []
    node = start
    while len(predecessors[node]) == 1:
        (node,) = predecessors[node]
        chain.append(node)
        if records[node].kind is NodeKind.COMPUTE:
            return tuple(reversed(chain)) if node in prologue else ()
        if records[node].kind is not NodeKind.VIEW:
            break
    return ()


def _input_view(
    node: int, records: list[NodeRecord], predecessors: tuple[tuple[int, ...], ...]
) -> bool:
    """Whether ``node`` is a view of a graph input."""
    while records[node].kind is NodeKind.VIEW and len(predecessors[node]) == 1:
        node = predecessors[node][0]
    return records[node].kind is NodeKind.INPUT


def _epilogue(
    start: int,
    wait: int,
    records: list[NodeRecord],
    predecessors: tuple[tuple[int, ...], ...],
    successors: list[list[int]],
) -> tuple[int, ...]:
    """Return the compute nodes after ``wait`` that depend on it, on inputs and on nodes before
    ``start`` alone and end in outputs or in another FSDP launch.
    """
    after, stack = {wait}, [wait]
    while stack:
        for node in successors[stack.pop()]:
            if node not in after and records[node].kind in (NodeKind.VIEW, NodeKind.COMPUTE):
                after.add(node)
                stack.append(node)
        if len(after) > _LONGEST_EPILOGUE:
            return ()
    done = _sources(start, predecessors)
    kept_nodes, known = after, len(after)
    while True:  # what was left out may be needed by, or need, what was kept
        fed = {wait}
        for node in sorted(kept_nodes - {wait}):
            if all(
                p in fed
                or p in done
                or records[p].kind is NodeKind.INPUT
                or _input_view(p, records, predecessors)
                for p in predecessors[node]
            ):
                fed.add(node)
        kept_nodes = set(fed)
        for node in sorted(fed - {wait}, reverse=True):
            if not all(
                s in kept_nodes or records[s].kind is NodeKind.OUTPUT or _moving_start(records[s])
                for s in successors[node]
            ):
                kept_nodes.discard(node)
        if len(kept_nodes) == known:
            break
        known = len(kept_nodes)
    return tuple(sorted(n for n in kept_nodes if records[n].kind is NodeKind.COMPUTE))


def _sources(start: int, predecessors: tuple[tuple[int, ...], ...]) -> set[int]:
    """Return the nearest nodes that ``start`` depends on: the gradient, and the tensor that DDP
    copies its sum into.
    """
    found, level = set[int](), {start}
    for _ in range(_FARTHEST_SOURCE):
        level = {p for node in level for p in predecessors[node]} - found
        found |= level
    return found


def _moving_start(record: NodeRecord) -> bool:
    return record.collective is not None and not record.collective.on_path


_FARTHEST_SOURCE = 4
"""Edges before a start up to which its sources are looked at."""
_LONGEST_EPILOGUE = 64
"""Nodes after a wait beyond which it is not a finishing chain; keeps the search linear."""
