"""``apsched apply``: replay schedule files on the graphs they belong to."""

import argparse
import json
from dataclasses import replace
from typing import Any, TextIO

from apsched.artifacts.output_dir import check_writable, write_files
from apsched.artifacts.replay import replay
from apsched.artifacts.schedule_file import ScheduleFile, load_schedule
from apsched.cli.commands.solve import print_files
from apsched.cli.options import cost_choice, direction, out_dir, source_request
from apsched.errors import InputError
from apsched.pipeline.load import LoadedGraph, LoadedSource, loaded
from apsched.pipeline.steps import check_round_trip, rewrite
from apsched.progress import Progress
from apsched.report.summary import console
from apsched.units import ticks_to_us


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Check each schedule against its graph and caps, write it back, check the round trip, and save
    the rewritten modules.
    """
    request, costs, wanted = source_request(args), cost_choice(args), direction(args)
    schedules = [load_schedule(path) for path in args.schedules]
    check_writable(out_dir(args, "."))
    progress = Progress()
    files: dict[str, bytes] = {}
    with loaded(request, costs, wanted, progress) as source:
        applied = [apply_one(_graph_of(file, source), file, files, progress) for file in schedules]
        if len({entry["name"] for entry in applied}) < len(applied):
            raise InputError(
                "expected one schedule file for each graph, found two for the same one"
            )
    written = write_files(out_dir(args, source.slug), files) if files else ()
    if args.json:
        print(
            json.dumps(
                {"schema": 1, "source": args.source, "cluster": source.cluster, "graphs": applied}
            ),
            file=stdout,
        )
        return
    out = console(stdout)
    for entry in applied:
        trip = (
            "round trip exact"
            if entry["round_trip_exact"]
            else "a graph file: nothing was rewritten"
        )
        out.print(
            f"{entry['name']}: step time {entry['step_time_us'] / 1000:,.3f} ms, peak"
            f" {entry['peak_memory_bytes'] / 2**30:.2f} GiB, {entry['num_launches']} collectives;"
            f" {trip}",
            markup=False,
        )
    if written:
        print_files(written, stdout)


def apply_one(
    graph: LoadedGraph, file: ScheduleFile, files: dict[str, bytes], progress: Progress
) -> dict[str, Any]:
    """Replay ``file`` on ``graph``; adds the rewritten module to ``files`` and returns the figures.

    ``RoundTripError`` where the rewritten module is not what was claimed.
    """
    graph = replace(graph, problem=file.problem_of(graph.problem))
    scored = replay(graph.problem, file)
    exact = None
    if graph.captured is not None:
        from apsched.artifacts.module_file import dump_module

        rewritten = rewrite(graph, scored, progress)
        check_round_trip(graph.problem.name, rewritten)
        exact = True
        files[f"{graph.problem.name}.py"] = dump_module(rewritten.module, graph.problem.name)
    return {
        "name": graph.problem.name,
        "graph_hash": graph.problem.graph_hash,
        "schedule": file.path,
        "step_time_us": ticks_to_us(scored.step_time_ticks),
        "exposed_us": ticks_to_us(scored.exposed_ticks),
        "peak_memory_bytes": scored.peak_memory_bytes,
        "num_launches": scored.num_launches,
        "round_trip_exact": exact,
    }


def _graph_of(file: ScheduleFile, source: LoadedSource) -> LoadedGraph:
    """Return the graph that ``file`` was made for; by its hash, else by its name (then the replay
    says what differs).
    """
    by_hash = [graph for graph in source.graphs if graph.problem.graph_hash == file.graph["hash"]]
    by_name = [graph for graph in source.graphs if graph.problem.name == file.graph["name"]]
    return (by_hash or by_name or list(source.graphs))[0]
