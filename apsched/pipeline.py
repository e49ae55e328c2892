"""The line from a SOURCE to a checked schedule: capture -> export -> problem -> solve -> verify -> write back -> round trip.

Each stage is a function of its own; ``apsched solve`` is all of them, the other commands and the API use some.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import networkx as nx

from apsched.bitwise import BITWISE_RULE
from apsched.build_problem import build_problem
from apsched.config import Caps, MilpOptions, SolveOptions
from apsched.contention_choice import contended
from apsched.cost_choice import CostChoice, ReadCosts, read_costs
from apsched.costs.cluster import Cluster, cluster_names, load_cluster
from apsched.errors import InputError
from apsched.graph.cost_shares import cost_shares
from apsched.graph.reprice import repriced
from apsched.graph_result import BitwisePrice, Result, result_of
from apsched.options import MemoryCap
from apsched.plan import Plan
from apsched.problem import Problem
from apsched.progress import Progress
from apsched.restrict import check_matches, restricted
from apsched.result import Scored, SolveResult
from apsched.scenarios import ScenarioOptions
from apsched.second_group import with_second_groups
from apsched.simulate import simulate
from apsched.sources import Opened, SourceKind, SourceRequest, classify, opened
from apsched.units import ticks_to_us
from apsched.verify import verify

if TYPE_CHECKING:
    import torch

    from apsched.capture.captured import Capture, CapturedGraph, SavedBytes
    from apsched.costs.model import CostModel
    from apsched.round_trip import RoundTrip

logger = logging.getLogger(__name__)

DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedGraph:
    """One graph of a source, ready to be solved."""

    dag: nx.DiGraph
    problem: Problem
    device_memory_bytes: int | None
    """Memory of the device that the costs stand for; ``None`` where unknown."""
    captured: "CapturedGraph | None" = None
    """The FX graph; ``None`` where the source was a graph file."""
    cost_model: "CostModel | None" = None
    group_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    without_bitwise: Problem | None = None
    """The problem as it would be without bitwise mode; ``None`` where that is not on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSource:
    """All graphs of a source."""

    label: str
    slug: str
    cluster: str
    graphs: tuple[LoadedGraph, ...]
    notes: tuple[str, ...] = ()
    """What the user should know about the costs."""
    saved_bytes: "SavedBytes | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """An FX graph in the order of a schedule."""

    module: "torch.fx.GraphModule"
    round_trip: "RoundTrip"
    seconds: float


@contextmanager
def loaded(request: SourceRequest, costs: CostChoice, direction: str, progress: Progress) -> Iterator[LoadedSource]:
    """Open a source and export its graphs; process groups that they need run until the body ends."""
    with loaded_at(request, (costs,), direction, progress) as (source,):
        yield source


@contextmanager
def loaded_at(
    request: SourceRequest, choices: Sequence[CostChoice], direction: str, progress: Progress
) -> Iterator[tuple[LoadedSource, ...]]:
    """As :func:`loaded`, for several choices of costs: the source is captured once."""
    read = [read_costs(costs) for costs in choices]
    with opening(request, progress) as (source, capture_seconds):
        if source.capture is None:
            files = (_from_graph_files(source, costs, chosen, direction) for costs, chosen in zip(choices, read, strict=True))
            yield tuple(_contended(file, costs) for file, costs in zip(files, choices, strict=True))
            return
        names = tuple(graph.name for graph in source.capture.graphs)
        wanted = _in_direction(names, direction, request.source)
        yield tuple(
            _contended(_export_capture(source, wanted, chosen, capture_seconds, progress, fused=costs.fused), costs, chosen.cluster)
            for costs, chosen in zip(choices, read, strict=True)
        )


@contextmanager
def opening(request: SourceRequest, progress: Progress) -> Iterator[tuple[Opened, float]]:
    """Open a source as the stage ``capture``; yields how many seconds that took beside it."""
    with ExitStack() as stack:
        with progress.stage("read" if classify(request.source) is SourceKind.GRAPH_FILE else "capture") as took:
            source = stack.enter_context(opened(request))
        yield source, took["seconds"]


def export_graph(
    captured: "CapturedGraph",
    cost_model: "CostModel",
    *,
    cluster: str,
    group_ranks: Mapping[str, tuple[int, ...]],
    device_memory_bytes: int | None = None,
    progress: Progress,
    capture_seconds: float = 0.0,
) -> LoadedGraph:
    """Return a captured graph as DAG and problem."""
    from apsched.graph.export import export

    with progress.stage(f"export {captured.name}") as took:
        dag = export(captured, cost_model, group_ranks=group_ranks, cluster_name=cluster)
        problem = build_problem(dag)
    return LoadedGraph(
        dag=dag,
        problem=problem,
        device_memory_bytes=device_memory_bytes,
        captured=captured,
        cost_model=cost_model,
        group_ranks=group_ranks,
        seconds={"capture": capture_seconds, "export": took["seconds"]},
    )


def under_plan(graphs: Sequence[LoadedGraph], plan: Plan, *, bitwise: bool = False) -> tuple[LoadedGraph, ...]:
    """Return ``graphs`` with their problems restricted by ``plan``, and with ``bitwise`` in bitwise mode.

    ``InputError`` for a rule that matches nothing in any of them.
    """
    check_matches([graph.problem for graph in graphs], plan)
    if not bitwise:
        return tuple(replace(graph, problem=restricted(graph.problem, plan)) for graph in graphs)
    return tuple(
        replace(graph, problem=restricted(graph.problem, plan, bitwise=True), without_bitwise=restricted(graph.problem, plan))
        for graph in graphs
    )


def with_bitwise_price(result: Result, free: Problem, solved: Callable[[Problem], SolveResult]) -> Result:
    """Return ``result``, of a problem in bitwise mode, with what that costs; ``free`` is the problem without it."""
    if BITWISE_RULE not in result.problem.rules or result.best is None:
        return result
    other = solved(free)
    ticks = result.answer.fastest_ticks  # a schedule in bitwise mode is one without it, too
    least = ticks if other.best is None else min(ticks, other.fastest_ticks)
    return replace(result, bitwise=BitwisePrice(step_time_us=ticks_to_us(least), cost_us=ticks_to_us(ticks - least)))


def resolve_caps(
    graph: LoadedGraph, caps: Caps, memory_cap: MemoryCap | None, progress: Progress, options: SolveOptions | None = None
) -> Caps:
    """Return ``caps`` for ``graph``: the memory cap in bytes, as stated, above the least feasible, or (unstated) the device's memory.

    ``options`` are those that solve it: what a smaller budget knows of the least memory is less. Compute stays as captured where no
    collective is on the path: there it has nothing to hide.
    """
    caps = moving_where_it_pays(graph.problem, caps)
    if memory_cap is None:
        if graph.device_memory_bytes is None:
            raise InputError(
                f"the memory of cluster {graph.dag.graph['cluster']!r} is not known here; "
                "state --memory-cap (bytes, none, floor or floor+2GiB)"
            )
        return replace(caps, memory_cap_bytes=graph.device_memory_bytes)
    if not memory_cap.above_floor:
        return replace(caps, memory_cap_bytes=memory_cap.size_bytes)
    from apsched.solver import least_memory

    with progress.stage(f"least memory {graph.problem.name}"):
        floor_bytes, _ = least_memory(graph.problem, replace(caps, memory_cap_bytes=None), options)
    return replace(caps, memory_cap_bytes=floor_bytes + (memory_cap.size_bytes or 0))


def moving_where_it_pays(problem: Problem, caps: Caps) -> Caps:
    """Return ``caps`` with compute as captured where no collective is on the path: there it has nothing to hide."""
    return caps if any(c.on_path for c in problem.collectives) else replace(caps, max_compute_move=0)


Search = Callable[[Problem, Caps, SolveOptions], SolveResult]


def solve_graph(
    graph: LoadedGraph,
    caps: Caps,
    options: SolveOptions,
    progress: Progress,
    *,
    milp: MilpOptions | None = None,
    search: Search | None = None,
    asked: ScenarioOptions | None = None,
    second_group: bool = False,
) -> Result:
    """Return the answer for one graph, checked by ``verify``; with ``milp`` that of the MILP, with ``search`` of what stands in for it.

    With ``asked`` the schedule is the one that is best over sampled costs. With ``second_group`` it is solved once more with gathers on
    groups of their own; ``Result.problem`` is that of the faster answer.
    """
    from apsched.robust import made_robust
    from apsched.solver import solve, solve_with_milp

    if second_group:
        alone = solve_graph(graph, caps, options, progress, milp=milp, search=search, asked=asked)
        beside = with_second_groups(graph.problem)
        if beside is None:
            return alone
        other = replace(graph, problem=beside, without_bitwise=None)
        second = solve_graph(other, caps, options, progress, milp=milp, search=search, asked=asked)
        return min(alone, second, key=lambda result: (result.best is None, result.step_time_us or 0.0))

    search = search or partial(solve, progress=progress.solver)
    with progress.stage(f"solve {graph.problem.name}") as took:
        answer = search(graph.problem, caps, options) if milp is None else solve_with_milp(graph.problem, caps, options, milp)
        answer, robustness = (answer, None) if asked is None else made_robust(graph.problem, caps, options, answer, asked)
        result = result_of(
            graph.problem, caps, answer, cluster=graph.dag.graph["cluster"], seconds={**graph.seconds, "solve": took["seconds"]}
        )
        result = replace(result, cost_shares=cost_shares(graph.dag), robustness=robustness)
        check_answer(result)
        log_metrics(result)
        if graph.without_bitwise is not None:
            result = with_bitwise_price(result, graph.without_bitwise, lambda other: solve(other, caps, options))
    return replace(result, seconds={**graph.seconds, "solve": took["seconds"], "write_back": 0.0})


def check_answer(result: Result) -> None:
    """Raise where the solver's answer breaks a cap or its own figures: never hand on what was not verified."""
    answer, best = result.answer, result.best
    if best is None or result.timeline is None:
        return
    wrong = list(verify(result.problem, best.schedule, result.caps))
    claimed = (best.step_time_ticks, best.peak_memory_bytes, best.num_launches)
    found = (result.timeline.step_time_ticks, result.timeline.peak_memory_bytes, result.timeline.num_launches)
    if claimed != found:
        wrong.append(f"step ticks, peak bytes and launches are {found}, not {claimed} as claimed")
    if answer.bound_ticks > best.step_time_ticks:
        wrong.append(f"the bound of {answer.bound_ticks} ticks lies above the step time of {best.step_time_ticks}")
    if answer.peak_bound_bytes > best.peak_memory_bytes or answer.launches_bound > best.num_launches:
        wrong.append(f"peak or launches lie below their bounds of {answer.peak_bound_bytes} bytes and {answer.launches_bound} launches")
    if wrong:
        raise RuntimeError(f"{result.problem.name}: the solver's schedule fails its check, a bug of apsched: {'; '.join(wrong[:3])}")


