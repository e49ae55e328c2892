"""``apsched explain``: the causes of the step time and the gain from one more of each thing; or the
reason why no schedule fits.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from apsched.cli.arguments import add_groups, add_json, add_source, add_verb
from apsched.cli.output import refuse_infeasible
from apsched.cli.requests import (
    cost_choice,
    direction,
    kept_parameters,
    micro_batches_in_a_row,
    solve_request,
    source_request,
)

if TYPE_CHECKING:
    from apsched.pipeline.cost_choice import CostChoice
    from apsched.pipeline.load import LoadedGraph
    from apsched.pipeline.result import Result
    from apsched.pipeline.solve_graph import SolveRequest
    from apsched.progress import Progress
    from apsched.what_if.one_more import Relaxed
    from apsched.whole_step.keep_request import KeepRequest
    from apsched.whole_step.one_more import MoreMemory
    from apsched.whole_step.solve import Answer, SolvedGraphs

_COLUMNS = 140
"""Of the longest line."""


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
    add_groups(parser, "whole step", "accumulation")


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Solve every graph, and again with one more of each thing; nothing is rewritten, nothing is
    written.
    """
    from apsched.pipeline.compile_ahead import begin_to_compile
    from apsched.pipeline.load import loaded
    from apsched.pipeline.solve_graph import under_plan
    from apsched.progress import Progress
    from apsched.report.console import print_json
    from apsched.report.explanation import binding_json
    from apsched.report.summary import graph_json
    from apsched.whole_step.faster_reduction import with_faster_reduction
    from apsched.whole_step.solve import solve_graphs

    where = source_request(args), cost_choice(args), direction(args)
    keep = kept_parameters(args, where[-1])
    request = solve_request(args, keep)
    num_micro_batches = micro_batches_in_a_row(args, where[-1])
    progress = Progress()
    begin_to_compile(progress)
    where, _ = with_faster_reduction(where, request, progress)
    with loaded(*where, progress) as source:
        posed = under_plan(source.graphs, request)
        solved = solve_graphs(posed, request, keep, progress, num_micro_batches)
        more = _more_memory(solved, keep, progress)
        found = [
            (result, _relaxed(graph, result, where[1], request, progress) if result.best else ())
            for graph, result in zip(solved.graphs, solved.results, strict=True)
        ]
    if args.json:
        says = [
            {**graph_json(result), **(binding_json(result, ones) if result.best else {})}
            for result, ones in found
        ]
        of_step = _step_json(solved.answer, more)
        print_json(stdout, source=args.source, cluster=source.cluster, graphs=says, **of_step)
    else:
        _print(found, _step_lines(solved.answer, more), source.notes, stdout)
    refuse_infeasible(
        solved.results, source=args.source, cluster=source.cluster, stdout=stdout, as_json=False
    )


def _more_memory(
    solved: "SolvedGraphs", keep: "KeepRequest", progress: "Progress"
) -> "MoreMemory | None":
    """Return the gain of the step from more memory, where its choice is free and there is a cap."""
    from apsched.whole_step.keep_request import AUTO
    from apsched.whole_step.one_more import with_more_memory

    step, answer = solved.step, solved.answer
    if keep.mode != AUTO or step is None or answer is None:
        return None
    if not answer.best.fits or answer.cap_bytes is None:
        return None
    with progress.stage("one more of memory for the step"):
        return with_more_memory(step, answer)


def _step_json(answer: "Answer | None", more: "MoreMemory | None") -> dict[str, Any]:
    """Return the step for ``--json``, if the graphs are one."""
    from apsched.report.answer.more_memory import more_memory_json
    from apsched.report.answer.step import step_entries

    entries = {} if answer is None else step_entries(answer)
    if more is not None:
        entries[next(iter(entries))]["one_more"] = more_memory_json(more)
    return entries


def _relaxed(
    graph: "LoadedGraph",
    result: "Result",
    costs: "CostChoice",
    request: "SolveRequest",
    progress: "Progress",
) -> "tuple[Relaxed, ...]":
    """Return the gain of ``graph``, whose answer is ``result``, from one more of each thing."""
    from apsched.pipeline.cost_choice import cluster_of_graphs
    from apsched.problem.faster_network import faster_network
    from apsched.what_if.one_more import relaxed

    cluster = cluster_of_graphs(costs.cluster, [graph.dag])
    ranks = graph.dag.graph["group_ranks"]
    with progress.stage(f"one more of each {graph.problem.name}"):
        network = faster_network(graph.problem, cluster, ranks) if cluster else None
        return relaxed(graph.problem, result.caps, request.options, result.answer, network)


def _print(
    found: "Sequence[tuple[Result, tuple[Relaxed, ...]]]",
    step_lines: "Sequence[str]",
    notes: "Sequence[str]",
    stdout: TextIO,
) -> None:
    """Print the explanations, behind those of the step, and the notes."""
    from apsched.report.console import console
    from apsched.report.explanation import print_binding, print_infeasible
    from apsched.report.summary import print_notes

    out = console(stdout)
    for line in step_lines:
        out.print(line, markup=False)
    for k, (result, ones) in enumerate(found):
        if k or step_lines:
            out.print()
        if result.answer.infeasibility is not None:
            print_infeasible(out, result.problem.name, result.answer.infeasibility)
        else:
            print_binding(out, result, ones)
    print_notes(notes, [result for result, _ in found], stdout, columns=_COLUMNS)


def _step_lines(answer: "Answer | None", more: "MoreMemory | None") -> list[str]:
    """Return the answer for the step as text."""
    from apsched.report.answer.more_memory import more_memory_lines
    from apsched.report.answer.step import step_lines

    lines = [] if answer is None else list(step_lines(answer))
    if more is not None:
        lines += (f"  {line}" for line in more_memory_lines(more))
    return lines
