"""FX graph -> networkx DAG with costs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import networkx as nx
import torch

from apsched.capture.captured import CapturedGraph
from apsched.costs.checked import checked
from apsched.costs.clusters.cluster import Cluster
from apsched.costs.compute.fused_graph import fused_graph
from apsched.costs.compute.node_operation import node_operation
from apsched.costs.model import CostModel, cut_us
from apsched.costs.price_curve import PriceCurve
from apsched.fx.assumed_sizes import assume_sizes, rests_on_assumed
from apsched.fx.chains import chain_of
from apsched.fx.collectives import SENT_AS_KEY, tensor_bytes, tensors_of
from apsched.fx.tensors import dtype_name
from apsched.graph.check import check_graph
from apsched.graph.export.analysis import (
    Analysis,
    analyse,
    cast_before,
    edges_of,
    is_bucketable,
    num_members,
)
from apsched.graph.export.prices import (
    NodePrices,
    coalesced_curves,
    collective_curves,
    copy_curve,
    launch_curves,
)
from apsched.graph.export.provenance import (
    directions,
    gradients_returned,
    module_names,
    parameters_served,
)
from apsched.graph.export.signature import node_signature, target_name
from apsched.graph.records import COPY, Assumed, CollectiveRecord, NodeRecord
from apsched.kinds import AssumedSize, KernelCut, NodeKind
from apsched.units import us_to_ticks


def export_graph(
    captured: CapturedGraph,
    cost_model: CostModel,
    *,
    group_ranks: Mapping[str, tuple[int, ...]] | None = None,
    cluster_name: str = "",
) -> nx.DiGraph:
    """Return the DAG of ``captured`` as :mod:`apsched.graph.records` describes it, with durations
    from ``cost_model``.

    ``group_ranks`` maps the name of a process group to its process ranks: its size if the graph
    names it without one, and the ranks that share a node. A size in the graph has priority; ranks
    of another number are left out of the DAG.

    Raises
    ------
    InputError
        where a node has no shape, communicates in a way that apsched cannot schedule, or gets an
        impossible price; it names the node.
    """
    profiled = getattr(cost_model, "profiled_sizes", None)
    priced_by = _priced_by(cost_model, cluster_name)
    sizes = assume_sizes(captured.module.graph, captured.hints, profiled)
    analysis = analyse(captured, group_ranks or {})
    cost_model = checked(cost_model)
    curves = _curves(analysis, cost_model)
    records = _records(captured, analysis, cost_model, curves)
    dag = nx.DiGraph(
        name=captured.name,
        cluster=cluster_name,
        priced_by=priced_by,
        group_ranks=_ranks_that_fit(analysis, group_ranks or {}),
        storages=tuple(analysis.table.storages),
        curves=curves,
        cuts=tuple(_cuts(analysis, cost_model, records)),
        assumed=_assumed(analysis, sizes),
        chains=_chains(analysis),
        parameters=tuple(sorted(set(captured.parameter_names.values()))),
        gradients=gradients_returned(captured, analysis.nodes, analysis.kinds),
        shards=dict(sorted(captured.shards.items())),
        has_backward=captured.has_backward,
    )
    data, order = edges_of(analysis)
    dag.add_nodes_from((record.rank, {"record": record}) for record in records)
    dag.add_edges_from(data, kind="data")
    dag.add_edges_from(order, kind="order")
    check_graph(dag)
    return dag


def _priced_by(cost_model: CostModel, cluster_name: str) -> Cluster | None:
    """Return the cluster of ``cost_model`` if it is the one called ``cluster_name``."""
    known = getattr(cost_model, "cluster", None)
    return known if isinstance(known, Cluster) and known.name == cluster_name else None


def _ranks_that_fit(
    analysis: Analysis, group_ranks: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the process ranks of the groups, without those whose number differs from the graph."""
    sizes = {call.group: call.group_size for call in analysis.calls.values()}
    return {
        name: tuple(ranks)
        for name, ranks in group_ranks.items()
        if not ranks or sizes.get(name, len(ranks)) == len(ranks)
    }


def _curves(analysis: Analysis, cost_model: CostModel) -> dict[str, PriceCurve]:
    launched = (analysis.calls[start] for start in analysis.waits.wait_of_start)
    device = _usual_device(analysis)
    groups = sorted({(call.kind, call.group, call.group_size) for call in launched})
    priced = collective_curves(cost_model, groups) | coalesced_curves(cost_model, groups)
    return (
        {COPY: copy_curve(cost_model, device)} | priced | launch_curves(cost_model, groups, device)
    )


def _usual_device(analysis: Analysis) -> torch.device:
    devices = Counter(tensor.device for node in analysis.nodes for tensor in tensors_of(node))
    return devices.most_common(1)[0][0] if devices else torch.device("cpu")


