"""The output of ``apsched audit``: the distance of a schedule from the bound, the exposed waits and
their causes, and the changes that would help most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from apsched.artifacts.replay import possible
from apsched.artifacts.schedule_file import ScheduleFile, bind_schedule
from apsched.errors import InputError
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import show_bytes, show_us
from apsched.schedule.analysis.stalls import Stall, exposed, exposed_lines
from apsched.schedule.result import AS_CAPTURED, Scored, captured_of
from apsched.schedule.score import score
from apsched.schedule.simulate import simulate
from apsched.solver import Change, best_changes
from apsched.units import ticks_to_us

GIVEN = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One graph, the audited schedule, and the findings about it."""

    result: Result
    now: Scored
    exposed: tuple[Stall, ...]
    changes: tuple[Change, ...]

    @property
    def above_bound(self) -> float:
        """Distance of the schedule above the bound, as a share of the bound."""
        bound = self.result.answer.bound_ticks
        return self.now.step_time_ticks / bound - 1 if bound else 0.0


def audited(result: Result, files: Sequence[ScheduleFile], progress: Progress) -> Audit:
    """Return the audit of the schedule of ``files`` for the graph of ``result``, or of the order as
    captured.
    """
    problem = result.problem
    file = file_of(problem, files)
    now = (
        _as_captured(result)
        if file is None
        else score(problem, GIVEN, possible(problem, file), result.caps)
    )
    with progress.stage(f"changes {problem.name}"):
        changes = best_changes(problem, result.caps, now, result.answer.floor_memory_bytes)
    return Audit(
        result=result,
        now=now,
        exposed=exposed(problem, now.schedule, simulate(problem, now.schedule)),
        changes=changes,
    )


def file_of(problem: Problem, files: Sequence[ScheduleFile]) -> ScheduleFile | None:
    """Return the file for ``problem``; ``None`` where there is none."""
    return next((file for file in files if file.graph["hash"] == problem.graph_hash), None)


def with_groups_of(graph: LoadedGraph, files: Sequence[ScheduleFile]) -> LoadedGraph:
    """Return ``graph`` with the process groups that its schedule in ``files`` was made for."""
    file = file_of(graph.problem, files)
    return graph if file is None else replace(graph, problem=file.problem_of(graph.problem))


def check_used(files: Sequence[ScheduleFile], problems: Sequence[Problem]) -> None:
    """Raise ``InputError``, with the difference, for a schedule of none of these graphs."""
    for file in files:
        if not any(file.graph["hash"] == problem.graph_hash for problem in problems):
            like = next(
                (problem for problem in problems if problem.name == file.graph["name"]), problems[0]
            )
            bind_schedule(file, like)
            raise InputError(f"{file.path}: the schedule belongs to none of these graphs")


def _as_captured(result: Result) -> Scored:
    """Return the score of the order that the graph has."""
    found = captured_of(result.answer.baselines)
    assert found is not None, "the solver scores every baseline"
    return found


def audit_lines(audit: Audit) -> tuple[str, ...]:
    """Return the distance of the schedule above the bound, the exposed waits with causes, and the
    changes that would help most.
    """
    found = [_verdict(audit)]
    if audit.exposed:
        total = show_us(ticks_to_us(audit.now.exposed_ticks))
        found += [
            f"  exposed, {total} in {len(audit.exposed)} waits:",
            *exposed_lines(audit.exposed),
        ]
    if audit.changes:
        found.append("  changes that would help most, cumulative, each simulated:")
        before = audit.now
        for k, change in enumerate(audit.changes, start=1):
            gain = before.step_time_ticks - change.scored.step_time_ticks
            figures = (
                f"{show_us(ticks_to_us(change.scored.step_time_ticks))}, peak"
                f" {show_bytes(change.scored.peak_memory_bytes)}"
            )
            share = 100 * gain / before.step_time_ticks
            text = _change_text(audit.result.problem, before, change)
            found.append(f"    {k}. {text}: {share:.2f} % shorter ({figures})")
            before = change.scored
    return tuple(found)


def _verdict(audit: Audit) -> str:
    """Return one line on the distance of the schedule above the bound, and on the best known
    schedule.
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


def _change_text(problem: Problem, before: Scored, change: Change) -> str:
    if change.key is None:
        return "the same buckets, launched and waited for elsewhere"
    key = problem.keys[change.key]
    now, then = (_launches(problem, scored, change.key) for scored in (before, change.scored))
    return (
        f"{key.kind} on group {key.group} ({key.dtype}) in {then} launch{'es' if then != 1 else ''}"
        f" instead of {now}, in new places"
    )


def _launches(problem: Problem, scored: Scored, key: int) -> int:
    """Return the number of launches that carry the collectives of ``key``."""
    own = [c for c, collective in enumerate(problem.collectives) if collective.key == key]
    shared = [sum(c in bucket.members for c in own) for bucket in scored.schedule.buckets]
    return len(own) - sum(count - 1 for count in shared if count)


def audit_json(audit: Audit) -> dict[str, Any]:
    """Return the audit for programs."""
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
                "what": _change_text(audit.result.problem, before, change),
                "step_time_us": ticks_to_us(change.scored.step_time_ticks),
                "peak_memory_bytes": change.scored.peak_memory_bytes,
                "num_launches": change.scored.num_launches,
            }
            for before, change in zip(
                (now, *(c.scored for c in audit.changes)), audit.changes, strict=False
            )
        ],
    }
