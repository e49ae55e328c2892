"""A SOURCE as graphs that are ready to be solved: capture -> export -> problem, or graph files ->
problem.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import networkx as nx

from apsched.costs.clusters.cluster import Cluster, load_cluster
from apsched.errors import InputError
from apsched.graph.garbage import rare_garbage_collection
from apsched.graph.reprice import repriced, unmatched
from apsched.names import ranks_text
from apsched.pipeline.assumptions import check_hints
from apsched.pipeline.cost_choice import (
    CostChoice,
    ReadCosts,
    check_same_cluster,
    cluster_of_graphs,
    compute_from_profile,
    counted_twice,
    other_device,
    read_costs,
)
from apsched.pipeline.device_memory import BesideGraph, beside_graphs
from apsched.pipeline.rate import StepRate, step_rate
from apsched.pipeline.sources import OpenedSource, SourceKind, SourceRequest, classify, opened
from apsched.problem.build import build_problem
from apsched.problem.contention_spec import contended, contention_off
from apsched.problem.problem import Problem
from apsched.progress import Progress

if TYPE_CHECKING:
    from apsched.capture.captured import Capture, CapturedGraph, SavedBytes
    from apsched.costs.model import CostModel
    from apsched.fx.node_shards import NodeGroup

JOINT = "joint"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedGraph:
    """One graph of a source, ready to be solved."""

    dag: nx.DiGraph
    problem: Problem
    device_memory_bytes: int | None
    """Memory of the device that the costs stand for; ``None`` where unknown."""
    beside: BesideGraph | None = None
    """The memory of that device outside of the graph; ``None`` if unknown."""
    captured: "CapturedGraph | None" = None
    """The FX graph; ``None`` where the source was a graph file."""
    cost_model: "CostModel | None" = None
    group_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    nodes: "Mapping[str, NodeGroup]" = field(default_factory=dict)
    """Process group -> its ranks that share a node with this one, where parameters can be resharded
    there.
    """
    seconds: Mapping[str, float] = field(default_factory=dict)
    without_bitwise: Problem | None = None
    """The problem as it would be without bitwise mode; ``None`` where that is not on."""
    apart: "tuple[LoadedGraph, ...]" = ()
    """Of one graph of forward and backward: both apart, as far as they are known."""
    places: tuple[int, ...] = ()
    """Of one of these: rank in the graph of both of each node; -1 for outputs, and for inputs of
    backward that forward computes.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSource:
    """All graphs of a source."""

    label: str
    slug: str
    cluster: str
    graphs: tuple[LoadedGraph, ...]
    notes: tuple[str, ...] = ()
    """Notes for the user about the costs."""
    saved_bytes: "SavedBytes | None" = None
    rate: StepRate | None = None
    """Tokens and operations of the step, as far as they are known."""


@contextmanager
def loaded(
    request: SourceRequest,
    costs: CostChoice,
    direction: str,
    progress: Progress,
) -> Iterator[LoadedSource]:
    """Open a source and export its graphs; process groups that they need run until the body
    ends.
    """
    with loaded_at(request, (costs,), direction, progress) as (source,):
        dags = [graph.dag for graph in source.graphs]
        cluster = cluster_of_graphs(costs.cluster, dags)
        for warning in counted_twice(costs.contention, dags):
            progress.warning(warning)
        notes: tuple[str, ...] = ()
        if cluster is not None and not compute_from_profile(dags):
            notes = contention_off(costs.contention, cluster)
        yield replace(source, notes=(*source.notes, *notes))


@contextmanager
def loaded_at(
    request: SourceRequest,
    choices: Sequence[CostChoice],
    direction: str,
    progress: Progress,
) -> Iterator[tuple[LoadedSource, ...]]:
    """As :func:`loaded`, for several choices of costs: the source is captured once."""
    read = [read_costs(costs) for costs in choices]
    for costs, chosen in zip(choices, read, strict=True):
        if costs.cluster is not None or classify(request.source) is not SourceKind.GRAPH_FILE:
            for warning in other_device(chosen):
                progress.warning(warning)
    with opening(request, progress) as (source, capture_seconds):
        if source.capture is None:
            if request.hints:
                raise InputError(
                    f"--hint cannot change {source.label}: a graph file holds its sizes; capture"
                    " it again with --hint"
                )
            files = (
                _from_graph_files(source, costs, chosen, direction)
                for costs, chosen in zip(choices, read, strict=True)
            )
            yield tuple(_contended(file, costs) for file, costs in zip(files, choices, strict=True))
            return
        capture = _with_hints(source.capture, request)
        names = tuple(graph.name for graph in capture.graphs)
        if direction == JOINT and JOINT not in names:
            from apsched.capture.one_graph import with_joint_graph

            with progress.stage("join forward and backward"):
                capture = with_joint_graph(capture)
            names = (JOINT,)
        wanted = _in_direction(names, direction, request.source)
        source = replace(source, capture=capture)
        exported = [
            _export_capture(
                source, request, wanted, chosen, capture_seconds, progress, fused=costs.fused
            )
            for costs, chosen in zip(choices, read, strict=True)
        ]
        sizes = (s for one in exported for g in one.graphs for s in g.dag.graph["assumed"].sizes)
        where = f"the graphs of {request.source} have"
        check_hints(dict(request.hints), sizes, "--hint", where)
        yield tuple(
            _contended(one, costs, chosen.cluster)
            for one, costs, chosen in zip(exported, choices, read, strict=True)
        )


