"""The same graph on other hardware: compute or the network so many times as fast. No torch.

``compute`` divides the time of compute nodes, copies and casts; launches stay (the host makes
them). ``network`` multiplies the bandwidth between nodes: prices that are the cluster's formulas
are computed again for such a network, others keep their latency and get their time per byte
divided; groups inside a node stay.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

import networkx as nx

from apsched.costs.clusters.cluster import Cluster
from apsched.costs.price_curve import PriceCurve
from apsched.errors import InputError
from apsched.graph.records import COPY, collective_curve_name
from apsched.kinds import KernelCut, NodeKind
from apsched.problem.build import build_problem
from apsched.problem.faster_network import faster_network

_TIMES = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*x?", re.IGNORECASE)
_LEAST, _MOST = 1e-3, 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Factors of the speeds of the costs."""

    network: float = 1.0
    compute: float = 1.0

    def described(self) -> dict[str, float]:
        """Return both by their names."""
        return {"network": self.network, "compute": self.compute}


def parse_times(text: str, label: str) -> float:
    """Return the factor that ``text`` states: ``2x``, ``0.8x`` or ``2``."""
    match = _TIMES.fullmatch(text.strip())
    value = float(match["number"]) if match else 0.0
    if not _LEAST <= value <= _MOST:
        raise InputError(
            f"{label}: expected a factor of the speed, such as 2x or 0.8x; found {text!r}"
        )
    return value


def at_speeds(
    dag: nx.DiGraph, speeds: Speeds, cluster: Cluster | None
) -> tuple[nx.DiGraph, tuple[str, ...]]:
    """Return ``dag`` at ``speeds``, and remarks on it; ``cluster`` determines the groups that leave
    a node.
    """
    new = nx.DiGraph(**dag.graph)
    new.add_nodes_from(dag.nodes(data=True))
    new.add_edges_from(dag.edges(data=True))
    new.graph["curves"] = dict(dag.graph["curves"])
    notes: tuple[str, ...] = ()
    if speeds.network != 1:
        notes = _on_network(new, speeds.network, cluster)
    if speeds.compute != 1:
        _computing(new, speeds.compute)
    return new, notes


def _on_network(dag: nx.DiGraph, factor: float, cluster: Cluster | None) -> tuple[str, ...]:
    if cluster is None:
        raise InputError(
            f"network: the cluster {dag.graph['cluster']!r} of {dag.graph['name']} is not known"
            " here, nor are the groups that leave a node; state --cluster FILE"
        )
    problem = build_problem(dag)
    faster = faster_network(
        problem,
        cluster,
        dag.graph["group_ranks"],
        (factor - 1) * cluster.inter_node.gbit_per_s_per_rank,
    )
    curves: dict[str, PriceCurve] = dag.graph["curves"]
    for before, after in zip(problem.keys, faster.problem.keys, strict=True):
        if before.price != after.price:
            curves[collective_curve_name(before.kind, before.group)] = after.price
    notes = _scaling_notes(faster.scaled, "latency kept, time per byte scaled") + _scaling_notes(
        faster.unchanged, "limited by the links inside the nodes, which stay"
    )
    if not (faster.priced_anew or faster.scaled or faster.unchanged):
        notes = ("network: no group leaves its node, so nothing changes",)
    return notes


def _scaling_notes(groups: tuple[str, ...], what: str) -> tuple[str, ...]:
    return (
        (f"network: group{'s' if len(groups) > 1 else ''} {', '.join(groups)}: {what}",)
        if groups
        else ()
    )


def _computing(dag: nx.DiGraph, factor: float) -> None:
    for rank in range(dag.number_of_nodes()):
        record = dag.nodes[rank]["record"]
        if record.kind is NodeKind.COMPUTE and record.duration_us:
            dag.nodes[rank]["record"] = replace(record, duration_us=record.duration_us / factor)
    cuts: tuple[KernelCut, ...] = dag.graph.get("cuts", ())
    dag.graph["cuts"] = tuple(
        replace(cut, extra_ticks=tuple(ceil(ticks / factor) for ticks in cut.extra_ticks))
        for cut in cuts
    )
    curves: Mapping[str, PriceCurve] = dag.graph["curves"]
    copy = curves[COPY]
    scaled = PriceCurve(
        size_bytes=copy.size_bytes,
        price_ticks=tuple(round(ticks / factor) for ticks in copy.price_ticks),
    )
    dag.graph["curves"] = {**curves, COPY: scaled}
