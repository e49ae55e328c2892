"""``apsched calibrate``: costs from a profile of a job, or measured on this device, as a file for
``--costs``.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from apsched.cli.arguments import (
    SOURCE_HELP,
    add_groups,
    add_json,
    add_option,
    add_out,
    add_verb,
)
from apsched.cli.requests import direction, source_request
from apsched.errors import ApschedError, InputError

if TYPE_CHECKING:
    import networkx as nx
    import torch

    from apsched.calibrate.profile.trace import Trace
    from apsched.costs.clusters.cluster import Cluster
    from apsched.costs.measured import MeasuredCosts
    from apsched.pipeline.load import LoadedSource


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "calibrate",
        "read costs from a profile of a job, or measure them on this device, for `--costs`",
        run,
    )
    how = parser.add_argument_group("how (one of these)")
    text = (
        "trace of torch.profiler, with record_shapes=True and steps marked by prof.step();"
        " once for each process rank"
    )
    add_option(how, "--trace", "FILE", text, several=True)
    how.add_argument(
        "--measure",
        action="store_true",
        help="run the operators here; under torchrun the collectives, too",
    )
    how.add_argument(
        "--unfused",
        action="store_true",
        help="also run operators that Inductor would fuse, one by one, as eager and aot_eager do",
    )
    add_option(parser, "--graph", "SOURCE", SOURCE_HELP, dest="source", required=True)
    add_groups(parser, "source")
    add_json(parser)
    text = "cluster whose formulas price the rest (default: that of a graph file, else h100)"
    add_option(parser, "--cluster", "NAME", text)
    add_out(parser, "FILE", "file of costs, such as costs.toml", required=True)


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Write the costs, and print how well they predict the profile."""
    path = Path(args.out)
    if path.is_dir() or path.name in ("", ".", ".."):
        raise InputError(f"-o: expected the name of a file such as costs.toml; found {args.out!r}")
    if args.unfused and not args.measure:
        raise InputError("--unfused: it is an option of --measure; leave it out with --trace")
    if bool(args.trace) == args.measure:
        raise InputError(
            "expected --trace FILE (a profile of a job) or --measure (this device), and not both"
        )
    from apsched.artifacts.output_dir import check_writable

    check_writable(path.parent)
    (_measure if args.measure else _read_traces)(args, path, stdout)


def _read_traces(args: argparse.Namespace, path: Path, stdout: TextIO) -> None:
    from apsched.artifacts.output_dir import write_or_rescue
    from apsched.calibrate.profile.predict import predicted
    from apsched.calibrate.profile.profile import profile_costs
    from apsched.calibrate.profile.trace import load_trace
    from apsched.costs.measured_file import dump_costs
    from apsched.pipeline.cost_choice import CostChoice
    from apsched.pipeline.load import loaded
    from apsched.progress import Progress
    from apsched.report.calibration import print_profile

    progress = Progress()
    _known(path, "profile")
    with loaded(
        source_request(args), CostChoice(cluster=args.cluster), direction(args), progress
    ) as source:
        name = args.cluster or source.cluster
        cluster = _cluster(args, source)
        with progress.stage("profile"):
            traces = [load_trace(trace) for trace in args.trace]
            dags, sizes = _at_profiled_sizes(source, traces)
            profile = profile_costs(dags, traces, cluster, name, sizes)
            prediction = predicted(dags, profile.costs, cluster)
    _, unwritten = write_or_rescue(path.parent, {path.name: dump_costs(profile.costs)})
    print_profile(profile, prediction, args.out, stdout, as_json=args.json)
    if unwritten:
        raise ApschedError(unwritten)


