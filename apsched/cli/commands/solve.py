"""``apsched solve``: the whole line, from a SOURCE to files that were checked."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from apsched.artifacts.output_dir import check_writable, write_or_rescue
from apsched.artifacts.schedule_file import dump_schedule
from apsched.artifacts.stated_options import stated_options
from apsched.cli.options import (
    cost_choice,
    direction,
    milp_choice,
    out_dir,
    plan_choice,
    scenario_choice,
    search_choice,
    source_request,
    with_buckets,
)
from apsched.cli.output import refuse_infeasible
from apsched.errors import ApschedError, RoundTripError
from apsched.pipeline.load import LoadedGraph, loaded
from apsched.pipeline.result import Result
from apsched.pipeline.steps import (
    check_round_trip,
    resolve_caps,
    rewrite,
    solve_graph,
    under_plan,
    with_round_trip,
    with_torch_schedulers,
)
from apsched.progress import Progress
from apsched.report.summary import console, metrics_lines, print_table, report_json, summary_lines


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Solve every graph of the source; write schedules, graphs, rewritten modules and the
    result.
    """
    request, costs, wanted, choice = (
        source_request(args),
        cost_choice(args),
        direction(args),
        search_choice(args),
    )
    milp, asked = milp_choice(args), scenario_choice(args)
    check_writable(out_dir(args, "."))
    progress = Progress()
    plan = plan_choice(args)
    with loaded(request, costs, wanted, progress) as source:
        graphs = under_plan(
            source.graphs, with_buckets(plan, args.buckets, source.graphs), bitwise=args.bitwise
        )
        target = out_dir(args, source.slug)
        check_writable(target)
        results = [
            solve_graph(
                graph,
                resolve_caps(graph, choice.caps, choice.memory_cap, progress, choice.options),
                choice.options,
                progress,
                milp=milp,
                asked=asked,
                second_group=args.second_group,
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
        files: dict[str, bytes] = {}
        lost: list[Exception] = []
        for k, graph in enumerate(graphs):
            results[k] = finish_graph(graph, results[k], files, lost, progress)
    report = report_json(args.source, source.cluster, results, stated_options(vars(args)))
    files["result.json"] = (json.dumps(report, indent=1) + "\n").encode()
    written, unwritten = write_or_rescue(target, files)
    if args.json:
        print(json.dumps(report), file=stdout)
    else:
        rewritten = all(graph.captured is not None for graph in graphs)
        print_report(
            results, written, source.notes, stdout, metrics=args.metrics, rewritten=rewritten
        )
    if lost or unwritten:
        wrong = [*map(str, lost), *([unwritten] if unwritten else [])]
        untrue = not unwritten and all(isinstance(error, RoundTripError) for error in lost)
        kind = RoundTripError if untrue else ApschedError
        raise kind("; ".join(wrong)) from (lost[0] if lost else None)


def finish_graph(
    graph: LoadedGraph,
    result: Result,
    files: dict[str, bytes],
    lost: list[Exception],
    progress: Progress,
) -> Result:
    """Write the schedule back where there is an FX graph, check the round trip, and add the graph's
    files to ``files``.

    Where the rewritten module cannot be made, or is not what was claimed, the error is added to
    ``lost``: graph and schedule are written all the same.
    """
    from apsched.graph.graph_file import to_bytes

    name = graph.problem.name
    files[f"{name}.graph"] = to_bytes(graph.dag)
    files[f"{name}.schedule.json"] = dump_schedule(result)
    if graph.captured is None:
        return result
    from apsched.artifacts.module_file import dump_module

    assert result.best is not None
    try:
        rewritten = rewrite(replace(graph, problem=result.problem), result.best, progress)
        result = with_round_trip(result, rewritten)
        check_round_trip(name, rewritten)
        files[f"{name}.py"] = dump_module(rewritten.module, name)
    except RoundTripError as error:
        lost.append(error)
    except Exception as error:  # whatever it is, the answer is found, and its schedule is a file
        lost.append(_lost_module(name, error))
    return result


def _lost_module(name: str, error: Exception) -> ApschedError:
    """Return what to say of a rewritten module that could not be made."""
    cause = (
        str(error)
        if isinstance(error, ApschedError)
        else f"unexpected {type(error).__name__}: {error} (a bug of apsched)"
    )
    lost = ApschedError(
        f"{name}.py: the rewritten module cannot be written: {cause}; the schedule is in"
        f" {name}.schedule.json"
    )
    lost.__cause__ = error
    return lost


def print_report(
    results: Sequence[Result],
    written: Sequence[Path],
    notes: Sequence[str],
    stdout: TextIO,
    *,
    metrics: bool,
    rewritten: bool,
) -> None:
    """Print the table, what was found (with ``metrics`` by direction, group and kind, too), and
    where the files went.

    ``rewritten``: the source had FX graphs.
    """
    print_table(results, stdout)
    out = console(stdout)
    out.print()
    for result in results:
        for line in (*summary_lines(result), *(metrics_lines(result) if metrics else ())):
            out.print(line, markup=False)
    if not rewritten:
        out.print(
            "solved from a graph file: nothing was rewritten (solve the source itself, or `apsched"
            " apply` the schedule to it)"
        )
    for note in (*notes, *(note for result in results for note in result.notes)):
        out.print(f"note: {note}", markup=False)
    print_files(written, stdout)


def print_files(written: Sequence[Path], stdout: TextIO) -> None:
    """Print where files went, all to one directory."""
    if not written:
        return
    console(stdout).print(
        f"files in {written[0].parent}: {', '.join(path.name for path in written)}", markup=False
    )
