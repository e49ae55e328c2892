"""The line from a captured graph to a scheduled one: export, problem, caps, solve, verify, write
back, round trip.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

import apsched.report.answer.shown  # noqa: F401, so that results show themselves
from apsched.artifacts.schedule_file import bind_schedule
from apsched.capture.captured import CapturedGraph
from apsched.compiler.memory_in_use import MemoryInUse, agreed_memory, with_memory_in_use
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.answer import Answers, Sources, answered
from apsched.compiler.ranks.uneven import likeness_of
from apsched.compiler.settings import Settings
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import Cluster
from apsched.costs.measured_model import MeasuredCostModel
from apsched.costs.model import CostModel
from apsched.errors import InfeasibleError, InputError
from apsched.fx.collectives import ranks_of_groups
from apsched.fx.node_shards import NodeGroup, node_groups
from apsched.kinds import CollectiveKind
from apsched.pipeline.load import LoadedGraph, beside_each_other, loaded_graph
from apsched.pipeline.solve_graph import (
    Search,
    SolveRequest,
    resolve_caps,
    solve_graph,
    under_plan,
)
from apsched.pipeline.steps import check_round_trip, rewrite, with_round_trip
from apsched.problem.contention_spec import with_stated_contention
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.report.explanation import explain_in_job
from apsched.schedule.result import SolveResult
from apsched.solver import solve_requested
from apsched.torch_compat.graphs import process_group_names

RESULT = "apsched_result"
"""Key in ``meta`` of a scheduled module, and its attribute: the :class:`apsched.Result`."""


def scheduled(
    captured: CapturedGraph,
    settings: Settings,
    agreement: GraphAgreement | None = None,
    solved: Answers | None = None,
) -> torch.fx.GraphModule:
    """Return the module of ``captured`` in the fastest order that ``settings`` allow; ``captured``
    stays unchanged.

    With ``agreement`` one process rank solves for all that have this graph. ``solved`` has answers
    that this process found before. ``InputError`` if the graph cannot be scheduled,
    ``InfeasibleError`` if no schedule keeps the caps, ``RoundTripError`` if the rewritten graph
    differs from the claim.
    """
    files = settings.answers.schedules
    request = replace(
        settings.solve_request,
        bitwise_price=agreement is None,  # it takes a second solve, for which a job would wait
        second_group=settings.second_group and not files,
    )
    progress = progress_of(settings)
    in_use = agreed_memory(settings, agreement)
    with _working(agreement):
        graph, request = priced_in_job(captured, settings, request, in_use, progress)
        (graph,) = under_plan((graph,), request)
        known_file = next(
            (file for file in files if file.graph["hash"] == graph.problem.graph_hash), None
        )
        graph = (
            graph
            if known_file is None
            else replace(graph, problem=known_file.problem_of(graph.problem))
        )
        caps = resolve_caps(graph, request, progress)

    sources = replace(settings.answers, solved=solved)
    result = solve_graph(
        graph,
        request,
        progress,
        caps=caps,
        search=searching(settings, progress, sources, agreement, captured.module.graph),
        working=partial(_working, agreement),
    )
    if result.best is None:
        raise InfeasibleError(explain_in_job(result))
    with _working(agreement):
        rewritten = rewrite(replace(graph, problem=result.problem), result.best, progress)
    check_round_trip(result.problem.name, rewritten)
    result = with_round_trip(result, rewritten)
    rewritten.module.meta[RESULT] = result
    setattr(rewritten.module, RESULT, result)
    return rewritten.module


def searching(
    settings: Settings,
    progress: Progress,
    sources: Sources,
    agreement: GraphAgreement | None = None,
    likeness_in: torch.fx.Graph | None = None,
) -> Search:
    """Return the search for an answer, from ``sources`` or the solver, which begins at the stated
    start of the same graph. With ``agreement`` on the graph ``likeness_in`` one process rank
    searches for all.
    """

    def search(problem: Problem, caps: Caps, options: SolveOptions) -> SolveResult:
        file = next((f for f in settings.starts if f.graph["hash"] == problem.graph_hash), None)
        start = None if file is None else bind_schedule(file, problem)
        return answered(
            problem,
            caps,
            options,
            partial(solve_requested, progress=progress.solver, start=start),
            sources=replace(sources, start=start),
            agreement=agreement,
            likeness=likeness_of(likeness_in, problem) if agreement and likeness_in else None,
        )

    return search


def progress_of(settings: Settings) -> Progress:
    """Return the stream of progress: on process rank 0, if ``settings`` have progress on."""
    return Progress(quiet=not (settings.progress and process_rank() == 0))


def priced(
    captured: CapturedGraph,
    settings: Settings,
    group_ranks: Mapping[str, tuple[int, ...]],
    request: SolveRequest,
    progress: Progress,
) -> tuple[LoadedGraph, SolveRequest]:
    """Return ``captured`` as a problem at the costs and under the contention that ``settings``
    state; and ``request``, without a memory cap where the costs know no device.
    """
    model = settings.prices(group_ranks)
    cluster = _cluster_of(model)
    graph = loaded_graph(
        captured,
        model,
        cluster=cluster.name if cluster else "",
        group_ranks=group_ranks,
        device_memory_bytes=cluster.device.memory_bytes if cluster else None,
        nodes=_nodes(group_ranks, cluster),
        progress=progress,
    )
    known = graph.dag.graph["group_ranks"]
    (graph,) = beside_each_other((graph,), cluster)
    problem = with_stated_contention(graph.problem, settings.contention, cluster, known)
    if request.memory_cap is None and cluster is None:
        request = replace(request, memory_cap=MemoryCap())
    return replace(graph, problem=problem), request


def priced_step(
    graphs: Sequence[CapturedGraph],
    settings: Settings,
    group_ranks: Mapping[str, tuple[int, ...]],
    request: SolveRequest,
    progress: Progress,
) -> tuple[tuple[LoadedGraph, ...], SolveRequest]:
    """Return :func:`priced` for all graphs of a training step: the memory beside each counts the
    parameters of all, and state of the optimizer for those that one of them has a gradient of.
    """
    found: list[LoadedGraph] = []
    for captured in graphs:
        graph, request = priced(captured, settings, group_ranks, request, progress)
        found.append(graph)
    cluster = _cluster_of(settings.prices(group_ranks))
    return beside_each_other(tuple(found), cluster), request


def priced_in_job(
    captured: CapturedGraph,
    settings: Settings,
    request: SolveRequest,
    in_use: MemoryInUse,
    progress: Progress,
) -> tuple[LoadedGraph, SolveRequest]:
    """Return :func:`priced` for the process groups that run here, with the stated hints, the memory
    ``in_use`` and the stated places of parameters.
    """
    captured = replace(captured, hints=settings.stated_hints)
    groups = groups_of(captured.module.graph, settings)
    graph, request = priced(captured, settings, groups, request, progress)
    graph = with_memory_in_use(graph, in_use, request.optimizer)
    return in_registered_order(graph, settings), request


def in_registered_order(graph: LoadedGraph, settings: Settings) -> LoadedGraph:
    """Return ``graph`` with the places of its parameters as ``settings`` state them, if they do."""
    order = settings.parameter_order
    if order is None:
        return graph
    return replace(graph, problem=_in_order(graph.problem, order, all_known=settings.bitwise))


def _in_order(problem: Problem, parameter_order: Sequence[str], *, all_known: bool) -> Problem:
    """Return ``problem`` with the places of its parameters in order of registration; ``all_known``:
    of every gradient that is reduced.
    """
    places = {name: place for place, name in enumerate(parameter_order)}
    strange = [
        c
        for c in problem.collectives
        if problem.keys[c.key].kind == CollectiveKind.REDUCE_SCATTER
        and not c.on_path
        and c.module not in places
    ]
    if all_known and strange:
        raise InputError(
            f"{problem.name}: bitwise: expected parameter_order to have the parameter of each"
            f" gradient that is reduced, found {strange[0].module or 'no name'!r} at node"
            f" {problem.node_names[strange[0].start]}; hand in [n for n, _ in"
            " model.named_parameters()] of the model that is compiled; under"
            " torch.compile(backend='inductor') a pass alone gets no names of parameters: use"
            " apsched.backend(inductor=True)"
        )
    return replace(
        problem,
        collectives=tuple(
            replace(c, output_place=places.get(c.module, -1)) for c in problem.collectives
        ),
    )


def _working(agreement: GraphAgreement | None) -> AbstractContextManager[None]:
    return nullcontext() if agreement is None else agreement.job.working()


def groups_of(graph: torch.fx.Graph, settings: Settings) -> dict[str, tuple[int, ...]]:
    """Return name -> process ranks of the process groups that run in this process, of those that
    collectives of ``graph`` name and only torch's registry knows, and of those that are stated.
    """
    stated = {name: tuple(ranks) for name, ranks in (settings.group_ranks or {}).items()}
    return ranks_of_groups(graph.nodes, {**running_groups(), **stated})


def nodes_of(
    group_ranks: Mapping[str, tuple[int, ...]], settings: Settings
) -> dict[str, NodeGroup]:
    """Return process group -> its ranks that share a node with this process, by the cluster of
    ``settings``.
    """
    return _nodes(group_ranks, _cluster_of(settings.prices(group_ranks)))


def _nodes(
    group_ranks: Mapping[str, tuple[int, ...]], cluster: Cluster | None
) -> dict[str, NodeGroup]:
    if cluster is None:
        return {}
    return node_groups(group_ranks, cluster.ranks_per_node, process_rank())


def _cluster_of(model: CostModel) -> Cluster | None:
    """Return the cluster behind the prices of ``model``, if there is one."""
    return model.cluster if isinstance(model, ClusterCostModel | MeasuredCostModel) else None


def running_groups() -> dict[str, tuple[int, ...]]:
    """Return name -> process ranks of the process groups that run in this process."""
    return process_group_names() if _is_distributed() else {}


def process_rank() -> int:
    """Return this process's rank; 0 where no process group runs."""
    return torch.distributed.get_rank() if _is_distributed() else 0


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
