"""``apsched audit``: score the order of a graph, or any schedule file, and rank the changes that
would help most.
"""

import argparse
from dataclasses import asdict
from typing import Any, TextIO

from apsched.cli.arguments import add_groups, add_json, add_option, add_source, add_verb
from apsched.cli.requests import cost_choice, direction, solve_request, source_request


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "audit",
        "score the order of the graphs, or a schedule file, against the proven bound: exposed"
        " collectives, and the changes that would help",
        run,
    )
    add_source(parser)
    add_groups(parser, "costs")
    add_json(parser)
    add_groups(parser, "caps", "device memory", "search", "compute", "contention")
    text = (
        "score this schedule file instead of the order as captured; any author; once for each graph"
    )
    add_option(parser, "--schedule", "FILE", text, several=True)
    parser.add_argument(
        "--what-if-chunked",
        action="store_true",
        help=(
            "also the bound if collectives on the path, and the matrix products around them, were"
            " split in two: the most that asynchronous tensor parallelism can gain"
        ),
    )


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Score the captured order of every graph, or a given schedule, against the bound that the
    solver proves.
    """
    from apsched.artifacts.kept_choice import kept_for
    from apsched.artifacts.schedule_file import load_schedule
    from apsched.pipeline.load import loaded
    from apsched.pipeline.solve_graph import solve_graph
    from apsched.progress import Progress
    from apsched.report.audit import (
        audit_json,
        audit_lines,
        audited,
        check_used,
        file_of,
        with_groups_of,
    )
    from apsched.report.console import console, print_json
    from apsched.report.summary import graph_json, print_notes, print_table
    from apsched.what_if.chunked import line, what_if_chunked
    from apsched.whole_step.keep_request import of_direction, of_one_micro_batch
    from apsched.whole_step.solve import graphs_with

    where = source_request(args), cost_choice(args), direction(args)
    request = solve_request(args)
    files = [load_schedule(path) for path in args.schedule]
    keep = of_one_micro_batch(kept_for(args.source, args.schedule, "--schedule"), "--schedule")
    of_direction(keep, where[-1], "--schedule")
    progress = Progress()
    with loaded(*where, progress) as source:
        made = graphs_with(source.graphs, keep)
        check_used(files, [graph.problem for graph in made])
        graphs = [
            with_groups_of(graph, files)
            for graph in made
            if not files or file_of(graph.problem, files) is not None
        ]
        results = [solve_graph(graph, request, progress) for graph in graphs]
        pairs = zip(graphs, results, strict=True) if args.what_if_chunked else ()
        chunked = [
            what_if_chunked(graph.dag, graph.problem, result.caps) for graph, result in pairs
        ]
    audits = [audited(result, files, progress) for result in results]
    if args.json:
        found = [{**audit_json(audit), "graph": graph_json(audit.result)} for audit in audits]
        for graph, parts in zip(found, chunked, strict=False):
            graph["what_if_chunked"] = asdict(parts)
        print_json(stdout, source=args.source, cluster=source.cluster, audit=found)
        return
    print_table(results, stdout, rows=[(audit.now,) for audit in audits])
    out = console(stdout)
    out.print()
    for audit in audits:
        for text in audit_lines(audit):
            out.print(text, markup=False)
    for result, parts in zip(results, chunked, strict=False):
        out.print(line(result.problem.name, parts), markup=False)
    print_notes(source.notes, results, stdout)
