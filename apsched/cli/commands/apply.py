"""``apsched apply``: replay schedule files on the graphs they belong to."""

import argparse
from dataclasses import replace
from typing import Any, TextIO

from apsched.cli.arguments import (
    add_groups,
    add_json,
    add_option,
    add_out,
    add_source,
    add_verb,
)
from apsched.cli.requests import check_out_dir, cost_choice, direction, out_dir, source_request
from apsched.errors import InputError


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "apply",
        "apply schedule files to the graphs of a source, and check the result",
        run,
    )
    add_source(parser)
    add_groups(parser, "costs")
    add_json(parser)
    add_groups(parser, "contention")
    add_option(
        parser,
        "--keep",
        "WHICH",
        "parameters kept from forward to backward: none, all or a file, as for `apsched solve`"
        " (default: those of the answer, in result.json or kept.txt next to its schedules)",
    )
    parser.add_argument(
        "schedules",
        metavar="SCHEDULE",
        nargs="+",
        help="schedule files that `apsched solve` wrote, one a graph",
    )
    add_out(parser, "DIR", "directory for the rewritten modules (default: apsched-out/SOURCE-MESH)")


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Check each schedule against its graph and caps, write it back, check the round trip, and save
    the rewritten modules.
    """
    from apsched.artifacts.kept_choice import kept_for
    from apsched.artifacts.output_dir import write_files
    from apsched.artifacts.schedule_file import load_schedule
    from apsched.artifacts.solved_files import apply_one, graph_of
    from apsched.pipeline.load import loaded
    from apsched.progress import Progress
    from apsched.report.console import console, print_json
    from apsched.report.summary import print_files
    from apsched.whole_step.keep_request import (
        AUTO,
        keep_request,
        of_direction,
        of_one_micro_batch,
    )
    from apsched.whole_step.solve import graphs_with

    where = source_request(args), cost_choice(args), direction(args)
    check_out_dir(args)
    keep = (
        kept_for(args.source, args.schedules, "--keep")
        if args.keep is None
        else keep_request(args.keep)
    )
    of_one_micro_batch(keep, "--keep")
    if keep.mode == AUTO:
        raise InputError(
            "--keep: expected the file of kept parameters (kept.txt, next to the schedules), all or"
            " none; found auto, which solves again"
        )
    of_direction(keep, where[-1])
    schedules = [load_schedule(path) for path in args.schedules]
    progress = Progress()
    files: dict[str, bytes] = {}
    with loaded(*where, progress) as source:
        source = replace(source, graphs=graphs_with(source.graphs, keep))
        applied = [apply_one(graph_of(file, source), file, files, progress) for file in schedules]
        if len({entry["name"] for entry in applied}) < len(applied):
            raise InputError(
                "expected one schedule file for each graph, found two for the same one"
            )
    written = write_files(out_dir(args, source.slug), files) if files else ()
    if args.json:
        print_json(stdout, source=args.source, cluster=source.cluster, graphs=applied)
        return
    out = console(stdout)
    for entry in applied:
        out.print(_line(entry), markup=False)
    if written:
        print_files(written, stdout)


def _line(entry: dict[str, Any]) -> str:
    """Return the figures of one graph."""
    from apsched.quantities import show_bytes, show_us

    trip = (
        "round trip exact" if entry["round_trip_exact"] else "a graph file: nothing was rewritten"
    )
    return (
        f"{entry['name']}: step time {show_us(entry['step_time_us'])}, peak"
        f" {show_bytes(entry['peak_memory_bytes'])}, {entry['num_launches']} collectives; {trip}"
    )
