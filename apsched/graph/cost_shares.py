"""Whose word the costs of a graph are: shares of time by source. No torch here."""

from collections.abc import Mapping

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
    for rank in range(dag.number_of_nodes()):
        record: NodeRecord = dag.nodes[rank]["record"]
        _add(times, record.cost_source, record.duration_us)
        if record.collective is not None:
            curve = dag.graph["curves"][
                collective_curve_name(record.collective.kind, record.collective.group)
            ]
            _add(
                times,
                record.collective.cost_source or UNKNOWN,
                ticks_to_us(curve(record.collective.size_bytes)),
            )
    total = sum(times.values())
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return {source: time_us / total for source, time_us in ordered} if total else {}


def _add(times: dict[str, float], source: str, time_us: float) -> None:
    if time_us > 0 and source != FREE:
        times[source] = times.get(source, 0.0) + time_us