@contextmanager
def opening(request: SourceRequest, progress: Progress) -> Iterator[tuple[OpenedSource, float]]:
    """Open a source as the stage ``capture``; yields how many seconds that took beside it."""
    with ExitStack() as stack:
        with progress.stage(
            "read" if classify(request.source) is SourceKind.GRAPH_FILE else "capture"
        ) as took:
            source = stack.enter_context(opened(request))
        for warning in source.capture.warnings if source.capture is not None else ():
            progress.warning(warning)
        yield source, took["seconds"]


@rare_garbage_collection()
def loaded_graph(
    captured: "CapturedGraph",
    cost_model: "CostModel",
    *,
    cluster: str,
    group_ranks: Mapping[str, tuple[int, ...]],
    device_memory_bytes: int | None = None,
    nodes: "Mapping[str, NodeGroup] | None" = None,
    progress: Progress,
    capture_seconds: float = 0.0,
) -> LoadedGraph:
    """Return a captured graph as DAG and problem."""
    from apsched.graph.export.export import export_graph

    with progress.stage(f"export {captured.name}") as took:
        dag = export_graph(captured, cost_model, group_ranks=group_ranks, cluster_name=cluster)
        problem = build_problem(dag)
    return LoadedGraph(
        dag=dag,
        problem=problem,
        device_memory_bytes=device_memory_bytes,
        captured=captured,
        cost_model=cost_model,
        group_ranks=group_ranks,
        nodes=nodes or {},
        seconds={"capture": capture_seconds, "export": took["seconds"]},
    )


def _export_capture(
    source: OpenedSource,
    request: SourceRequest,
    wanted: tuple[str, ...],
    costs: ReadCosts,
    capture_seconds: float,
    progress: Progress,
    *,
    fused: bool,
) -> LoadedSource:
    from apsched.costs.cluster_model import ClusterCostModel
    from apsched.costs.measured_model import MeasuredCostModel
    from apsched.fx.node_shards import node_groups

    capture, cluster = source.capture, costs.cluster
    assert capture is not None
    group_ranks = group_ranks_of(capture)
    formulas = ClusterCostModel(cluster, group_ranks, costs.table, fused=fused)
    cost_model = (
        formulas
        if costs.measured is None
        else MeasuredCostModel(costs.measured, formulas, group_ranks)
    )
    graphs = tuple(
        loaded_graph(
            captured,
            cost_model,
            cluster=cluster.name,
            group_ranks=group_ranks,
            device_memory_bytes=cluster.device.memory_bytes,
            nodes=node_groups(group_ranks, cluster.ranks_per_node),
            progress=progress,
            capture_seconds=capture_seconds,
        )
        for captured in capture.graphs
        if captured.name in wanted or JOINT in wanted
    )
    if JOINT in wanted:
        graphs = (with_apart(graphs[-1], beside_each_other(graphs[:-1], cluster)),)
    notes = capture.notes + tuple(
        f"priced by formula, not in the table: {line}" for line in formulas.unpriced()
    )
    if costs.table is not None:
        notes += tuple(
            f"measured collectives: {line}"
            for line in (*costs.table.notes, *costs.table.beyond(cluster))
        )
    if costs.measured is not None:
        dags = [graph.dag for graph in graphs]
        notes += unmatched(costs.measured, costs.path, dags, cluster)
    return LoadedSource(
        label=source.label,
        slug=source.slug,
        cluster=cluster.name,
        graphs=beside_each_other(graphs, cluster),
        notes=(*_axes_of_groups(source, graphs), *notes),
        saved_bytes=capture.saved_bytes,
        rate=step_rate(request, source, capture.graphs, cluster.device),
    )


def with_apart(joint: LoadedGraph, apart: Sequence[LoadedGraph]) -> LoadedGraph:
    """Return ``joint``, one graph of forward and backward, with both ``apart`` and their places."""
    from apsched.capture.one_graph import joint_places

    captured = (half.captured for half in apart)
    places = joint_places(*(one.module for one in captured if one is not None))
    halves = zip(apart, places, strict=True)
    return replace(joint, apart=tuple(replace(half, places=tuple(own)) for half, own in halves))


def _axes_of_groups(source: OpenedSource, graphs: Sequence[LoadedGraph]) -> tuple[str, ...]:
    """Return a note on the mesh axes of the process groups that the graphs use, or their process
    ranks, where the model has a mesh of its own.
    """
    if source.mesh is None:
        return ()
    ranks = {n: graph.group_ranks.get(n, ()) for graph in graphs for n in graph.problem.streams}
    axes = {name: source.mesh.axes_of(known) for name, known in ranks.items()}
    named = (
        f"group {name} is mesh axis {axis} ({len(ranks[name])} process ranks)"
        if axis
        else f"group {name} has {ranks_text(ranks[name])}"
        for name, axis in axes.items()
        if ranks[name]
    )
    note = ", ".join(named)
    return (note,) if note else ()


