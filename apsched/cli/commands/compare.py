"""``apsched compare``: every baseline beside the solver."""

import argparse
from functools import partial
from typing import Any, TextIO

from apsched.cli.arguments import add_groups, add_inductor, add_json, add_source, add_verb
from apsched.cli.output import refuse_infeasible
from apsched.cli.requests import (
    cost_choice,
    direction,
    request_with_buckets,
    solve_request,
    source_request,
)


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "compare", "compare the solver with every baseline", run)
    add_source(parser)
    add_groups(parser, "costs")
    add_json(parser)
    add_groups(parser, "caps", "device memory", "search", "compute")
    add_groups(parser, "contention", "scenarios", "plan", "buckets")
    add_groups(parser, "process groups")
    add_inductor(parser, default=True)


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Score baselines and solver on every graph; nothing is rewritten, nothing is written."""
    from contextlib import ExitStack

    from apsched.pipeline.compile_ahead import begin_to_compile
    from apsched.pipeline.load import loaded
    from apsched.pipeline.solve_graph import solve_each, under_plan
    from apsched.pipeline.steps import with_compute_as_captured, with_torch_schedulers
    from apsched.pipeline.what_fits import what_fits
    from apsched.progress import Progress
    from apsched.report.console import console, print_json
    from apsched.report.summary import print_notes, print_table, report_json, summary_lines
    from apsched.whole_step.faster_reduction import with_faster_reduction

    where = source_request(args), cost_choice(args), direction(args)
    request = solve_request(args)
    progress = Progress()
    begin_to_compile(progress)
    own_buckets = partial(request_with_buckets, args.buckets)
    where, _ = with_faster_reduction(where, request, progress, own_buckets)
    with ExitStack() as opened:
        source = opened.enter_context(loaded(*where, progress))
        request = own_buckets(request, source.graphs)
        graphs = under_plan(source.graphs, request)
        results = [*solve_each(graphs, request, progress)]
        if any(result.best is None for result in results):
            opened.close()  # its process groups end, before others are captured
            refuse_infeasible(
                results,
                source=args.source,
                cluster=source.cluster,
                stdout=stdout,
                as_json=args.json,
                trials=what_fits(*where, request, results, progress),
            )
        if args.inductor:
            results = [
                with_torch_schedulers(*pair, progress) for pair in zip(graphs, results, strict=True)
            ]
        results = [
            with_compute_as_captured(*pair, request.options, progress)
            for pair in zip(graphs, results, strict=True)
        ]
    if args.json:
        print_json(stdout, **report_json(args.source, source.cluster, results))
        return
    print_table(results, stdout, ratio=True)
    out = console(stdout)
    out.print()
    for result in results:
        for line in summary_lines(result):
            out.print(line, markup=False)
    print_notes(source.notes, results, stdout)