def _records(
    captured: CapturedGraph,
    analysis: Analysis,
    cost_model: CostModel,
    curves: dict[str, PriceCurve],
) -> list[NodeRecord]:
    prices = NodePrices(cost_model, curves, analysis.group_sizes)
    waits = analysis.waits.wait_of_start
    parameters = parameters_served(captured, analysis.nodes, analysis.kinds, waits, analysis.fsdp)
    modules = module_names(captured, analysis.nodes, analysis.kinds, waits, parameters)
    outputs = _output_places(analysis.nodes)
    places = {rank: outputs.get(analysis.nodes[rank], -1) for rank in parameters}
    runs = directions(captured, analysis.nodes)
    kernels = {
        node: analysis.rank_of[nodes[0]]
        for nodes in fused_graph(captured.module.graph, again=True).kernels
        for node in nodes
    }
    records = []
    for rank, node in enumerate(analysis.nodes):
        used, kind = analysis.table.of_node[rank], analysis.kinds[rank]
        call = analysis.calls.get(rank)
        duration_us, source = prices.price(node, kind, call)
        records.append(
            NodeRecord(
                name=node.name,
                rank=rank,
                op=node.op,
                target=target_name(node),
                kind=kind,
                duration_us=duration_us,
                cost_source=source,
                allocates=used.allocates,
                reads=used.reads,
                writes=used.writes,
                aliases=used.aliases,
                frees=used.frees,
                module=modules[rank],
                direction=runs[rank],
                dtype=dtype_name(next(tensors_of(node), None)),
                role=node.meta.get("apsched", {}).get("role", ""),
                signature=node_signature(node, analysis.rank_of, call.group_size if call else 0),
                collective=_collective(
                    analysis,
                    rank,
                    places.get(rank, -1),
                    prices.transfer_source(analysis.calls[rank]),
                )
                if kind is NodeKind.START
                else None,
                kernel=kernels.get(node, -1),
                operation=node_operation(node) if kind in _TIMED else "",
            )
        )
    return records


_TIMED = (NodeKind.COMPUTE, NodeKind.START, NodeKind.WAIT)


def _cuts(
    analysis: Analysis, cost_model: CostModel, records: Sequence[NodeRecord]
) -> Iterator[KernelCut]:
    """Yield where kernels may be cut; no node may be the faster for it, so that bounds for whole
    kernels hold for all.
    """
    for first, times in cut_us(cost_model, analysis.nodes[0].graph).items():
        ranks = sorted(analysis.rank_of[node] for node in times)
        longer = {
            rank: us_to_ticks(times[analysis.nodes[rank]]) - us_to_ticks(records[rank].duration_us)
            for rank in ranks
        }
        if min(longer.values()) >= 0 and any(longer.values()):
            changed = tuple(rank for rank in ranks if longer[rank])
            yield KernelCut(
                node=analysis.rank_of[first],
                nodes=changed,
                extra_ticks=tuple(longer[rank] for rank in changed),
            )


def _chains(analysis: Analysis) -> tuple[int, ...]:
    """Return the chain of each node; empty where there are not several."""
    chains = tuple(chain_of(node) for node in analysis.nodes)
    return chains if len({*chains} - {-1}) > 1 else ()


def _assumed(analysis: Analysis, sizes: tuple[AssumedSize, ...]) -> Assumed:
    """Return the shares of time and peak that rest on ``sizes``."""
    if not sizes:
        return Assumed()
    marked = {node for node in analysis.nodes if any(map(rests_on_assumed, tensors_of(node)))}
    return Assumed(
        sizes=sizes,
        nodes=tuple(
            rank
            for rank, node in enumerate(analysis.nodes)
            if not marked.isdisjoint((node, *node.all_input_nodes))
        ),
        storages=tuple(sorted(analysis.table.assumed)),
    )


def _output_places(nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, int]:
    """Return node -> place among the graph's outputs of the first that it is part of."""
    direct = (
        {value: place for place, value in enumerate(nodes[-1].all_input_nodes)}
        if nodes and nodes[-1].op == "output"
        else {}
    )
    places: dict[torch.fx.Node, int] = {}
    for node in reversed(nodes):
        later = [places[user] for user in node.users if user in places]
        later += [direct[node]] if node in direct else []
        if later:
            places[node] = min(later)
    return places


def _collective(
    analysis: Analysis, start: int, output_place: int, cost_source: str
) -> CollectiveRecord:
    node, call = analysis.nodes[start], analysis.calls[start]
    result = next(tensors_of(node), None)
    return CollectiveRecord(
        kind=call.kind,
        group=call.group,
        group_size=call.group_size,
        reduce_op=call.reduce_op,
        dtype=node.meta.get("custom", {}).get(SENT_AS_KEY) or dtype_name(result),
        device=result.device.type if result is not None else "",
        input_bytes=call.input_bytes,
        output_bytes=call.output_bytes,
        size_bytes=call.size_bytes,
        wait=analysis.waits.wait_of_start[start],
        on_path=start not in analysis.fsdp,
        bucketable=is_bucketable(analysis, start),
        holds_input=call.holds_input,
        num_members=num_members(node),
        cast_bytes=_bytes_of(cast.all_input_nodes[0])
        if (cast := cast_before(analysis, start)) is not None
        else 0,
        output_place=output_place,
        cost_source=cost_source,
        num_coalesced=len([*tensors_of(node)]) if call.coalesced else 0,
    )


def _bytes_of(node: torch.fx.Node) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors_of(node))
