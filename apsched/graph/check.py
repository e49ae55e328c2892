"""Invariants of every DAG of apsched, as a check; needs no torch, since graph files are checked
with it.
"""

import math

import networkx as nx

from apsched.costs.price_curve import PriceCurve
from apsched.errors import InputError
from apsched.graph.records import CollectiveRecord, NodeRecord, StorageRecord
from apsched.kinds import KernelCut, NodeKind
from apsched.names import DIRECTIONS
from apsched.units import LONGEST_US, allocated_bytes

_LARGEST = 2**62
"""Sums of bytes and of ticks are kept in 64 bits, with a sign and room for one sum of two."""


def check_graph(dag: nx.DiGraph) -> None:
    """Raise InputError, naming the node, where ``dag`` breaks a condition that other modules rely
    on.
    """
    records = _records(dag)
    storages = dag.graph.get("storages")
    curves = dag.graph.get("curves")
    _require(
        isinstance(storages, tuple) and all(isinstance(s, StorageRecord) for s in storages),
        "storages must be a tuple of StorageRecord",
    )
    _require(
        isinstance(curves, dict) and isinstance(curves.get("copy"), PriceCurve),
        "curves must hold the curve 'copy'",
    )
    for s, storage in enumerate(storages):
        _require(storage.size_bytes >= 0, f"storage {s} has a negative size")
    _check_sums(records, storages, curves)
    _check_edges(dag, records)
    _check_storages(records, len(storages))
    for record in records:
        _check_record(record, records, curves)
    for cut in dag.graph.get("cuts", ()):
        _check_cut(cut, records)
    starts_of = [r.collective.wait for r in records if r.collective is not None]
    _require(len(set(starts_of)) == len(starts_of), "a wait must belong to one start")
    waits = {r.rank for r in records if r.kind is NodeKind.WAIT}
    for rank in sorted(waits - set(starts_of)):
        _require(False, f"node {records[rank].name}: a wait without a start")


def _check_sums(
    records: list[NodeRecord], storages: tuple[StorageRecord, ...], curves: dict[str, PriceCurve]
) -> None:
    """Raise InputError where bytes or times that the solver adds up would not fit into 64 bits."""
    memory_bytes = 0
    for s, storage in enumerate(storages):
        memory_bytes += allocated_bytes(storage.size_bytes)
        _require_fits(memory_bytes, f"storages 0 to {s}", "bytes in all")
    total_bytes, extra_bytes = 0, 0
    for c, name in ((r.collective, r.name) for r in records if r.collective is not None):
        total_bytes += max(c.input_bytes, c.output_bytes, c.size_bytes, c.cast_bytes, 0)
        extra_bytes += c.group_size + c.num_members + max(c.num_coalesced, 0)
        _require_fits(total_bytes, f"the collectives up to node {name}", "bytes in all")
        _require_fits(extra_bytes, f"the collectives up to node {name}", "members and ranks in all")
    for name, curve in sorted(curves.items()):
        largest = max(curve.size_bytes[-1], curve.price_ticks[-1])
        _require(
            largest < 2**63,
            f"curve {name}: its sizes and prices must fit into 64 bits, found {largest}; correct"
            " the measured times and bandwidths, or capture the graph again",
        )
        at_bytes = max(total_bytes, *(storage.size_bytes for storage in storages), 0)
        what = f"curve {name}: the price of {at_bytes} bytes, the most of this graph,"
        _require_fits(curve(at_bytes) * max(len(records), 1), what, "ticks for all nodes")


def _require_fits(found: int, what: str, unit: str) -> None:
    _require(
        found <= _LARGEST,
        f"{what} must be at most 2^62 {unit}, found {found}; correct the sizes and prices, or"
        " capture the graph again",
    )


def _check_cut(cut: KernelCut, records: list[NodeRecord]) -> None:
    touched = (cut.node, *cut.nodes)
    _require(
        all(0 <= rank < len(records) for rank in touched),
        f"a cut of a kernel names one of the nodes {touched}, which does not exist",
    )
    name, kernel = records[cut.node].name, records[cut.node].kernel
    _require(
        kernel >= 0 and all(records[rank].kernel == kernel for rank in cut.nodes),
        f"node {name}: a cut is inside of one kernel",
    )
    _require(
        len(cut.nodes) == len(cut.extra_ticks) and all(ticks > 0 for ticks in cut.extra_ticks),
        f"node {name}: a cut makes nodes slower",
    )


