"""``apsched audit``: how good is the order that a graph has now, or a schedule file, whoever made
it, and what would help it most?
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from apsched.artifacts.schedule_file import ScheduleFile, bind_schedule, load_schedule
from apsched.cli.options import cost_choice, direction, search_choice, source_request
from apsched.errors import InputError
from apsched.pipeline.load import loaded
from apsched.pipeline.result import Result
from apsched.pipeline.steps import resolve_caps, solve_graph
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import show_bytes, show_us
from apsched.report.summary import console, graph_json, print_table
from apsched.schedule.analysis.stalls import Stall, exposed, exposed_lines
from apsched.schedule.result import AS_CAPTURED, Scored, captured_of
from apsched.schedule.score import score
from apsched.schedule.simulate import simulate
from apsched.solver import Change, best_changes
from apsched.units import ticks_to_us
from apsched.what_if.chunked import line, what_if_chunked

GIVEN = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One graph, the schedule that is looked at, and what was found about it."""

    result: Result
    now: Scored
    exposed: tuple[Stall, ...]
    changes: tuple[Change, ...]

    @property
    def above_bound(self) -> float:
        """How far the schedule is above the bound, as a share of the bound."""
        bound = self.result.answer.bound_ticks
        return self.now.step_time_ticks / bound - 1 if bound else 0.0


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Score the captured order of every graph, or a given schedule, against the bound that the
    solver proves.
    """
    request, costs, wanted, choice = (
        source_request(args),
        cost_choice(args),
        direction(args),
        search_choice(args),
    )
    files = [load_schedule(path) for path in args.schedule]
    progress = Progress()
    with loaded(request, costs, wanted, progress) as source:
        graphs = [
            graph
            for graph in source.graphs
            if not files or _file_of(graph.problem, files) is not None
        ]
        _check_used(files, [graph.problem for graph in source.graphs])
        results = [
            solve_graph(
                graph,
                resolve_caps(graph, choice.caps, choice.memory_cap, progress),
                choice.options,
                progress,
            )
            for graph in graphs
        ]
        asked = zip(graphs, results, strict=True) if args.what_if_chunked else ()
        chunked = [
            what_if_chunked(graph.dag, graph.problem, result.caps) for graph, result in asked
        ]
    audits = [_audit(result, files, progress) for result in results]
    if args.json:
        found = [{**_json(audit), "graph": graph_json(audit.result)} for audit in audits]
        for graph, parts in zip(found, chunked, strict=False):
            graph["what_if_chunked"] = asdict(parts)
        print(
            json.dumps(
                {"schema": 1, "source": args.source, "cluster": source.cluster, "audit": found}
            ),
            file=stdout,
        )
        return
    print_table(results, stdout, rows=[(audit.now,) for audit in audits])
    out = console(stdout)
    out.print()
    for audit in audits:
        for text in lines(audit):
            out.print(text, markup=False)
    for result, parts in zip(results, chunked, strict=False):
        out.print(line(result.problem.name, parts), markup=False)


def _audit(result: Result, files: Sequence[ScheduleFile], progress: Progress) -> Audit:
    problem = result.problem
    file = _file_of(problem, files)
    now = (
        as_captured(result)
        if file is None
        else score(problem, GIVEN, bind_schedule(file, problem), result.caps)
    )
    with progress.stage(f"changes {problem.name}"):
        changes = best_changes(problem, result.caps, now, result.answer.floor_memory_bytes)
    return Audit(
        result=result,
        now=now,
        exposed=exposed(problem, now.schedule, simulate(problem, now.schedule)),
        changes=changes,
    )


def _file_of(problem: Problem, files: Sequence[ScheduleFile]) -> ScheduleFile | None:
    return next((file for file in files if file.graph["hash"] == problem.graph_hash), None)


def _check_used(files: Sequence[ScheduleFile], problems: Sequence[Problem]) -> None:
    """Raise ``InputError``, which says what differs, for a schedule of none of these graphs."""
    for file in files:
        if not any(file.graph["hash"] == problem.graph_hash for problem in problems):
            like = next(
                (problem for problem in problems if problem.name == file.graph["name"]), problems[0]
            )
            bind_schedule(file, like)
            raise InputError(f"{file.path}: the schedule belongs to none of these graphs")


def as_captured(result: Result) -> Scored:
    """Return the score of the order that the graph has."""
    found = captured_of(result.answer.baselines)
    assert found is not None, "the solver scores every baseline"
    return found


def lines(audit: Audit) -> tuple[str, ...]:
    """Return how far above the bound the schedule is, what is exposed and why, and what would help
    most.
    """
    found = [verdict(audit)]
    if audit.exposed:
        total = show_us(ticks_to_us(audit.now.exposed_ticks))
        found += [
            f"  exposed, {total} in {len(audit.exposed)} waits:",
            *exposed_lines(audit.exposed),
        ]
    if audit.changes:
        found.append("  what would help most, one on top of the other, each simulated:")
        before = audit.now
        for k, change in enumerate(audit.changes, start=1):
            gain = before.step_time_ticks - change.scored.step_time_ticks
            figures = (
                f"{show_us(ticks_to_us(change.scored.step_time_ticks))}, peak"
                f" {show_bytes(change.scored.peak_memory_bytes)}"
            )
            share = 100 * gain / before.step_time_ticks
            found.append(
                f"    {k}. {_said(audit.result.problem, before, change)}: {share:.2f} % shorter"
                f" ({figures})"
            )
            before = change.scored
    return tuple(found)


def verdict(audit: Audit) -> str:
    """Return one line on how far the schedule is above the bound, and what is known to be
    possible.
    """
    result, now = audit.result, audit.now
    what = "as captured" if now.name == AS_CAPTURED else "the schedule"
    text = f"{result.problem.name}: {what} {100 * audit.above_bound:.2f} % above the bound"
    if result.best is not None:
        gain = (
            100 * (1 - result.best.step_time_ticks / now.step_time_ticks)
            if now.step_time_ticks
            else 0.0
        )
        text += (
            f"; a schedule {gain:.2f} % shorter is known (`apsched solve`)"
            if gain > 0
            else "; none that is shorter is known"
        )
    return text if now.fits else f"{text}; it breaks a cap: {now.violations[0]}"


def _said(problem: Problem, before: Scored, change: Change) -> str:
    if change.key is None:
        return "the same buckets, launched and waited for elsewhere"
    key = problem.keys[change.key]
    now, then = (_launches(problem, scored, change.key) for scored in (before, change.scored))
    return (
        f"{key.kind} on group {key.group} ({key.dtype}) in {then} launch{'es' if then != 1 else ''}"
        f" instead of {now}, placed anew"
    )


def _launches(problem: Problem, scored: Scored, key: int) -> int:
    """Return how many launches carry the collectives of ``key``."""
    own = [c for c, collective in enumerate(problem.collectives) if collective.key == key]
    shared = [sum(c in bucket.members for c in own) for bucket in scored.schedule.buckets]
    return len(own) - sum(count - 1 for count in shared if count)


def _json(audit: Audit) -> dict[str, Any]:
    now = audit.now
    return {
        "name": audit.result.problem.name,
        "schedule": now.name,
        "step_time_us": ticks_to_us(now.step_time_ticks),
        "bound_us": audit.result.bound_us,
        "above_bound": audit.above_bound,
        "exposed_us": ticks_to_us(now.exposed_ticks),
        "peak_memory_bytes": now.peak_memory_bytes,
        "num_launches": now.num_launches,
        "fits": now.fits,
        "exposed": [
            {
                "name": e.name,
                "members": e.num_members,
                "bytes": e.size_bytes,
                "on_path": e.on_path,
                "stall_us": ticks_to_us(e.stall_ticks),
                "transfer_us": ticks_to_us(e.transfer_ticks),
                "queued_us": ticks_to_us(e.queued_ticks),
                "hidden_us": ticks_to_us(e.hidden_ticks),
                "why": str(e.why),
            }
            for e in audit.exposed
        ],
        "changes": [
            {
                "what": _said(audit.result.problem, before, change),
                "step_time_us": ticks_to_us(change.scored.step_time_ticks),
                "peak_memory_bytes": change.scored.peak_memory_bytes,
                "num_launches": change.scored.num_launches,
            }
            for before, change in zip(
                (now, *(c.scored for c in audit.changes)), audit.changes, strict=False
            )
        ],
    }
