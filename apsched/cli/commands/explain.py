"""``apsched explain``: the causes of the step time and the gain from one more of each thing; or the
reason why no schedule fits.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from apsched.cli.arguments import add_groups, add_json, add_source, add_verb
from apsched.cli.options import cost_choice, direction, solve_request, source_request
from apsched.cli.output import refuse_infeasible

if TYPE_CHECKING:
    from apsched.pipeline.cost_choice import CostChoice
    from apsched.pipeline.load import LoadedGraph
    from apsched.pipeline.result import Result
    from apsched.pipeline.solve_graph import SolveRequest
    from apsched.progress import Progress
    from apsched.what_if.one_more import Relaxed
    from apsched.whole_step.keep_request import KeepRequest
    from apsched.whole_step.one_more import MoreMemory
    from apsched.whole_step.search import StepAnswer


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
    add_groups(parser, "whole step")


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Solve every graph, and again with one more of each thing; nothing is rewritten, nothing is
    written.
    """
    from apsched.pipeline.compile_ahead import begin_to_compile
    from apsched.pipeline.load import loaded
    from apsched.pipeline.solve_graph import under_plan
    from apsched.progress import Progress
    from apsched.report.answer.whole_step import keep_json, more_memory_json
    from apsched.report.explanation import binding_json
    from apsched.report.summary import graph_json
    from apsched.report.table import print_json
    from apsched.whole_step.keep_request import keep_request, kept_in_joint_graph, stated_choice
    from apsched.whole_step.solve import step_apart

    wanted, costs, which = source_request(args), cost_choice(args), direction(args)
    request = solve_request(args)
    keep = keep_request(args.keep)
    progress = Progress()
    begin_to_compile(progress)
    apart = step_apart(wanted, costs, which, request, keep, progress)
    if apart is not None:
        keep = stated_choice(apart.best.kept)
    keep, kept = kept_in_joint_graph(keep, which)
    with loaded(wanted, costs, which, progress, kept=kept) as source:
        posed = under_plan(source.graphs, request)
        graphs, results, step, more = _solved(posed, request, keep, progress)
        found = [
            (result, _relaxed(graph, result, costs, request, progress) if result.best else ())
            for graph, result in zip(graphs, results, strict=True)
        ]
    if args.json:
        says = [
            {**graph_json(result), **(binding_json(result, ones) if result.best else {})}
            for result, ones in found
        ]
        of_step: dict[str, Any] = {}
        if step is not None:
            of_step["keep"] = keep_json(step)
        if more is not None:
            of_step["keep"]["one_more"] = more_memory_json(more)
        if apart is not None:
            of_step["keep_apart"] = keep_json(apart)
        print_json(stdout, source=args.source, cluster=source.cluster, graphs=says, **of_step)
    else:
        _print(found, (step, apart), more, stdout)
    refuse_infeasible(
        results, source=args.source, cluster=source.cluster, stdout=stdout, as_json=False
    )


def _solved(
    graphs: "Sequence[LoadedGraph]",
    request: "SolveRequest",
    keep: "KeepRequest",
    progress: "Progress",
) -> "tuple[Sequence[LoadedGraph], Sequence[Result], StepAnswer | None, MoreMemory | None]":
    """Return graphs and answers; of a step of which parameters are kept also its answer, and that
    with more memory where the choice is free and there is a cap.
    """
    from apsched.pipeline.solve_graph import solve_graph
    from apsched.whole_step.choices import NONE
    from apsched.whole_step.keep_request import AUTO
    from apsched.whole_step.one_more import with_more_memory
    from apsched.whole_step.pair import Step
    from apsched.whole_step.search import solve_choice

    if keep.mode == NONE:
        return graphs, [solve_graph(graph, request, progress) for graph in graphs], None, None
    step = Step.of(graphs, request, progress)
    answer = solve_choice(step, keep)
    more = None
    if keep.mode == AUTO and answer.best.fits and answer.cap_bytes is not None:
        with progress.stage("one more of memory for the step"):
            more = with_more_memory(step, answer)
    return answer.best.graphs, answer.best.results, answer, more


def _relaxed(
    graph: "LoadedGraph",
    result: "Result",
    costs: "CostChoice",
    request: "SolveRequest",
    progress: "Progress",
) -> "tuple[Relaxed, ...]":
    """Return the gain of ``graph``, whose answer is ``result``, from one more of each thing."""
    from apsched.pipeline.cost_choice import cluster_named
    from apsched.problem.faster_network import faster_network
    from apsched.what_if.one_more import relaxed

    cluster = cluster_named(costs, graph.dag.graph["cluster"])
    ranks = graph.dag.graph["group_ranks"]
    with progress.stage(f"one more of each {graph.problem.name}"):
        network = faster_network(graph.problem, cluster, ranks) if cluster else None
        return relaxed(graph.problem, result.caps, request.options, result.answer, network)


def _print(
    found: "Sequence[tuple[Result, tuple[Relaxed, ...]]]",
    steps: "tuple[StepAnswer | None, StepAnswer | None]",
    more: "MoreMemory | None",
    stdout: TextIO,
) -> None:
    """Print the explanations; ``steps`` are the answer for forward and backward as one step, and
    that whose choice a joint graph makes.
    """
    from apsched.report.answer.whole_step import APART, kept_lines, more_memory_lines
    from apsched.report.explanation import print_binding, print_infeasible
    from apsched.report.table import console

    out = console(stdout)
    step, apart = steps
    lines = () if step is None else kept_lines(step)
    if apart is not None:
        lines = (APART, *kept_lines(apart))
    if more is not None:
        lines = (*lines, *(f"  {line}" for line in more_memory_lines(more)))
    for line in lines:
        out.print(line, markup=False)
    for k, (result, ones) in enumerate(found):
        if k or lines:
            out.print()
        if result.answer.infeasibility is not None:
            print_infeasible(out, result.problem.name, result.answer.infeasibility)
        else:
            print_binding(out, result, ones)