def log_metrics(result: Result) -> None:
    """Log what the schedule makes of the collectives."""
    for line in result.metrics.lines() if result.metrics else ():
        logger.info("%s: %s", result.problem.name, line)


def with_torch_schedulers(graph: LoadedGraph, result: Result, progress: Progress) -> Result:
    """Return ``result`` with torch's own schedulers among the baselines; where there is no FX graph a note says so."""
    name = graph.problem.name
    if graph.captured is None:
        return replace(result, notes=(f"{name}: no inductor, which needs the FX graph; a graph file has none (compare the source itself)",))
    from apsched.inductor_baseline import torch_scores

    assert graph.cost_model is not None
    with progress.stage(f"inductor {name}"):
        found = torch_scores(graph.captured, graph.problem, graph.cost_model, result.caps, group_ranks=graph.group_ranks)
    if graph.problem.rules:
        unplanned = ("it knows nothing of the plan",)
        found = replace(found, scores=tuple(replace(score, violations=(*score.violations, *unplanned)) for score in found.scores))
    return replace(result, others=found.scores, notes=found.notes, seconds={**result.seconds, **found.seconds})


def rewrite(graph: LoadedGraph, scored: Scored, progress: Progress) -> Rewritten:
    """Return the FX graph in the order of ``scored``, and whether what it does is what was claimed."""
    from apsched.round_trip import round_trip, with_names_checked
    from apsched.writeback.write_back import write_back

    assert graph.captured is not None
    assert graph.cost_model is not None
    with progress.stage(f"write back {graph.problem.name}") as took:
        module = write_back(graph.captured.module, graph.problem, scored.schedule)
        claimed = simulate(graph.problem, scored.schedule)
        trip = round_trip(module, graph.captured, graph.cost_model, graph.group_ranks, claimed, graph.problem.contention)
        trip = with_names_checked(trip, module, graph.problem, scored.schedule)
    return Rewritten(module=module, round_trip=trip, seconds=took["seconds"])


