"""Identity of graphs for a schedule: a hash that is equal on all process ranks of a job.

Left out are names, durations, and constants among the arguments (a slice that starts at
``process_rank * n`` differs from process rank to process rank). Kept are operators, which result
goes where, shapes, dtypes, memory, orders, and groups by size.
"""

import hashlib
from typing import Any

import networkx as nx

from apsched.graph.records import NodeRecord


def digest(*parts: object) -> str:
    """Return a short hexadecimal digest of the printed form of ``parts``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def graph_hash(dag: nx.DiGraph) -> str:
    """Return the hexadecimal hash of ``dag``; equal for graphs to which the same schedule applies
    with the same meaning.
    """
    hasher = hashlib.sha256(b"apsched graph 1\n")
    groups: dict[str, int] = {}
    for rank in range(dag.number_of_nodes()):
        record: NodeRecord = dag.nodes[rank]["record"]
        before = sorted((u, kind) for u, _, kind in dag.in_edges(rank, data="kind"))
        touched = (record.allocates, record.reads, record.writes, record.aliases)
        hasher.update(
            repr(
                (record.kind.value, record.signature, before, touched, _collective(record, groups))
            ).encode()
        )
    hasher.update(repr([(s.size_bytes, s.kept) for s in dag.graph["storages"]]).encode())
    return hasher.hexdigest()


def _collective(record: NodeRecord, groups: dict[str, int]) -> tuple[Any, ...]:
    """Return the identity of a collective, its group by size and order of appearance (names of
    groups may differ between process ranks).
    """
    c = record.collective
    if c is None:
        return ()
    group = groups.setdefault(c.group, len(groups))
    return (
        str(c.kind),
        group,
        c.group_size,
        c.reduce_op,
        c.dtype,
        c.device,
        c.input_bytes,
        c.output_bytes,
        c.wait,
    )
