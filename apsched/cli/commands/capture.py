"""``apsched capture``: a SOURCE to graph files, which are solved without torch."""

import argparse
from pathlib import Path
from typing import Any, TextIO

from apsched.cli.arguments import add_groups, add_json, add_out, add_source, add_verb
from apsched.cli.requests import cost_choice, direction, source_request
from apsched.errors import InputError
from apsched.quantities import show_bytes


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs, "capture", "export a source to graph files, which are solved without torch", run
    )
    add_source(parser)
    parser.add_argument(
        "--saved-bytes",
        action="store_true",
        help=(
            "also print the bytes that forward saves for backward, and the bytes without tags on"
            " gathers of parameters and the nodes that follow them"
        ),
    )
    add_groups(parser, "costs")
    add_json(parser)
    add_out(
        parser,
        "FILE",
        "graph file; of several graphs each gets its name before the suffix (step.forward.graph)",
        required=True,
    )


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Write a graph file for each graph of the source."""
    from apsched.artifacts.output_dir import check_writable, write_files
    from apsched.graph.graph_file import to_bytes
    from apsched.pipeline.load import loaded_at
    from apsched.pipeline.sources import member_path
    from apsched.progress import Progress
    from apsched.report.console import print_json
    from apsched.report.summary import print_notes

    path = _graph_path(args.out)
    request, costs = source_request(args), cost_choice(args)
    check_writable(path.parent)
    # a graph file holds no contention, so there is no note about it
    with loaded_at(request, (costs,), direction(args), Progress()) as (source,):
        alone = len(source.graphs) == 1
        names = [
            path.name if alone else member_path(path, graph.problem.name).name
            for graph in source.graphs
        ]
        files = {
            name: to_bytes(graph.dag) for name, graph in zip(names, source.graphs, strict=True)
        }
    saved = source.saved_bytes
    written = write_files(path.parent, files)
    graphs = [
        {
            "name": graph.problem.name,
            "graph_hash": graph.problem.graph_hash,
            "num_nodes": graph.problem.num_nodes,
            "num_collectives": len(graph.problem.collectives),
            "file": str(file),
        }
        for graph, file in zip(source.graphs, written, strict=True)
    ]
    if args.json:
        bytes_saved = {"tagged": saved.tagged, "untagged": saved.untagged} if saved else None
        print_json(
            stdout,
            source=args.source,
            cluster=source.cluster,
            graphs=graphs,
            **({"saved_bytes": bytes_saved} if saved is not None else {}),
        )
        return
    for graph in graphs:
        print(
            f"{graph['name']}: {graph['num_nodes']} nodes, {graph['num_collectives']} collectives"
            f" -> {graph['file']}",
            file=stdout,
        )
    if saved is not None:
        print(
            f"saved for backward: {show_bytes(saved.tagged)}; without tags on gathers of parameters"
            f" {show_bytes(saved.untagged)}",
            file=stdout,
        )
    print_notes(source.notes, (), stdout)


def _graph_path(out: str) -> Path:
    """Return the path of the graph files; InputError where it is a directory or Python."""
    path = Path(out)
    if path.is_dir() or path.name in ("", ".", ".."):
        raise InputError(
            f"-o: expected the name of a graph file such as step.graph; found the directory {out!r}"
        )
    if path.suffix == ".py":
        raise InputError(
            f"-o: expected the name of a graph file such as step.graph; found {out!r}, which"
            " would be read as Python"
        )
    return path
