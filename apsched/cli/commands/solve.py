"""``apsched solve``: the whole line, from a SOURCE to files that were checked."""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from apsched.cli.arguments import (
    add_groups,
    add_inductor,
    add_json,
    add_option,
    add_out,
    add_source,
    add_verb,
)
from apsched.cli.options import (
    cost_choice,
    direction,
    out_dir,
    request_with_buckets,
    solve_request,
    source_request,
    stated,
)
from apsched.cli.output import refuse_infeasible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from apsched.errors import ApschedError
    from apsched.pipeline.load import LoadedGraph
    from apsched.pipeline.rate import StepRate
    from apsched.pipeline.result import Result
    from apsched.pipeline.solve_graph import SolveRequest
    from apsched.progress import Progress
    from apsched.whole_step.accumulation_search import AccumulationAnswer
    from apsched.whole_step.keep_request import KeepRequest
    from apsched.whole_step.search import StepAnswer


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "solve",
        "solve a source, write the schedule back into its graphs, and check the result",
        run,
    )
    add_source(parser)
    add_groups(parser, "costs")
    add_json(parser)
    add_groups(parser, "caps", "device memory", "search", "compute")
    add_groups(parser, "contention", "scenarios", "plan", "buckets")
    add_groups(parser, "whole step", "accumulation", "process groups")
    add_inductor(parser, default=False)
    add_groups(parser, "other solver")
    parser.add_argument(
        "--metrics",
        action="store_true",
        help=(
            "also print launches, bytes, spans and the caps that closed buckets, by direction,"
            " group and kind"
        ),
    )
    add_option(
        parser,
        "--frontier",
        "N",
        "with --keep auto: also solve the step under N memory caps, from its least memory to the"
        " peak of the fastest, and print memory, step time and the kept parameters",
    )
    add_out(
        parser,
        "DIR",
        "directory for schedules, graphs and rewritten modules (default: apsched-out/SOURCE-MESH)",
    )


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Solve every graph of the source; write schedules, graphs, rewritten modules and the
    result.
    """
    import json
    from contextlib import ExitStack
    from dataclasses import replace

    from apsched.artifacts.output_dir import check_writable, replaced_run, write_or_rescue
    from apsched.artifacts.solved_files import add_files
    from apsched.artifacts.stated_options import stated_options
    from apsched.pipeline.compile_ahead import begin_to_compile
    from apsched.pipeline.load import loaded
    from apsched.pipeline.solve_graph import under_plan
    from apsched.pipeline.steps import with_torch_schedulers
    from apsched.pipeline.what_fits import what_fits
    from apsched.progress import Progress
    from apsched.report.summary import print_solved, report_json
    from apsched.report.table import print_json
    from apsched.whole_step.along_caps import frontier
    from apsched.whole_step.keep_request import keep_request, kept_in_joint_graph, stated_choice
    from apsched.whole_step.solve import step_apart

    where = source_request(args), cost_choice(args), direction(args)
    request = solve_request(args)
    keep = keep_request(args.keep)
    num_caps = _num_caps(args, keep.mode, where[-1])
    num_micro_batches = _num_micro_batches(args, where[-1])
    check_writable(out_dir(args, "."))
    progress = Progress()
    begin_to_compile(progress)
    apart = step_apart(*where, request, keep, progress)
    if apart is not None:
        keep = stated_choice(apart.best.kept)
    keep, kept = kept_in_joint_graph(keep, where[-1])
    with ExitStack() as opened:
        source = opened.enter_context(loaded(*where, progress, kept=kept))
        request = request_with_buckets(request, args.buckets, source.graphs)
        again = under_plan(source.graphs, request)
        target = out_dir(args, source.slug)
        check_writable(target)
        solved = replace(_solved(again, request, keep, num_micro_batches, progress), apart=apart)
        graphs, results = solved.graphs, list(solved.results)
        if any(result.best is None for result in results):
            opened.close()  # its process groups end, before others are captured
            refuse_infeasible(
                results,
                source=args.source,
                cluster=source.cluster,
                stdout=stdout,
                as_json=args.json,
                trials=() if num_micro_batches else what_fits(*where, request, results, progress),
                of_step=solved.no_choice_fits,
            )
        if args.inductor:
            results = [
                with_torch_schedulers(*pair, progress) for pair in zip(graphs, results, strict=True)
            ]
        along = frontier(again, request, num_caps, progress) if num_caps else ()
        files: dict[str, bytes] = {}
        lost: list[ApschedError] = []
        for k, graph in enumerate(graphs):
            results[k] = add_files(graph, results[k], files, lost, progress)
    report = report_json(args.source, source.cluster, results, stated_options(vars(args)))
    solved.add_to(report, files, again, along)
    replaced = replaced_run(target, args.source, report["options"])
    files["result.json"] = (json.dumps(report, indent=1) + "\n").encode()
    written, unwritten = write_or_rescue(target, files)
    if args.json:
        print_json(stdout, **report)
    else:
        _print_step(solved, along, source.rate, stdout)
        print_solved(
            results,
            written,
            (*source.notes, *([replaced] if replaced else [])),
            stdout,
            rate=source.rate,
            metrics=args.metrics,
            rewritten=all(graph.captured is not None for graph in graphs),
            whole_step=solved.micro_batches is None,
        )
    _raise_lost(lost, unwritten)


@dataclass(frozen=True, kw_only=True)
class _Solved:
    """The solved graphs of a source, and the answer for their step where one was requested."""

    graphs: "Sequence[LoadedGraph]"
    results: "Sequence[Result]"
    step: "StepAnswer | None" = None
    micro_batches: "AccumulationAnswer | None" = None
    apart: "StepAnswer | None" = None
    """The answer for forward and backward apart, whose choice one graph of both makes."""

    @property
    def no_choice_fits(self) -> str:
        """The message for a step of several micro-batches that does not fit; else empty."""
        from apsched.report.answer.accumulation import no_choice_fits

        return "" if self.micro_batches is None else no_choice_fits(self.micro_batches)

    def add_to(
        self,
        report: dict[str, Any],
        files: dict[str, bytes],
        again: "Sequence[LoadedGraph]",
        along: "Sequence[StepAnswer]",
    ) -> None:
        """Add the step to the report and to the files of the answer; ``again`` are the graphs as
        captured.
        """
        from apsched.report.answer.accumulation import accumulation_json
        from apsched.report.answer.whole_step import keep_json
        from apsched.whole_step.keep_request import KEPT_FILE, kept_file

        if self.step is not None:
            report["keep"] = _keep_json(again, self.step, along)
            files[KEPT_FILE] = kept_file(self.step.best.kept)
        if self.apart is not None:
            report["keep_apart"] = keep_json(self.apart)
            files[KEPT_FILE] = kept_file(self.apart.best.kept)
        if self.micro_batches is not None:
            report["accumulate"] = accumulation_json(self.micro_batches)
            files[KEPT_FILE] = kept_file(self.micro_batches.best.kept)


def _solved(
    graphs: "Sequence[LoadedGraph]",
    request: "SolveRequest",
    keep: "KeepRequest",
    num_micro_batches: int,
    progress: "Progress",
) -> _Solved:
    """Return the graphs solved: each alone, as one step, or as a step of several micro-batches."""
    from apsched.whole_step.solve import solve_graphs, solve_micro_batches

    if num_micro_batches:
        made, results, several = solve_micro_batches(
            graphs, num_micro_batches, request, keep, progress
        )
        return _Solved(graphs=made, results=results, micro_batches=several)
    kept, results, step = solve_graphs(graphs, request, keep, progress)
    return _Solved(graphs=kept, results=results, step=step)


def _keep_json(
    graphs: "Sequence[LoadedGraph]", step: "StepAnswer", along: "Sequence[StepAnswer]"
) -> dict[str, Any]:
    """Return the parameters and tensors kept from forward to backward, and the answers along memory
    caps, if any.
    """
    from apsched.report.answer.whole_step import frontier_json, keep_json
    from apsched.whole_step.pair import kept_tensors

    along_caps = {"along_caps": frontier_json(along)} if along else {}
    return keep_json(step) | {"tensors": kept_tensors(graphs, step.best.graphs)} | along_caps


def _print_step(
    solved: _Solved, along: "Sequence[StepAnswer]", rate: "StepRate | None", stdout: TextIO
) -> None:
    """Print the choice for the step, and the answers along memory caps, if any."""
    from apsched.report.answer.accumulation import print_accumulation
    from apsched.report.answer.whole_step import APART, print_frontier, print_kept

    if solved.apart is not None:
        print(APART, file=stdout)
        print_kept(solved.apart, stdout)
    if solved.step is not None:
        print_kept(solved.step, stdout)
    if solved.micro_batches is not None:
        print_accumulation(solved.micro_batches, rate, stdout)
    if along:
        print_frontier(along, stdout)


def _raise_lost(lost: "list[ApschedError]", unwritten: str) -> None:
    """Raise the errors after the solve, if any, as one error."""
    from apsched.errors import ApschedError, RoundTripError

    if lost or unwritten:
        wrong = [*map(str, lost), *([unwritten] if unwritten else [])]
        untrue = not unwritten and all(isinstance(error, RoundTripError) for error in lost)
        kind = RoundTripError if untrue else ApschedError
        raise kind("; ".join(wrong)) from (lost[0] if lost else None)


def _num_caps(args: argparse.Namespace, keep: str, which: str) -> int:
    """Return the number of memory caps of ``--frontier``; 0 where it is left out."""
    from apsched.errors import InputError
    from apsched.quantities import parse_count
    from apsched.whole_step.keep_request import AUTO

    if args.frontier is None:
        return 0
    if keep != AUTO:
        raise InputError(
            "--frontier: it needs --keep auto; for each graph alone use `apsched study` with"
            f" --vary memory_cap=floor..none:{args.frontier}"
        )
    if which == "joint":
        raise InputError(
            "--frontier: expected forward and backward apart, found --direction joint; choose"
            " --direction both"
        )
    return parse_count(args.frontier, "--frontier", least=2)


def _num_micro_batches(args: argparse.Namespace, which: str) -> int:
    """Return the number of micro-batches of ``--accumulate``; 0 where it is left out."""
    from apsched.errors import InputError
    from apsched.whole_step.choices import NONE

    num_micro_batches = stated(args, "accumulate")
    if num_micro_batches is None:
        return 0
    if args.keep == NONE:
        raise InputError(
            "--accumulate: expected a choice of the parameters that micro-batches share, found"
            " --keep none (the default); choose --keep auto, --keep all or --keep with a file"
        )
    if args.frontier is not None:
        raise InputError(
            "--accumulate cannot be combined with --frontier; state --memory-cap instead"
        )
    if which != "both":
        raise InputError(
            f"--accumulate: expected forward and backward apart, found --direction {which}; choose"
            " --direction both (one graph of all micro-batches: --micro-batches)"
        )
    return int(num_micro_batches)
