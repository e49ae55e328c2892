"""``apsched solve``: the whole line, from a SOURCE to files that were checked."""

import argparse
from functools import partial
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
from apsched.cli.output import refuse_infeasible
from apsched.cli.requests import (
    check_out_dir,
    cost_choice,
    direction,
    kept_parameters,
    micro_batches_in_a_row,
    out_dir,
    request_with_buckets,
    solve_request,
    source_request,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from apsched.errors import ApschedError
    from apsched.pipeline.cost_choice import CostChoice
    from apsched.pipeline.load import LoadedGraph
    from apsched.pipeline.rate import StepRate
    from apsched.pipeline.result import Result
    from apsched.pipeline.solve_graph import SolveRequest
    from apsched.pipeline.sources import SourceRequest
    from apsched.progress import Progress
    from apsched.whole_step.keep_request import KeepRequest
    from apsched.whole_step.solve import Answer, SolvedGraphs


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
        "with --keep auto, also of one graph of forward and backward: solve the step under N memory"
        " caps, too, from its least memory to the peak of the fastest, and print memory, step time"
        " and the kept parameters",
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
    from dataclasses import asdict

    from apsched.artifacts.output_dir import check_writable, replaced_run, write_or_rescue
    from apsched.artifacts.stated_options import stated_options
    from apsched.pipeline.compile_ahead import begin_to_compile
    from apsched.pipeline.load import loaded
    from apsched.pipeline.solve_graph import under_plan
    from apsched.progress import Progress
    from apsched.report.console import print_json
    from apsched.report.summary import print_solved, report_json
    from apsched.whole_step.choices import NONE
    from apsched.whole_step.faster_reduction import with_faster_reduction
    from apsched.whole_step.keep_request import AUTO
    from apsched.whole_step.solve import solve_graphs

    where = source_request(args), cost_choice(args), direction(args)
    keep = kept_parameters(args, where[-1])
    request = solve_request(args, keep)
    num_caps = _num_caps(args, keep.mode)
    num_micro_batches = micro_batches_in_a_row(args, where[-1])
    check_out_dir(args)
    progress = Progress()
    begin_to_compile(progress)
    own_buckets = partial(request_with_buckets, args.buckets)
    where, reduction = with_faster_reduction(where, request, progress, own_buckets)
    with ExitStack() as opened:
        source = opened.enter_context(loaded(*where, progress))
        request = own_buckets(request, source.graphs)
        again = under_plan(source.graphs, request)
        target = out_dir(args, source.slug)
        check_writable(target)
        solved = solve_graphs(again, request, keep, progress, num_micro_batches)
        if any(result.best is None for result in solved.results):
            opened.close()  # its process groups end, before others are captured
            keeps = keep.mode not in (AUTO, NONE)
            _refuse(args, where, request, solved, source.cluster, stdout, progress, keeps=keeps)
        along = _along_caps(solved, num_caps)
        results, files, lost = _with_files(solved, progress, inductor=args.inductor)
    options = stated_options(vars(args) | _choice_made(keep, solved))
    report = report_json(args.source, source.cluster, results, options)
    _add_step(report, files, again, solved, along)
    report |= _optimizer_entry(solved, results)
    report |= {"reduce": asdict(reduction)} if reduction is not None else {}
    replaced = replaced_run(target, args.source, report["options"], is_stated=args.out is not None)
    files["result.json"] = (json.dumps(report, indent=1) + "\n").encode()
    written, unwritten = write_or_rescue(target, files)
    if args.json:
        print_json(stdout, **report)
    else:
        _print_step(solved, results, along, source.rate, stdout)
        notes = (*source.notes, *([replaced] if replaced else []))
        rewritten = all(graph.captured is not None for graph in solved.graphs)
        print_solved(results, written, notes, stdout, metrics=args.metrics, rewritten=rewritten)
    _raise_lost(lost, unwritten)


def _along_caps(solved: "SolvedGraphs", num_caps: int) -> "tuple[Answer, ...]":
    """Return the answers of the step under so many memory caps; none where 0 are requested."""
    from apsched.whole_step.along_caps import frontier

    return frontier(solved.step, num_caps) if num_caps and solved.step is not None else ()


def _with_files(
    solved: "SolvedGraphs", progress: "Progress", *, inductor: bool
) -> "tuple[list[Result], dict[str, bytes], list[ApschedError]]":
    """Return the results with the round trips of their rewritten graphs, the files of all graphs,
    and the errors of those that could not be written back.
    """
    from apsched.artifacts.solved_files import add_files
    from apsched.pipeline.steps import with_torch_schedulers

    files: dict[str, bytes] = {}
    lost: list[ApschedError] = []
    results = []
    for graph, result in zip(solved.graphs, solved.results, strict=True):
        compared = with_torch_schedulers(graph, result, progress) if inductor else result
        results.append(add_files(graph, compared, files, lost, progress))
    return results, files, lost


def _refuse(
    args: argparse.Namespace,
    where: "tuple[SourceRequest, CostChoice, str]",
    request: "SolveRequest",
    solved: "SolvedGraphs",
    cluster: str,
    stdout: TextIO,
    progress: "Progress",
    *,
    keeps: bool,
) -> None:
    """Raise the error of graphs without a schedule, with the options under which one fits."""
    from apsched.pipeline.what_fits import what_fits
    from apsched.whole_step.accumulation.search import AccumulationAnswer

    several = isinstance(solved.answer, AccumulationAnswer)
    refuse_infeasible(
        solved.results,
        source=args.source,
        cluster=cluster,
        stdout=stdout,
        as_json=args.json,
        trials=() if several else what_fits(*where, request, solved.results, progress, keeps=keeps),
        of_step=_of_step(solved, is_stated=request.memory_cap is not None),
    )


def _of_step(solved: "SolvedGraphs", *, is_stated: bool) -> str:
    """Return the message for a step of several micro-batches, or with kept parameters under a
    memory cap that is stated, that does not fit; else empty.
    """
    from apsched.report.answer.accumulation import no_choice_fits
    from apsched.report.answer.whole_step import does_not_fit
    from apsched.whole_step.accumulation.search import AccumulationAnswer
    from apsched.whole_step.search import StepAnswer

    answer = solved.answer
    if isinstance(answer, AccumulationAnswer):
        return no_choice_fits(answer)
    return does_not_fit(answer) if isinstance(answer, StepAnswer) and is_stated else ""


def _add_step(
    report: dict[str, Any],
    files: dict[str, bytes],
    graphs: "Sequence[LoadedGraph]",
    solved: "SolvedGraphs",
    along: "Sequence[Answer]",
) -> None:
    """Add the step, if ``graphs`` are one, to the report and to the files of the answer: its choice
    and figures, and the answers along memory caps.
    """
    from apsched.report.answer.along_caps import along_caps_json
    from apsched.report.answer.step import step_entries
    from apsched.whole_step.accumulation.held_tensors import held_tensors
    from apsched.whole_step.accumulation.search import AccumulationAnswer
    from apsched.whole_step.joint_graph.names import kept_in_joint
    from apsched.whole_step.joint_graph.step import JointAnswer
    from apsched.whole_step.keep_request import KEPT_FILE, kept_file
    from apsched.whole_step.pair import kept_tensors
    from apsched.whole_step.search import StepAnswer

    answer = solved.answer
    if answer is None:
        return
    entries = step_entries(answer)
    figures = next(iter(entries.values()))
    if isinstance(answer, StepAnswer):
        figures["tensors"] = kept_tensors(graphs, answer.best.graphs)
    if isinstance(answer, JointAnswer):
        figures["tensors"] = kept_in_joint(graphs[0], answer.best.graph)
    if isinstance(answer, AccumulationAnswer):
        figures["tensors"] = held_tensors(graphs, answer.best)
    if along:
        figures["along_caps"] = along_caps_json(along)
    report |= entries
    files[KEPT_FILE] = kept_file(answer.best.kept)


def _optimizer_entry(solved: "SolvedGraphs", results: "Sequence[Result]") -> dict[str, Any]:
    """Return the times of the step with its optimizer for the report, if they are known."""
    from dataclasses import asdict

    from apsched.whole_step.optimizer_ends import optimizer_ends

    ends = optimizer_ends(results, _bound_us(solved, results))
    return {} if ends is None else {"with_optimizer": asdict(ends)}


def _bound_us(solved: "SolvedGraphs", results: "Sequence[Result]") -> float:
    """Return the bound on the step, over the choices of kept parameters if it has them."""
    from apsched.units import ticks_to_us

    if solved.answer is None:
        return sum(result.bound_us for result in results)
    return ticks_to_us(solved.answer.bound.ticks)


def _choice_made(keep: "KeepRequest", solved: "SolvedGraphs") -> dict[str, Any]:
    """Return the option that states the choice of kept parameters, also one made by default."""
    from apsched.whole_step.keep_request import AUTO

    return {"keep": AUTO} if keep.mode == AUTO and solved.answer is not None else {}


def _first_lines(
    solved: "SolvedGraphs", results: "Sequence[Result]", rate: "StepRate | None"
) -> tuple[str, ...]:
    """Return the summary of the step, with its bound and its choice where it has one."""
    from apsched.report.answer.first import first_lines
    from apsched.report.answer.whole_step import choice_of_less_memory
    from apsched.whole_step.search import StepAnswer

    answer = solved.answer
    if answer is None:
        return first_lines(results, rate)
    return first_lines(
        results,
        rate,
        bound_us=_bound_us(solved, results),
        suggestion=choice_of_less_memory(answer) if isinstance(answer, StepAnswer) else "",
        keeps=bool(answer.best.kept),
        bound_of="" if solved.step is not None else " with this choice",
    )


def _print_step(
    solved: "SolvedGraphs",
    results: "Sequence[Result]",
    along: "Sequence[Answer]",
    rate: "StepRate | None",
    stdout: TextIO,
) -> None:
    """Print the summary of the step, the choice for it, and the answers along memory caps, as far
    as it has them.
    """
    from apsched.report.answer.accumulation import print_accumulation
    from apsched.report.answer.along_caps import print_along_caps
    from apsched.report.answer.joint_graph import print_joint
    from apsched.report.answer.whole_step import print_kept
    from apsched.report.summary import print_first
    from apsched.whole_step.accumulation.search import AccumulationAnswer
    from apsched.whole_step.joint_graph.step import JointAnswer
    from apsched.whole_step.search import StepAnswer

    answer = solved.answer
    if not isinstance(answer, AccumulationAnswer):
        print_first(_first_lines(solved, results, rate), stdout)
    match answer:
        case AccumulationAnswer():
            print_accumulation(answer, rate, stdout)
        case JointAnswer():
            print_joint(answer, stdout)
        case StepAnswer():
            print_kept(answer, stdout)
    if along:
        print_along_caps(along, stdout)


def _raise_lost(lost: "list[ApschedError]", unwritten: str) -> None:
    """Raise the errors after the solve, if any, as one error."""
    from apsched.errors import ApschedError, RoundTripError

    if lost or unwritten:
        wrong = [*map(str, lost), *([unwritten] if unwritten else [])]
        untrue = not unwritten and all(isinstance(error, RoundTripError) for error in lost)
        kind = RoundTripError if untrue else ApschedError
        raise kind("; ".join(wrong)) from (lost[0] if lost else None)


def _num_caps(args: argparse.Namespace, keep: str) -> int:
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
    return parse_count(args.frontier, "--frontier", least=2)
