"""``apsched explain``: what the step time rests on and what one more would buy; or why no schedule
fits.
"""

import argparse
import json
from typing import Any, TextIO

from apsched.cli.options import cost_choice, direction, plan_choice, search_choice, source_request
from apsched.cli.output import refuse_infeasible
from apsched.config import SolveOptions
from apsched.costs.clusters.cluster import Cluster, cluster_names, load_cluster
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import LoadedGraph, loaded
from apsched.pipeline.result import Result
from apsched.pipeline.steps import resolve_caps, solve_graph, under_plan
from apsched.problem.faster_network import FasterNetwork, faster_network
from apsched.progress import Progress
from apsched.report.explanation import binding_json, print_binding, print_infeasible
from apsched.report.summary import console, graph_json
from apsched.what_if.one_more import Relaxed, relaxed


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Solve every graph, and again with one more of each thing; nothing is rewritten, nothing is
    written.
    """
    request, costs, wanted, choice = (
        source_request(args),
        cost_choice(args),
        direction(args),
        search_choice(args),
    )
    plan = plan_choice(args)
    progress = Progress()
    results: list[Result] = []
    bought: list[tuple[Relaxed, ...]] = []
    with loaded(request, costs, wanted, progress) as source:
        for graph in under_plan(source.graphs, plan, bitwise=args.bitwise):
            caps = resolve_caps(graph, choice.caps, choice.memory_cap, progress, choice.options)
            result = solve_graph(graph, caps, choice.options, progress)
            results.append(result)
            bought.append(
                _one_more(graph, result, costs, choice.options, progress) if result.best else ()
            )
    if args.json:
        graphs = [_json(result, more) for result, more in zip(results, bought, strict=True)]
        print(
            json.dumps(
                {"schema": 1, "source": args.source, "cluster": source.cluster, "graphs": graphs}
            ),
            file=stdout,
        )
    else:
        out = console(stdout)
        for k, (result, more) in enumerate(zip(results, bought, strict=True)):
            if k:
                out.print()
            if result.answer.infeasibility is not None:
                print_infeasible(out, result.problem.name, result.answer.infeasibility)
            else:
                print_binding(out, result, more)
    refuse_infeasible(
        results, source=args.source, cluster=source.cluster, stdout=stdout, as_json=False
    )


def _one_more(
    graph: LoadedGraph, result: Result, costs: CostChoice, options: SolveOptions, progress: Progress
) -> tuple[Relaxed, ...]:
    with progress.stage(f"one more of each {graph.problem.name}"):
        return relaxed(graph.problem, result.caps, options, result.answer, _network(graph, costs))


def _network(graph: LoadedGraph, costs: CostChoice) -> FasterNetwork | None:
    cluster = _cluster(graph, costs)
    return (
        faster_network(graph.problem, cluster, graph.dag.graph["group_ranks"]) if cluster else None
    )


def _cluster(graph: LoadedGraph, costs: CostChoice) -> Cluster | None:
    """Return the cluster that the costs stand for; ``None`` where a graph file names one that does
    not ship.
    """
    name = graph.dag.graph["cluster"]
    stated = costs.cluster or (name if name in cluster_names() else None)
    return load_cluster(stated) if stated else None


def _json(result: Result, more: tuple[Relaxed, ...]) -> dict[str, Any]:
    return {**graph_json(result), **(binding_json(result, more) if result.best else {})}
