"""``apsched explain``: what the step time rests on and what one more would buy; or why no schedule
fits.
"""

import argparse
from typing import Any, TextIO

from apsched.cli.arguments import add_groups, add_json, add_source, add_verb
from apsched.cli.options import cost_choice, direction, solve_request, source_request
from apsched.cli.output import refuse_infeasible


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "explain",
        "show the shares of the critical path and the gain from relaxing each cap, or why no"
        " schedule fits",
        run,
    )
    add_source(parser)
    add_groups(parser, "costs")
    add_json(parser)
    add_groups(parser, "caps", "device memory", "search", "compute", "contention", "plan")


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Solve every graph, and again with one more of each thing; nothing is rewritten, nothing is
    written.
    """
    from apsched.pipeline.compile_ahead import begin_to_compile
    from apsched.pipeline.cost_choice import cluster_named
    from apsched.pipeline.load import loaded
    from apsched.pipeline.result import Result
    from apsched.pipeline.solve_graph import solve_graph, under_plan
    from apsched.problem.faster_network import faster_network
    from apsched.progress import Progress
    from apsched.report.explanation import binding_json, print_binding, print_infeasible
    from apsched.report.summary import graph_json
    from apsched.report.table import console, print_json
    from apsched.what_if.one_more import Relaxed, relaxed

    wanted, costs, which = source_request(args), cost_choice(args), direction(args)
    request = solve_request(args)
    progress = Progress()
    begin_to_compile(progress)
    found: list[tuple[Result, tuple[Relaxed, ...]]] = []
    with loaded(wanted, costs, which, progress) as source:
        for graph in under_plan(source.graphs, request):
            problem, result = graph.problem, solve_graph(graph, request, progress)
            if result.best is None:
                found.append((result, ()))
                continue
            cluster = cluster_named(costs, graph.dag.graph["cluster"])
            ranks = graph.dag.graph["group_ranks"]
            with progress.stage(f"one more of each {problem.name}"):
                network = faster_network(problem, cluster, ranks) if cluster else None
                more = relaxed(problem, result.caps, request.options, result.answer, network)
            found.append((result, more))
    results = [result for result, _ in found]
    if args.json:
        graphs = [
            {**graph_json(result), **(binding_json(result, more) if result.best else {})}
            for result, more in found
        ]
        print_json(stdout, source=args.source, cluster=source.cluster, graphs=graphs)
    else:
        out = console(stdout)
        for k, (result, more) in enumerate(found):
            if k:
                out.print()
            if result.answer.infeasibility is not None:
                print_infeasible(out, result.problem.name, result.answer.infeasibility)
            else:
                print_binding(out, result, more)
    refuse_infeasible(
        results, source=args.source, cluster=source.cluster, stdout=stdout, as_json=False
    )
