"""``apsched capture``: a SOURCE to graph files, which are solved without torch."""

import argparse
import json
from pathlib import Path
from typing import TextIO

from apsched.artifacts.output_dir import check_writable, write_files
from apsched.cli.options import cost_choice, direction, source_request
from apsched.errors import InputError
from apsched.pipeline.load import loaded
from apsched.pipeline.sources import member_path
from apsched.progress import Progress
from apsched.quantities import show_bytes


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Write a graph file for each graph of the source."""
    from apsched.graph.graph_file import to_bytes

    path = Path(args.out)
    if path.is_dir() or path.name in ("", ".", ".."):
        raise InputError(
            "-o: expected the name of a graph file such as step.graph; found the directory"
            f" {args.out!r}"
        )
    if path.suffix == ".py":
        raise InputError(
            f"-o: expected the name of a graph file such as step.graph; found {args.out!r}, which"
            " would be read as Python"
        )
    request, costs, wanted = source_request(args), cost_choice(args), direction(args)
    check_writable(path.parent)
    with loaded(request, costs, wanted, Progress()) as source:
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
        report: dict[str, object] = {
            "schema": 1,
            "source": args.source,
            "cluster": source.cluster,
            "graphs": graphs,
        }
        if saved is not None:
            report["saved_bytes"] = {"tagged": saved.tagged, "untagged": saved.untagged}
        print(json.dumps(report), file=stdout)
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
