"""A graph under measured costs: nodes and transfers with measured costs get those, the rest keeps
its own prices. No torch here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import networkx as nx

from apsched.costs.clusters.cluster import Cluster
from apsched.costs.measured import MeasuredCosts
from apsched.costs.network.alpha_beta import GroupShape, group_shape
from apsched.costs.price_curve import PriceCurve, sample_curve
from apsched.graph.check import check_graph
from apsched.graph.records import (
    COPY,
    CollectiveRecord,
    NodeRecord,
    collective_curve_name,
    launch_curve_name,
    priced_kind,
)
from apsched.kinds import NodeKind
from apsched.units import us_to_ticks

_LISTED = 4
"""Groups that a note names, of many."""


def repriced(dag: nx.DiGraph, costs: MeasuredCosts, cluster: Cluster) -> nx.DiGraph:
    """Return ``dag`` at ``costs``, as an export with
    :class:`apsched.costs.measured_model.MeasuredCostModel` would price it.

    ``cluster`` says how process ranks lie on nodes. Copies and casts that write-back added keep
    their price, which is that of a curve. ``InputError`` where the prices are too large to add up.
    """
    new = nx.DiGraph(**dag.graph)
    records = [
        _record(dag.nodes[rank]["record"], dag, costs, cluster)
        for rank in range(dag.number_of_nodes())
    ]
    new.add_nodes_from((record.rank, {"record": record}) for record in records)
    new.add_edges_from((u, v, {"kind": kind}) for u, v, kind in dag.edges(data="kind"))
    new.graph["curves"] = _curves(dag, costs, cluster)
    measured = {
        record.rank
        for record in records
        if record.kernel >= 0 and record.operation in costs.compute
    }
    kernels = {records[rank].kernel for rank in measured}
    new.graph["cuts"] = tuple(
        cut for cut in dag.graph.get("cuts", ()) if records[cut.node].kernel not in kernels
    )
    check_graph(new)
    return new


def unmatched(
    costs: MeasuredCosts, path: str, dags: Sequence[nx.DiGraph], cluster: Cluster
) -> tuple[str, ...]:
    """Return a note where ``costs``, those of the file ``path``, have no price for any operation,
    launch or transfer of ``dags``; empty where they have one.

    ``cluster`` says how process ranks lie on nodes.
    """
    transfers: set[tuple[str, int, int]] = set()
    for dag in dags:
        for rank in range(dag.number_of_nodes()):
            record: NodeRecord = dag.nodes[rank]["record"]
            if record.operation in costs.compute and not record.role:
                return ()
            if (collective := record.collective) is None:
                continue
            if collective.kind in costs.launch_us:
                return ()
            shape = priced_kind(collective.kind), *_ranks_and_nodes(dag, collective, cluster)
            if costs.transfer_source(*shape) is not None:
                return ()
            transfers.add(shape)
    has = _listed((t.kind, t.num_ranks, t.num_nodes) for t in costs.transfers)
    num = len(costs.compute)
    but = ", except those of copies" if costs.copies else ""
    return (
        f"no price of {path} matches{but}: it has {num} operation{'' if num == 1 else 's'} and"
        f" {has}; the graphs have other operations and {_listed(transfers)}; calibrate with the"
        " same model, sizes and mesh",
    )


def _listed(transfers: Iterable[tuple[str, int, int]]) -> str:
    """Return the kinds and groups of ``transfers`` as text, the first ones of many."""
    names = [
        f"{kind} on {num_ranks} ranks of {num_nodes} node{'' if num_nodes == 1 else 's'}"
        for kind, num_ranks, num_nodes in sorted(set(transfers))
    ]
    more = [f"{len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return ", ".join([*names[:_LISTED], *more]) or "no transfers"


def _record(
    record: NodeRecord, dag: nx.DiGraph, costs: MeasuredCosts, cluster: Cluster
) -> NodeRecord:
    if record.kind is NodeKind.COMPUTE and not record.role:
        price = costs.compute.get(record.operation)
        return (
            record
            if price is None
            else replace(record, duration_us=price.time_us, cost_source=price.source)
        )
    if record.collective is None:
        return record
    kind = priced_kind(record.collective.kind)
    source = costs.transfer_source(kind, *_ranks_and_nodes(dag, record.collective, cluster))
    collective = (
        record.collective if source is None else replace(record.collective, cost_source=source)
    )
    price = costs.compute.get(record.operation)
    if price is not None:
        return replace(
            record, collective=collective, duration_us=price.time_us, cost_source=price.source
        )
    if record.collective.kind in costs.launch_us:
        duration_us, source = (
            costs.launch_us[record.collective.kind],
            costs.launch_source(record.collective.kind),
        )
        return replace(record, collective=collective, duration_us=duration_us, cost_source=source)
    return replace(record, collective=collective)


def _curves(dag: nx.DiGraph, costs: MeasuredCosts, cluster: Cluster) -> dict[str, PriceCurve]:
    curves: dict[str, PriceCurve] = dict(dag.graph["curves"])
    if costs.copies:
        curves[COPY] = sample_curve(lambda size_bytes: costs.copy_us(size_bytes) or 0.0)
    table = costs.table
    collectives = (dag.nodes[rank]["record"].collective for rank in range(dag.number_of_nodes()))
    seen: dict[str, CollectiveRecord] = {
        collective_curve_name(c.kind, c.group): c for c in collectives if c is not None
    }
    for name, collective in seen.items():
        kind = priced_kind(collective.kind)
        shape = _shape(dag, collective, cluster)
        if costs.transfer_source(kind, shape.num_ranks, shape.num_nodes) is not None:
            curves[name] = sample_curve(
                lambda size_bytes, kind=kind, shape=shape: table.collective_us(  # type: ignore[misc]
                    kind, shape, size_bytes
                ),
                table.measured_bytes(kind, shape),
            )
        launch = launch_curve_name(collective.kind, collective.group)
        if launch in curves and collective.kind in costs.launch_us:
            ticks = us_to_ticks(costs.launch_us[collective.kind])
            curves[launch] = PriceCurve(size_bytes=(0, 1), price_ticks=(ticks, ticks))
    return curves


def _shape(dag: nx.DiGraph, collective: CollectiveRecord, cluster: Cluster) -> GroupShape:
    return group_shape(
        cluster, dag.graph["group_ranks"].get(collective.group) or collective.group_size
    )


def _ranks_and_nodes(
    dag: nx.DiGraph, collective: CollectiveRecord, cluster: Cluster
) -> tuple[int, int]:
    shape = _shape(dag, collective, cluster)
    return shape.num_ranks, shape.num_nodes
