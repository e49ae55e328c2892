"""Nodes of a graph and operators of a trace, matched in order by operator, shapes and dtypes. No
torch here.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import networkx as nx

from apsched.calibrate.profile.trace import Trace, ancestors
from apsched.costs.compute.operation import as_traced, operator_of
from apsched.errors import InputError
from apsched.graph.records import NodeRecord
from apsched.kinds import NodeKind

_TIMED = (NodeKind.COMPUTE, NodeKind.START, NodeKind.WAIT)


@dataclass(frozen=True, slots=True)
class Place:
    """One node that takes time, or launches or waits."""

    graph: int
    """Index of its graph: forward before backward."""
    record: NodeRecord
    traced: str
    """The profiler's view of its operation."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A node and the operator that ran it."""

    place: Place
    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """One step of one trace."""

    pairs: tuple[Pair, ...]
    """In the order of execution."""
    unmatched: tuple[int, ...]
    """Operators that match no node, call no operator that matches one, and stand outside of all
    others like them; operators that views run are not among them.
    """


def places_of(dags: Sequence[nx.DiGraph]) -> tuple[Place, ...]:
    """Return the nodes that a profiler can see, in order; ``InputError`` if the graphs are too old
    to have the operations of their nodes.
    """
    records = [
        (k, dag.nodes[rank]["record"])
        for k, dag in enumerate(dags)
        for rank in range(dag.number_of_nodes())
    ]
    places = tuple(
        Place(k, record, as_traced(record.operation))
        for k, record in records
        if record.kind in _TIMED and record.operation
    )
    if not places and any(record.kind is NodeKind.COMPUTE for _, record in records):
        raise InputError(
            "the graph file does not have the operations of its nodes (format 5 has); write"
            " it again with `apsched capture`"
        )
    return places


def view_operators(dags: Sequence[nx.DiGraph]) -> frozenset[str]:
    """Return the operators that only show memory in these graphs, as a profiler names them:
    ``aten::view``.
    """
    targets = (dag.nodes[rank]["record"] for dag in dags for rank in range(dag.number_of_nodes()))
    return frozenset(
        "::".join(record.target.split(".")[:2])
        for record in targets
        if record.kind is NodeKind.VIEW
    )


def match_step(
    places: Sequence[Place], views: frozenset[str], trace: Trace, step: tuple[float, float]
) -> Matched:
    """Return the part of the graphs that ran in one step of the trace."""
    known = {place.traced for place in places}
    within = trace.ops_within(*step)
    candidates: list[int] = []
    inside: set[int] = set()
    for index in within:
        op = trace.ops[index]
        if op.parent in inside:
            inside.add(index)
        elif op.operation in known:
            candidates.append(index)
            inside.add(index)
    found = aligned(
        [place.traced for place in places], [trace.ops[index].operation for index in candidates]
    )
    pairs = tuple(Pair(places[i], candidates[j]) for i, j in found)
    if not trace.marked and len(candidates) >= 2 * len(places) > 0:
        raise InputError(
            f"{trace.path}: the graph is in it {len(candidates) // len(places)} times, but no steps"
            " are marked; give torch.profiler a schedule and call prof.step() after every step, or"
            " profile one step"
        )
    return Matched(
        pairs=pairs, unmatched=_unmatched(trace, within, {pair.op for pair in pairs}, views)
    )


def _unmatched(
    trace: Trace, within: range, matched: set[int], views: frozenset[str]
) -> tuple[int, ...]:
    callers = {above for index in matched for above in ancestors(trace.ops, index)}
    return tuple(
        index
        for index in within
        if index not in callers
        and (
            trace.ops[index].parent < 0
            or (trace.ops[index].parent in callers and trace.ops[index].parent not in matched)
        )
        and operator_of(trace.ops[index].name) not in views
    )


def aligned(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return pairs of places with equal items, rising on both sides, as many as there can be.

    Row by row of the table of lengths L, as bits that say where L does *not* rise along ``left``
    (Hyyrö, "Bit-parallel LCS-length computation revisited", 2004):  V' = (V + (V & M)) | (V & ~M),
    M = places of the row's item in ``left``.
    """
    places: dict[Hashable, int] = {}
    for k, item in enumerate(left):
        places[item] = places.get(item, 0) | 1 << k
    full = (1 << len(left)) - 1
    flat, rows = full, []
    for item in right:
        matches = flat & places.get(item, 0)
        flat = ((flat + matches) | (flat & ~matches)) & full
        rows.append(flat)
    pairs = []
    i, j = len(left), len(right)
    while i and j:
        if rows[j - 1] >> (i - 1) & 1:
            i -= 1  # L[i][j] = L[i - 1][j]
            continue
        j -= 1
        if j and not rows[j - 1] >> (i - 1) & 1:
            continue  # L[i][j + 1] = L[i][j]: the rise was there before this row
        i -= 1
        pairs.append((i, j))
    return pairs[::-1]