def _contended(
    source: LoadedSource, costs: CostChoice, cluster: Cluster | None = None
) -> LoadedSource:
    """Return ``source`` with the stated contention; graph files hold the cluster, or its name."""
    cluster = cluster or cluster_of_graphs(costs.cluster, [graph.dag for graph in source.graphs])

    def posed(graph: LoadedGraph) -> LoadedGraph:
        ranks = graph.dag.graph["group_ranks"]
        problem = contended(graph.problem, costs.contention, cluster, ranks)
        return replace(graph, problem=problem, apart=tuple(map(posed, graph.apart)))

    return replace(source, graphs=tuple(map(posed, source.graphs)))


def _with_hints(capture: "Capture", request: SourceRequest) -> "Capture":
    hints = dict(request.hints)
    return replace(capture, graphs=tuple(replace(g, hints=hints) for g in capture.graphs))


def group_ranks_of(capture: "Capture") -> dict[str, tuple[int, ...]]:
    """Return the process ranks of every group; of one that is known by size only, that many from 0
    on, as cost models take it to be.
    """
    ranks = {name: tuple(range(size)) for name, size in capture.group_sizes.items()}
    return ranks | {name: known for name, known in capture.group_ranks.items() if known}


def _from_graph_files(
    source: OpenedSource, costs: CostChoice, chosen: ReadCosts, direction: str
) -> LoadedSource:
    if costs.collectives:
        raise InputError(
            f"--collectives cannot change {source.label}: a graph file holds its costs; capture it"
            " again with the table"
        )
    if not costs.fused:
        raise InputError(
            f"--unfused cannot change {source.label}: a graph file holds its costs; capture it"
            " again with --unfused"
        )
    if costs.cluster is not None:
        check_same_cluster(costs.cluster, source.dags, source.label)
    cluster = cluster_of_graphs(costs.cluster, source.dags)
    dags = source.dags
    notes: tuple[str, ...] = ()
    if chosen.measured is not None:
        # the costs name a cluster; the graphs may hold another one of that name
        same = cluster is not None and cluster.name == chosen.cluster.name
        shapes = cluster if cluster is not None and same else chosen.cluster
        notes = unmatched(chosen.measured, chosen.path, dags, shapes)
        dags = tuple(repriced(dag, chosen.measured, shapes) for dag in dags)
    memory_bytes = cluster.device.memory_bytes if cluster else None
    wanted = _in_direction(tuple(dag.graph["name"] for dag in dags), direction, source.label)
    graphs = tuple(
        LoadedGraph(
            dag=dag,
            problem=build_problem(dag),
            device_memory_bytes=memory_bytes,
            seconds={"capture": 0.0, "export": 0.0},
        )
        for dag in dags
        if dag.graph["name"] in wanted
    )
    return LoadedSource(
        label=source.label,
        slug=source.slug,
        cluster=", ".join(sorted({dag.graph["cluster"] for dag in dags})),
        graphs=beside_each_other(graphs, cluster),
        notes=notes,
    )


def priced_on_cluster(
    capture: "Capture", cluster_name: str, progress: Progress, *, in_node: bool = True
) -> tuple[LoadedGraph, ...]:
    """Return the graphs of ``capture``, one training step, with the prices and the device of a
    cluster, and unless ``in_node`` is false with its nodes, in which parameters may be resharded.
    """
    from apsched.costs.cluster_model import ClusterCostModel  # torch, which graph files do without
    from apsched.fx.node_shards import node_groups

    cluster, ranks = load_cluster(cluster_name), group_ranks_of(capture)
    graphs = (
        loaded_graph(
            graph,
            ClusterCostModel(cluster, ranks),
            cluster=cluster.name,
            group_ranks=ranks,
            device_memory_bytes=cluster.device.memory_bytes,
            nodes=node_groups(ranks, cluster.ranks_per_node) if in_node else {},
            progress=progress,
        )
        for graph in capture.graphs
    )
    return beside_each_other(tuple(graphs), cluster)


def beside_each_other(
    graphs: tuple[LoadedGraph, ...], cluster: Cluster | None
) -> tuple[LoadedGraph, ...]:
    """Return ``graphs``, those of one training step, with the memory that the device holds beside
    each; unchanged if the cluster is not known.
    """
    if cluster is None:
        return graphs
    beside = beside_graphs([graph.dag for graph in graphs], cluster)
    return tuple(replace(graph, beside=one) for graph, one in zip(graphs, beside, strict=True))


def _in_direction(names: tuple[str, ...], direction: str, source: str) -> tuple[str, ...]:
    if direction == "both":
        return names
    found = tuple(name for name in names if name.partition("-")[0] == direction)
    if not found:
        raise InputError(
            f"{source}: expected a {direction} graph, found {', '.join(names)}; choose --direction"
            " both"
        )
    return found
