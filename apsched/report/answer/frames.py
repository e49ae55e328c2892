"""A result as tables of pandas (extra ``apsched[pandas]``)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from apsched.errors import InputError
from apsched.pipeline.result import Result
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.simulate import Timeline
from apsched.units import ticks_to_us

if TYPE_CHECKING:
    from pandas import DataFrame

TABLES = ("schedule", "launches")


def frame_of(result: Result, what: str) -> "DataFrame":
    """Return a table of ``result``, of :data:`TABLES`, as a data frame."""
    if what not in TABLES:
        raise InputError(f"to_frame: expected {' or '.join(map(repr, TABLES))}; found {what!r}")
    if result.schedule is None or result.timeline is None:
        raise InputError(f"to_frame: {result.problem.name} has no schedule: no caps are kept")
    rows = _launches if what == "launches" else _steps
    return frame(rows(result.problem, result.schedule, result.timeline))


def frame(rows: Sequence[Mapping[str, Any]]) -> "DataFrame":
    """Return ``rows`` as a data frame; ``InputError`` without pandas."""
    try:
        import pandas
    except ImportError:
        raise InputError("data frames need pandas: install apsched[pandas]") from None
    return pandas.DataFrame(list(rows))


def _steps(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "step": k,
            "kind": step.kind.name.lower(),
            "name": _name(problem, schedule, step),
            "begin_us": ticks_to_us(timeline.begin_ticks[k]),
            "end_us": ticks_to_us(timeline.end_ticks[k]),
            "live_bytes": timeline.live_bytes[k],
            "in_flight_bytes": timeline.in_flight_bytes[k],
        }
        for k, step in enumerate(schedule.steps)
    ]


def _name(problem: Problem, schedule: Schedule, step: Step) -> str:
    """Return the name of a node, or those of the start nodes of a bucket."""
    match step.kind:
        case StepKind.NODE:
            return problem.node_names[step.index]
        case StepKind.COPY_OUT:
            members: tuple[int, ...] = (step.index,)
        case _:
            members = schedule.buckets[step.index].members
    return " + ".join(problem.node_names[problem.collectives[c].start] for c in members)


def _launches(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[dict[str, Any]]:
    del schedule  # transfers have their members
    rows = []
    for transfer in timeline.transfers:
        members = [problem.collectives[c] for c in transfer.members]
        key = problem.keys[members[0].key]
        rows.append(
            {
                "kind": str(key.kind),
                "group": problem.streams[transfer.stream],
                "group_size": key.group_size,
                "dtype": key.dtype,
                "members": len(members),
                "serves": " + ".join(c.module or problem.node_names[c.start] for c in members),
                "size_bytes": sum(c.size_bytes for c in members),
                "begin_us": ticks_to_us(transfer.begin_ticks),
                "end_us": ticks_to_us(transfer.end_ticks),
            }
        )
    return rows