def _at_profiled_sizes(
    source: "LoadedSource", traces: "list[Trace]"
) -> "tuple[list[nx.DiGraph], dict[str, int]]":
    """Return the graphs with the sizes that depend on data as the traces have them, where no hint
    states them; and these sizes by symbol.
    """
    captured = [graph.captured for graph in source.graphs if graph.captured is not None]
    if not any(graph.dag.graph["assumed"].sizes for graph in source.graphs) or not captured:
        return [graph.dag for graph in source.graphs], {}
    from apsched.calibrate.unknown_sizes import sizes_of_profile
    from apsched.graph.export.export import export_graph

    stated = {symbol: size for graph in captured for symbol, size in graph.hints.items()}
    sizes = sizes_of_profile([graph.module.graph for graph in captured], traces) | stated
    dags = []
    for graph in source.graphs:
        assert graph.captured is not None
        assert graph.cost_model is not None
        dags.append(
            export_graph(
                replace(graph.captured, hints=sizes),
                graph.cost_model,
                group_ranks=graph.group_ranks,
                cluster_name=source.cluster,
            )
        )
    return dags, sizes


def _measure(args: argparse.Namespace, path: Path, stdout: TextIO) -> None:
    """Measure on this device; under torchrun with all process ranks, of which the first one
    writes.
    """
    from apsched.artifacts.output_dir import write_or_rescue
    from apsched.calibrate.ranks import job
    from apsched.costs.measured import with_known
    from apsched.costs.measured_file import dump_costs
    from apsched.pipeline.cost_choice import CostChoice
    from apsched.pipeline.load import loaded
    from apsched.progress import Progress
    from apsched.report.calibration import print_measured

    known = _known(path, "measured")
    with job() as measuring_job:
        _check_device(known, measuring_job.device, path)
        progress = Progress(quiet=measuring_job.rank > 0)
        choice = CostChoice(cluster=args.cluster, fused=not args.unfused)
        with loaded(source_request(args), choice, direction(args), progress) as source:
            graphs = [
                (graph.captured.module, graph.dag)
                for graph in source.graphs
                if graph.captured is not None
            ]
            if not graphs:
                raise InputError(
                    f"{args.source}: --measure runs operators, and a graph file has none; use"
                    " the source of its capture"
                )
            with progress.stage("measure"):
                name = args.cluster or source.cluster
                measured = measuring_job.measure(
                    graphs,
                    name,
                    _cluster(args, source),
                    known,
                    fused=not args.unfused,
                )
    if measuring_job.rank == 0:
        costs = measured.costs if known is None else with_known(measured.costs, known)
        _, unwritten = write_or_rescue(path.parent, {path.name: dump_costs(costs)})
        print_measured(measured, args.out, stdout, as_json=args.json)
        if unwritten:
            raise ApschedError(unwritten)


def _cluster(args: argparse.Namespace, source: "LoadedSource") -> "Cluster":
    """Return the stated cluster, else that of the graph files."""
    from apsched.costs.clusters.cluster import cluster_of_file
    from apsched.pipeline.cost_choice import cluster_of_graphs

    known = cluster_of_graphs(args.cluster, [graph.dag for graph in source.graphs])
    return known or cluster_of_file(source.cluster, args.source)


def _known(path: Path, source: str) -> "MeasuredCosts | None":
    """Return the costs that are in the file already; ``None`` without one. ``InputError`` where it
    has times of another source, which mean something else, or is no file of costs.
    """
    from apsched.costs.measured_file import load_costs

    if not path.is_file():
        return None
    try:
        known = load_costs(path)
    except InputError as error:
        raise InputError(f"-o: {error}; delete the file, or state another one") from None
    if others := known.sources - {source}:
        raise InputError(
            f"-o: expected a new file, or one with {source} times, found {', '.join(others)} times"
            f" in {path}, which would be lost; state another file"
        )
    return known


def _check_device(known: "MeasuredCosts | None", device: "torch.device", path: Path) -> None:
    from apsched.calibrate.measure import device_name

    name = device_name(device)
    if known is not None and known.device != name:
        raise InputError(
            f"-o: expected a new file, or one with times of this device ({name}), found times of"
            f" {known.device} in {path}, which would be lost; state another file"
        )