def with_round_trip(result: Result, rewritten: Rewritten) -> Result:
    """Return ``result`` with what the round trip of its graph said."""
    if not rewritten.round_trip.exact:
        logger.warning("%s: the rewritten graph is not what was claimed: %s", result.problem.name, rewritten.round_trip.difference)
    seconds = {**result.seconds, "write_back": rewritten.seconds}
    return replace(result, round_trip_exact=rewritten.round_trip.exact, seconds=seconds)


def _export_capture(
    source: Opened,
    wanted: tuple[str, ...],
    costs: ReadCosts,
    capture_seconds: float,
    progress: Progress,
    *,
    fused: bool,
) -> LoadedSource:
    from apsched.costs.cluster_model import ClusterCostModel
    from apsched.costs.measured_model import MeasuredCostModel

    capture, cluster = source.capture, costs.cluster
    assert capture is not None
    group_ranks = _group_ranks(capture)
    formulas = ClusterCostModel(cluster, group_ranks, costs.table, fused=fused)
    cost_model = formulas if costs.measured is None else MeasuredCostModel(costs.measured, formulas, group_ranks)
    graphs = tuple(
        export_graph(
            captured,
            cost_model,
            cluster=cluster.name,
            group_ranks=group_ranks,
            device_memory_bytes=cluster.device.memory_bytes,
            progress=progress,
            capture_seconds=capture_seconds,
        )
        for captured in capture.graphs
        if captured.name in wanted
    )
    notes = tuple(f"priced by formula, not in the table: {line}" for line in formulas.unpriced())
    if costs.table is not None:
        notes += tuple(f"measured collectives: {line}" for line in (*costs.table.notes, *costs.table.beyond(cluster)))
    return LoadedSource(
        label=source.label, slug=source.slug, cluster=cluster.name, graphs=graphs, notes=notes, saved_bytes=capture.saved_bytes
    )


