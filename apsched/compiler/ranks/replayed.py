"""Schedule files in place of the solver."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from apsched.artifacts.schedule_file import ScheduleFile, bind_schedule, load_schedule
from apsched.config import Caps
from apsched.errors import InputError
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored, SolvedBy, SolveResult
from apsched.schedule.score import scored
from apsched.schedule.verify import verify


def schedule_files(
    stated: str | PathLike[str] | Sequence[str | PathLike[str]] | None,
) -> tuple[ScheduleFile, ...]:
    """Return the schedule files of a path, of several, or of directories (``*.schedule.json``);
    ``InputError`` where there is none.
    """
    if stated is None:
        return ()
    files: list[ScheduleFile] = []
    for path in paths_of(stated):
        inside = sorted(path.glob("*.schedule.json")) if path.is_dir() else [path]
        if not inside:
            raise InputError(
                f"{path}: expected schedule files (*.schedule.json) in this directory, found none;"
                " write them with apsched solve"
            )
        files += map(load_schedule, inside)
    if not files:
        raise InputError(f"schedule: expected schedule files, found {stated!r}")
    return tuple(files)


def paths_of(stated: str | PathLike[str] | Sequence[str | PathLike[str]]) -> tuple[Path, ...]:
    """Return the stated path, or the stated paths."""
    return tuple(map(Path, [stated] if isinstance(stated, str | PathLike) else stated))


def replayed(problem: Problem, caps: Caps, files: Sequence[ScheduleFile]) -> SolveResult:
    """Return the schedule file of this graph as an answer; ``InputError`` with the difference if
    none is of this graph.
    """
    file = next((f for f in files if f.graph["hash"] == problem.graph_hash), None)
    if file is None:
        file = _nearest(problem, files)
    schedule = bind_schedule(file, problem)
    if wrong := verify(problem, schedule, file.caps):
        raise InputError(
            f"{file.path}: not a schedule of this graph within its caps: {'; '.join(wrong[:3])};"
            " solve the graph again"
        )
    if wrong := verify(problem, schedule, caps):
        raise InputError(
            f"{file.path}: its schedule breaks the caps of this job: {'; '.join(wrong[:3])};"
            " solve again with these caps"
        )
    best = scored(problem, "replayed", schedule)
    return answer_of(best, f"none: replayed from {file.path}", SolvedBy.SCHEDULE_FILE)


def _nearest(problem: Problem, files: Sequence[ScheduleFile]) -> ScheduleFile:
    """Return the file of a graph with the name of ``problem`` that has nearly as many nodes."""
    named = [file for file in files if file.graph["name"] == problem.name]
    if not named and len(files) > 1:
        known = ", ".join(dict.fromkeys(repr(file.graph["name"]) for file in files))
        raise InputError(
            f"schedule: expected a schedule of each graph of the job, found none of"
            f" {problem.name!r} ({problem.num_nodes} nodes), only of {known}; record a run that"
            " also compiles this graph (an evaluation and each batch size have graphs of their"
            " own), and solve it again"
        )

    def distance(file: ScheduleFile) -> int:
        count = file.graph.get("num_nodes")
        return abs(count - problem.num_nodes) if isinstance(count, int) else problem.num_nodes

    return min(named or files, key=distance)


def answer_of(best: Scored, bound_source: str, solved_by: str) -> SolveResult:
    """Return ``best`` as an answer without proofs; ``bound_source`` is the reason."""
    return SolveResult.found(
        best,
        bound_ticks=0,
        bound_source=bound_source,
        baselines=(),
        floor_memory_bytes=best.peak_memory_bytes,
        floor_bound_bytes=0,
        fastest_ticks=best.step_time_ticks,
        time_limit_ticks=best.step_time_ticks,
        peak_bound_bytes=0,
        launches_bound=0,
        solved_by=solved_by,
    )
