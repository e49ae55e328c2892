"""Whose word the costs of a graph are: shares of time by source. No torch here."""

from collections.abc import Iterable, Iterator, Mapping

import networkx as nx

from apsched.graph.records import NodeRecord, collective_curve_name
from apsched.units import ticks_to_us

FREE = "free"
UNKNOWN = "unknown"


def cost_shares(dag: nx.DiGraph) -> Mapping[str, float]:
    """Return source -> share of the time of all nodes and transfers of ``dag``, the largest first;
    empty where nothing takes time.
    """
    times: dict[str, float] = {}
    for _, source, time_us in _times(dag):
        times[source] = times.get(source, 0.0) + time_us
    total = sum(times.values())
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return {source: time_us / total for source, time_us in ordered} if total else {}


def share_of_nodes(dag: nx.DiGraph, nodes: Iterable[int]) -> float:
    """Return the share of ``nodes`` and their transfers in the time of all nodes and transfers."""
    chosen = frozenset(nodes)
    times = [(rank in chosen, time_us) for rank, _, time_us in _times(dag)]
    total = sum(time_us for _, time_us in times)
    return sum(time_us for counted, time_us in times if counted) / total if total else 0.0


def _times(dag: nx.DiGraph) -> Iterator[tuple[int, str, float]]:
    """Yield node, source and time of everything that takes time, transfers at their start node."""
    for rank in range(dag.number_of_nodes()):
        record: NodeRecord = dag.nodes[rank]["record"]
        if record.duration_us > 0 and record.cost_source != FREE:
            yield rank, record.cost_source, record.duration_us
        if (c := record.collective) is not None:
            curve = dag.graph["curves"][collective_curve_name(c.kind, c.group)]
            time_us = ticks_to_us(curve(c.size_bytes))
            if time_us > 0 and c.cost_source != FREE:
                yield rank, c.cost_source or UNKNOWN, time_us