def _contended(source: LoadedSource, costs: CostChoice, cluster: Cluster | None = None) -> LoadedSource:
    """Return ``source`` with the contention that is asked for; of graph files the cluster is known by name."""
    stated = costs.cluster or (source.cluster if source.cluster in cluster_names() else None)
    cluster = cluster or (load_cluster(stated) if stated else None)
    graphs = (replace(g, problem=contended(g.problem, costs.contention, cluster, g.dag.graph["group_ranks"])) for g in source.graphs)
    return replace(source, graphs=tuple(graphs))


def _group_ranks(capture: "Capture") -> dict[str, tuple[int, ...]]:
    """Return the process ranks of every group; of one that is known by size only, that many from 0 on, as cost models take it to be."""
    ranks = {name: tuple(range(size)) for name, size in capture.group_sizes.items()}
    return ranks | {name: known for name, known in capture.group_ranks.items() if known}


def _from_graph_files(source: Opened, costs: CostChoice, chosen: ReadCosts, direction: str) -> LoadedSource:
    dags = source.dags if chosen.measured is None else tuple(repriced(dag, chosen.measured, chosen.cluster) for dag in source.dags)
    clusters = {dag.graph["cluster"] for dag in dags}
    name = next(iter(clusters)) if len(clusters) == 1 else ", ".join(sorted(clusters))
    if costs.collectives:
        raise InputError(f"--collectives cannot change {source.label}: a graph file holds its costs; capture it again with the table")
    if not costs.fused:
        raise InputError(f"--unfused cannot change {source.label}: a graph file holds its costs; capture it again with --unfused")
    if costs.cluster is not None and load_cluster(costs.cluster).name != name:
        raise InputError(f"--cluster cannot change {source.label}: its costs are those of {name!r}; capture it again for {costs.cluster!r}")
    stated = costs.cluster or (name if name in cluster_names() else None)
    memory_bytes = load_cluster(stated).device.memory_bytes if stated else None
    wanted = _in_direction(tuple(dag.graph["name"] for dag in dags), direction, source.label)
    graphs = tuple(
        LoadedGraph(dag=dag, problem=build_problem(dag), device_memory_bytes=memory_bytes, seconds={"capture": 0.0, "export": 0.0})
        for dag in dags
        if dag.graph["name"] in wanted
    )
    return LoadedSource(label=source.label, slug=source.slug, cluster=name, graphs=graphs)


def _in_direction(names: tuple[str, ...], direction: str, source: str) -> tuple[str, ...]:
    if direction == "both":
        return names
    if direction not in names:
        raise InputError(f"{source}: expected a {direction} graph, found {', '.join(names)}; choose --direction both")
    return (direction,)
