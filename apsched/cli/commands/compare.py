"""``apsched compare``: every baseline beside the solver."""

import argparse
import json
from typing import TextIO

from apsched.cli.options import (
    cost_choice,
    direction,
    plan_choice,
    scenario_choice,
    search_choice,
    source_request,
    with_buckets,
)
from apsched.cli.output import refuse_infeasible
from apsched.pipeline.load import loaded
from apsched.pipeline.steps import resolve_caps, solve_graph, under_plan, with_torch_schedulers
from apsched.pipeline.without_moves import with_compute_as_captured
from apsched.progress import Progress
from apsched.report.summary import console, print_table, report_json, summary_lines


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Score baselines and solver on every graph; nothing is rewritten, nothing is written."""
    request, costs, wanted, choice = (
        source_request(args),
        cost_choice(args),
        direction(args),
        search_choice(args),
    )
    progress = Progress()
    plan, asked = plan_choice(args), scenario_choice(args)
    with loaded(request, costs, wanted, progress) as source:
        graphs = under_plan(
            source.graphs, with_buckets(plan, args.buckets, source.graphs), bitwise=args.bitwise
        )
        results = [
            solve_graph(
                graph,
                resolve_caps(graph, choice.caps, choice.memory_cap, progress, choice.options),
                choice.options,
                progress,
                asked=asked,
            )
            for graph in graphs
        ]
        refuse_infeasible(
            results, source=args.source, cluster=source.cluster, stdout=stdout, as_json=args.json
        )
        if args.inductor:
            results = [
                with_torch_schedulers(*pair, progress) for pair in zip(graphs, results, strict=True)
            ]
        results = [
            with_compute_as_captured(*pair, choice.options, progress)
            for pair in zip(graphs, results, strict=True)
        ]
    if args.json:
        print(json.dumps(report_json(args.source, source.cluster, results)), file=stdout)
        return
    print_table(results, stdout, ratio=True)
    out = console(stdout)
    out.print()
    for result in results:
        for line in summary_lines(result):
            out.print(line, markup=False)
    for note in (*source.notes, *(note for result in results for note in result.notes)):
        out.print(f"note: {note}", markup=False)