def _records(dag: nx.DiGraph) -> list[NodeRecord]:
    num_nodes = dag.number_of_nodes()
    _require(
        set(dag.nodes) == set(range(num_nodes)), f"nodes must be the ranks 0 to {num_nodes - 1}"
    )
    records = [dag.nodes[rank].get("record") for rank in range(num_nodes)]
    names = set()
    for rank, record in enumerate(records):
        _require(
            isinstance(record, NodeRecord) and record.rank == rank,
            f"node {rank} must carry its NodeRecord",
        )
        _require(record.name not in names, f"node {record.name}: the name occurs twice")
        names.add(record.name)
    return records


def _check_edges(dag: nx.DiGraph, records: list[NodeRecord]) -> None:
    for u, v, kind in dag.edges(data="kind"):
        _require(
            u < v, f"node {records[v].name}: must come after {records[u].name}, which it needs"
        )
        _require(
            kind in ("data", "order"),
            f"node {records[v].name}: the edge from {records[u].name} must be 'data' or 'order',"
            f" found {kind!r}",
        )
    for record in records[:-1]:
        _require(
            record.kind is not NodeKind.OUTPUT,
            f"node {record.name}: the output must be the last node",
        )


def _check_storages(records: list[NodeRecord], num_storages: int) -> None:
    born: set[int] = set()
    freed: set[int] = set()
    for record in records:
        for s in record.allocates:
            _require(
                0 <= s < num_storages and s not in born,
                f"node {record.name}: allocates storage {s}, which does not exist or is there"
                " already",
            )
            born.add(s)
        for s in (*record.reads, *record.writes, *record.aliases, *record.frees):
            _require(
                s in born, f"node {record.name}: uses storage {s}, which no node has allocated"
            )
            _require(s not in freed, f"node {record.name}: uses storage {s} after its last use")
        freed.update(record.frees)


def _check_record(
    record: NodeRecord, records: list[NodeRecord], curves: dict[str, PriceCurve]
) -> None:
    name = record.name
    _require(
        math.isfinite(record.duration_us) and 0 <= record.duration_us <= LONGEST_US,
        f"node {name}: the duration must be finite, >= 0 and at most a day, found"
        f" {record.duration_us!r}",
    )
    timed = record.kind in (NodeKind.COMPUTE, NodeKind.START)
    _require(
        timed or record.duration_us == 0,
        f"node {name}: a node of kind {record.kind} takes no time, found {record.duration_us!r}",
    )
    _require(
        record.direction in DIRECTIONS,
        f"node {name}: the direction must be forward or backward, found {record.direction!r}",
    )
    _require(
        (record.collective is not None) == (record.kind is NodeKind.START),
        f"node {name}: start nodes, and no others, carry a CollectiveRecord",
    )
    if record.collective is not None:
        _check_collective(name, record.rank, record.collective, records, curves)


def _check_collective(
    name: str,
    rank: int,
    c: CollectiveRecord,
    records: list[NodeRecord],
    curves: dict[str, PriceCurve],
) -> None:
    waited = rank < c.wait < len(records) and records[c.wait].kind is NodeKind.WAIT
    _require(waited, f"node {name}: the collective needs a wait after it, found node {c.wait}")
    _require(
        c.group_size >= 1 and c.num_members >= 1,
        f"node {name}: group_size and num_members must be at least 1",
    )
    _require(min(c.input_bytes, c.output_bytes, c.size_bytes) >= 0, f"node {name}: negative bytes")
    _require(
        not (c.bucketable and (c.on_path or c.num_members > 1)),
        f"node {name}: on the path or a bucket already, so not bucketable",
    )
    _require(
        f"{c.kind}:{c.group}" in curves,
        f"node {name}: there is no price curve for {c.kind} on group {c.group}",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(f"not a valid graph: {message}")
