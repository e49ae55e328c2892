"""The verbs and their options. Values stay text here; ``choices.py`` reads them."""

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn, TextIO

from apsched import __version__
from apsched.config import DEFAULT_COMPUTE_MOVE
from apsched.errors import InputError
from apsched.quantities import show_bytes
from apsched.unpack import DEFAULT_LIMIT_BYTES, LIMIT_FLAG, LIMIT_VARIABLE

SOURCE_HELP = (
    "a preset (`apsched models`), hf:CONFIG.json, package.module:function, a file that torch wrote"
    " when it traced a job, or a graph file"
)
_EPILOG = (
    "exit status: 0 done, 1 no schedule fits the caps or a rewritten graph is not what was claimed,"
    " 2 wrong use"
)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are :class:`InputError`: one line, as of everything else."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        raise InputError(f"{message} (`{self.prog} --help` shows what there is)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; ``args.run(args, stdout)`` runs the one that was chosen."""
    parser = Parser(
        prog="apsched",
        description=(
            "The fastest communication schedule of distributed training that fits the memory, "
            "with a proof of how far it can be from the best."
        ),
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"apsched {__version__}")
    verbs = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )

    solve = _verb(
        verbs,
        "solve",
        "solve a source, write the schedule back into its graphs, and check the result",
    )
    _add_source(solve)
    _add_costs(solve)
    _add_caps(solve)
    _add_moves(solve)
    _add_contention(solve)
    _add_scenarios(solve)
    _add_plan(solve)
    _add_buckets(solve)
    text = (
        "also try gathers on a second process group of the same process ranks (a communicator"
        " more), and keep the faster"
    )
    solve.add_argument("--second-group", action="store_true", help=text)
    _add_inductor(solve, default=False)
    second = solve.add_argument_group("second opinion")
    _option(
        second,
        "--solver",
        "NAME",
        "cp-sat, milp (CBC) or milp:NAME with a solver that PuLP knows (default: cp-sat)",
        default="cp-sat",
    )
    _option(second, "--time-limit", "SECONDS", "of the milp, for each graph (default: 60)")
    text = "also print launches, bytes, spans and what closed buckets, by direction, group and kind"
    solve.add_argument("--metrics", action="store_true", help=text)
    _add_out(
        solve,
        "DIR",
        "directory for schedules, graphs and rewritten modules (default: apsched-out/SOURCE-MESH)",
    )

    audit = _verb(
        verbs,
        "audit",
        "score the order that graphs have now, or a schedule file, against the proven bound: what"
        " is exposed, what would help",
    )
    _add_source(audit)
    _add_costs(audit)
    _add_caps(audit)
    _add_moves(audit)
    _add_contention(audit)
    text = (
        "score this schedule file, whoever made it, not the order as captured; once for each graph"
    )
    audit.add_argument("--schedule", metavar="FILE", action="append", default=[], help=text)
    audit.add_argument(
        "--what-if-chunked",
        action="store_true",
        help=(
            "also the bound if collectives on the path, and the matrix products around them, were"
            " split in two: what is there to win"
        ),
    )

    compare = _verb(verbs, "compare", "score every baseline beside the solver")
    _add_source(compare)
    _add_costs(compare)
    _add_caps(compare)
    _add_moves(compare)
    _add_contention(compare)
    _add_scenarios(compare)
    _add_plan(compare)
    _add_buckets(compare)
    _add_inductor(compare, default=True)

    explain = _verb(
        verbs,
        "explain",
        "say what the step time rests on and what one more would buy, or why no schedule fits",
    )
    _add_source(explain)
    _add_costs(explain)
    _add_caps(explain)
    _add_moves(explain)
    _add_contention(explain)
    _add_plan(explain)

    apply = _verb(
        verbs, "apply", "apply schedule files to the graphs of a source, and check the result"
    )
    _add_source(apply)
    _add_costs(apply)
    _add_contention(apply)
    apply.add_argument(
        "schedules",
        metavar="SCHEDULE",
        nargs="+",
        help="schedule files that `apsched solve` wrote, one a graph",
    )
    _add_out(apply, "DIR", "directory for the rewritten modules (default: apsched-out/SOURCE-MESH)")

    capture = _verb(
        verbs, "capture", "export a source to graph files, which are solved without torch"
    )
    _add_source(capture)
    text = (
        "also say what forward saves for backward, and what it would if gathers of parameters, and"
        " what follows them, had no tags"
    )
    capture.add_argument("--saved-bytes", action="store_true", help=text)
    _add_costs(capture)
    _add_out(
        capture,
        "FILE",
        "graph file; of several graphs each gets its name before the suffix (step.forward.graph)",
        required=True,
    )

    calibrate = _verb(
        verbs,
        "calibrate",
        "read costs off a profile of a job, or measure them on the device at hand, for `--costs`",
    )
    how = calibrate.add_argument_group("how (one of these)")
    how.add_argument(
        "--trace",
        metavar="FILE",
        action="append",
        default=[],
        help=(
            "what torch.profiler exported, with record_shapes=True and steps marked by prof.step();"
            " once for each process rank"
        ),
    )
    how.add_argument(
        "--measure",
        action="store_true",
        help="run the operators here; under torchrun the collectives, too",
    )
    how.add_argument(
        "--unfused",
        action="store_true",
        help="run what Inductor would fuse, too, one by one, as eager and aot_eager jobs do",
    )
    _add_source(calibrate, flag="--graph")
    _add_json(calibrate)
    _option(
        calibrate,
        "--cluster",
        "NAME",
        "cluster whose formulas price the rest (default: that of a graph file, else h100)",
    )
    _add_out(calibrate, "FILE", "file of costs, such as costs.toml", required=True)

    study = _verb(
        verbs,
        "study",
        "answer a grid of questions: a memory/time frontier, other meshes, clusters, options; go on"
        " after a stop",
    )
    _add_source(study, several=True)
    _add_costs(study)
    _add_caps(study)
    _add_moves(study)
    _add_plan(study)
    _add_contention(study)
    grid = study.add_argument_group("study")
    grid.add_argument(
        "--vary",
        metavar="NAME=VALUES",
        action="append",
        default=[],
        help=(
            "an option and its values: seq=2048,8192, memory_cap=floor..none:20,"
            " mesh=fsdp=64|fsdp=8,tp=8 (docs/studies.md); may be given again"
        ),
    )
    grid.add_argument(
        "--if",
        dest="what_if",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=(
            "a direct answer: network=2x, compute=0.8x, ranks=4096 or memory=-10GiB, alone or"
            " several at once"
        ),
    )
    grid.add_argument(
        "--full",
        action="store_true",
        help="solve at every memory cap, whatever is known from others",
    )
    _option(
        grid,
        "--slowdown",
        "SHARE",
        "say the least memory that is at most so much slower than the fastest (default: 2%%)",
    )
    grid.add_argument(
        "--ignore",
        metavar="NAME",
        action="append",
        default=[],
        help="of compare: an option that may differ",
    )
    _option(grid, "--jobs", "N", "processes on this machine (default: one a core)")
    _option(
        grid,
        "--engine",
        "ADDRESS",
        "dask://host:port: the workers of a Dask cluster (extra apsched[dask]); they need no torch",
    )
    _add_out(
        study,
        "DIR",
        "directory of the study, where an earlier run is gone on with (default:"
        " apsched-out/study-SOURCE)",
    )

    cache = _verb(
        verbs, "cache", "list or clear the cache of answers that jobs keep (docs/jobs.md)"
    )
    cache.add_argument("what", metavar="WHAT", choices=("list", "clear"), help="list or clear")
    _option(
        cache,
        "--cache",
        "DIR",
        "its directory (default: $APSCHED_CACHE, else apsched in the user's cache directory)",
    )
    _add_json(cache)

    report = _verb(
        verbs,
        "report",
        "show a run as one HTML file: timeline, memory, buckets, baselines, certificate",
    )
    _add_run(report, "what `apsched solve -o DIR` wrote, or the directory of a study")
    _option(
        report,
        "--study",
        "DIR",
        "a study of the same graphs, whose frontiers are shown beside this run",
    )
    text = (
        "of a study: show this point in detail, by its name or how that begins; may be given again"
        " (default: the fastest of each frontier)"
    )
    report.add_argument("--point", metavar="NAME", action="append", default=[], help=text)
    _option(
        report,
        "--slowdown",
        "SHARE",
        "say the least memory that is at most so much slower than the fastest (default: 2%%)",
    )
    _add_out(report, "FILE", "the page (default: report.html in DIR)")

    trace = _verb(
        verbs,
        "trace",
        "write the timelines of a run for Perfetto, to lie beside a profile of the job",
    )
    _add_run(trace, "what `apsched solve -o DIR` wrote")
    text = (
        "a trace that torch.profiler exported of the job: write both into one file, aligned where"
        " the job runs each graph"
    )
    _option(trace, "--beside", "FILE", text)
    _option(
        trace,
        "--step",
        "N",
        "the step of that trace to lie beside, as its profiler counted (default: the last whole"
        " one)",
    )
    _add_out(trace, "FILE", "the trace (default: trace.json in DIR)")

    _add_json(_verb(verbs, "models", "list the presets"))
    clusters = _verb(
        verbs,
        "clusters",
        "list the clusters that costs can be computed for, or show the file of one",
    )
    clusters.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="print its file, where every number names its source: a start for your own",
    )
    _add_json(clusters)
    return parser


def _verb(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_runner(name))
    return parser


def _runner(name: str) -> Callable[[argparse.Namespace, TextIO], None]:
    """Return the function that runs verb ``name``; it is imported when it runs, so that the parser
    stays quick.
    """

    def run(args: argparse.Namespace, stdout: TextIO) -> None:
        if name in ("models", "clusters"):
            from apsched.cli.commands import listings

            {"models": listings.run_models, "clusters": listings.run_clusters}[name](args, stdout)
        else:
            import_module(f"apsched.cli.commands.{name}").run(args, stdout)

    return run


def _add_source(
    parser: argparse.ArgumentParser, flag: str | None = None, *, several: bool = False
) -> None:
    """Add SOURCE, as ``flag`` where there is one, and what may be chosen about it."""
    if several:
        text = f"{SOURCE_HELP}; or compare A B, merge A B, export DIR, about studies that are there"
        parser.add_argument("source", metavar="SOURCE", nargs="+", help=text)
    elif flag is None:
        parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    else:
        parser.add_argument(flag, dest="source", metavar="SOURCE", help=SOURCE_HELP, required=True)
    group = parser.add_argument_group("source")
    _option(
        group,
        "--mesh",
        "AXES",
        "process ranks by axis of parallelism, such as fsdp=64 or fsdp=16,tp=8 (default: fsdp=64)",
    )
    _option(group, "--seq", "N", "tokens in a sequence, of a preset (default: 8192)")
    _option(
        group, "--batch", "N", "sequences per data-parallel process rank, of a preset (default: 1)"
    )
    _option(group, "--layers", "N", "number of layers, of a preset (default: all)")
    _option(
        group,
        "--ac",
        "KIND",
        "activation checkpointing of layers: none, full, selective or every-N (default: none)",
    )
    _option(
        group, "--direction", "WHICH", "forward, backward or both (default: both)", default="both"
    )
    _add_unpacked_limit(group)


def _add_run(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("run_directory", metavar="DIR", help=text)
    _add_unpacked_limit(parser)
    _add_json(parser)


def _add_unpacked_limit(group: Any) -> None:
    text = (
        f"bytes that a file which is read may unpack to (default: ${LIMIT_VARIABLE}, else"
        f" {show_bytes(DEFAULT_LIMIT_BYTES)})"
    )
    _option(group, LIMIT_FLAG, "BYTES", text)


def _add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs")
    _option(
        costs,
        "--costs",
        "FILE",
        "measured costs, as `apsched calibrate` writes them; --cluster prices the rest",
    )
    _option(
        costs,
        "--cluster",
        "NAME",
        "cluster by name (`apsched clusters`) or TOML file (default: h100)",
    )
    costs.add_argument(
        "--collectives",
        metavar="FILE",
        action="append",
        default=[],
        help="measured collectives: nccl-tests output or CSV; may be given again",
    )
    costs.add_argument(
        "--unfused",
        action="store_true",
        help=(
            "price every node as a kernel of its own (eager, aot_eager), not chains as Inductor"
            " fuses them"
        ),
    )
    _add_json(parser)


def _add_caps(parser: argparse.ArgumentParser) -> None:
    caps = parser.add_argument_group("caps")
    _option(
        caps,
        "--memory-cap",
        "BYTES",
        "bytes, 60GiB, none, floor (the least feasible) or floor+2GiB (default: the device's"
        " memory)",
    )
    _option(caps, "--bucket-cap", "BYTES", "bytes of one bucket, such as 500MB (default: none)")
    _option(
        caps,
        "--max-topo-span",
        "N",
        "ranks between the first and the last member of a bucket (default: none)",
    )
    _option(
        caps,
        "--max-prefetch",
        "N",
        "compute nodes between a launch and the first that needs it (default: none)",
    )
    _option(
        caps,
        "--in-flight-cap",
        "BYTES",
        "output bytes of collectives started and not yet waited for (default: none)",
    )
    search = parser.add_argument_group("search")
    _option(
        search,
        "--time-slack",
        "SHARE",
        "share of the step time that less memory and fewer launches may cost (default: 0.1%%)",
    )
    _option(
        search,
        "--budget",
        "WORK",
        "deterministic work of the search, the same on every machine (default: 20)",
    )
    _option(search, "--seed", "N", "seed of the search (default: 0)")


def _add_contention(parser: argparse.ArgumentParser) -> None:
    text = (
        "who slows whom, with commas: links (groups on one link share it), compute or compute=1.2"
        " (slower beside collectives), transfers=1.1 and latency=3 (slower beside compute)"
        " (default: none)"
    )
    _option(parser.add_argument_group("contention"), "--contention", "WHAT", text)


def _add_scenarios(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scenarios")
    _option(
        group,
        "--scenarios",
        "N",
        "choose the schedule that is best over so many sampled costs (default: the costs as they"
        " are)",
    )
    _option(
        group,
        "--noise",
        "SIGMA",
        "how far sampled costs are from those stated: sigma of lognormal factors (default: 0.2)",
    )
    _option(
        group,
        "--robust",
        "WHAT",
        "what counts: mean or worst step time over the scenarios (default: worst)",
    )


def _add_moves(parser: argparse.ArgumentParser) -> None:
    text = (
        "places by which a compute node may move to hide a collective; 0: as captured (default:"
        f" {DEFAULT_COMPUTE_MOVE})"
    )
    _option(parser.add_argument_group("compute"), "--max-compute-move", "N", text)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    plan = parser.add_argument_group("plan")
    _option(
        plan,
        "--plan",
        "FILE",
        "rules for collectives by name, in TOML or JSON: forbid, group, pin, prefetch, start"
        " (docs/files.md)",
    )
    plan.add_argument(
        "--bitwise",
        action="store_true",
        help=(
            "reduce gradients in the buckets and payload order of eager FSDP2, so that sums are bit"
            " for bit the same; prints the price"
        ),
    )


def _add_buckets(parser: argparse.ArgumentParser) -> None:
    text = (
        "buckets by module: none, block (each transformer block) or a file with an entry a line,"
        " such as layers.[0-5] or norm+output"
    )
    _option(parser, "--buckets", "WHICH", f"{text} (default: the solver's choice)")


def _add_inductor(parser: argparse.ArgumentParser, *, default: bool) -> None:
    text = (
        "run torch's own schedulers, too, which takes seconds (default:"
        f" {'yes' if default else 'no'})"
    )
    parser.add_argument(
        "--inductor", action=argparse.BooleanOptionalAction, default=default, help=text
    )


def _add_out(
    parser: argparse.ArgumentParser, metavar: str, text: str, *, required: bool = False
) -> None:
    parser.add_argument("-o", "--out", metavar=metavar, help=text, required=required)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout, and nothing else"
    )


def _option(group: Any, flag: str, metavar: str, text: str, *, default: str | None = None) -> None:
    group.add_argument(flag, metavar=metavar, help=text, default=default)
