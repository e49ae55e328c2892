"""The critical path of a result summed up, as text and numbers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from apsched.pipeline.result import Result
from apsched.problem.problem import Problem
from apsched.quantities import show_bytes
from apsched.schedule.analysis.critical_path import Cause, Stretch, Where
from apsched.schedule.schedule import Step, StepKind
from apsched.units import ticks_to_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One owner of step time."""

    label: str
    ticks: int
    exposed_ticks: int
    """Of it, the time that the compute stream stalls."""
    stretches: tuple[Stretch, ...]


def shares(result: Result) -> tuple[Share, ...]:
    """Return the owners of the step time with their shares, the largest first; they add up to
    it.
    """
    path = result.path
    assert path is not None
    found = [
        Share(label="compute", ticks=path.compute_ticks, exposed_ticks=0, stretches=()),
        Share(
            label="launches, copies, casts",
            ticks=path.overhead_ticks,
            exposed_ticks=0,
            stretches=(),
        ),
    ]
    groups: dict[tuple[Where, int], list[Stretch]] = {}
    for stretch in path.stretches:
        groups.setdefault((stretch.where, stretch.stream), []).append(stretch)
    found += [
        _share(result.problem, where, stream, of_share)
        for (where, stream), of_share in groups.items()
    ]
    return tuple(sorted((share for share in found if share.ticks), key=lambda share: -share.ticks))


def _share(problem: Problem, where: Where, stream: int, of_share: Iterable[Stretch]) -> Share:
    of_share = tuple(of_share)
    group = f"group {problem.streams[stream]}"
    label = {
        Where.HEAD: f"head: first of {group}",
        Where.MIDDLE: f"{group} busy",
        Where.TAIL: f"tail: last of {group}",
    }[where]
    return Share(
        label=label,
        ticks=sum(s.ticks for s in of_share),
        exposed_ticks=sum(s.exposed_ticks for s in of_share),
        stretches=of_share,
    )


def binds_line(result: Result) -> str:
    """Return one line with the owners of the step time, and the node at which memory is full."""
    path = result.path
    assert path is not None
    parts = [
        f"{share.label} {_percent(share.ticks, path.step_time_ticks)}" for share in shares(result)
    ]
    full = f"; memory full at {full_node(result)}" if path.full_step >= 0 else ""
    return f"  rests on: {', '.join(parts)}{full}"


def full_node(result: Result) -> str:
    """Return the name of the first step where memory leaves no room for the next gather."""
    assert result.path is not None
    assert result.best is not None
    return step_name(result.problem, result.best.schedule.steps[result.path.full_step])


def step_name(problem: Problem, step: Step) -> str:
    """Return the usual name of a step."""
    if step.kind is StepKind.NODE:
        return problem.node_names[step.index]
    if step.kind is StepKind.COPY_OUT:
        return f"copy-out of {problem.node_names[problem.collectives[step.index].start]}"
    return f"{step.kind.name.lower().replace('_', '-')} of bucket {step.index}"


def where_text(result: Result, share: Share) -> str:
    """Return the place of the longest stretch of ``share``, its first transfer, and the reason why
    it does not begin sooner.
    """
    if not share.stretches:
        return ""
    longest = max(share.stretches, key=lambda s: (s.ticks, -s.begin_ticks))
    num = len(share.stretches)
    begin, end = ticks_to_us(longest.begin_ticks) / 1000, ticks_to_us(longest.end_ticks) / 1000
    count = len(longest.transfers)
    which = "" if num == 1 else f"longest of {num}: "
    return (
        f"{which}{begin:,.3f} to {end:,.3f} ms,"
        f" {f'{count} transfers from ' if count > 1 else ''}{_first_name(result, longest)}"
        f"{_because(result, longest)}"
    )


def _first_name(result: Result, stretch: Stretch) -> str:
    """Return the module, or else the node, of the first collective of ``stretch``."""
    assert result.timeline is not None
    members = result.timeline.transfers[stretch.transfers[0]].members
    first = result.problem.collectives[members[0]]
    kind = result.problem.keys[first.key].kind
    return f"{kind} of {first.module or result.problem.node_names[first.start]}" + (
        f" (+{len(members) - 1})" if len(members) > 1 else ""
    )


def _because(result: Result, stretch: Stretch) -> str:
    assert result.best is not None
    at = step_name(result.problem, result.best.schedule.steps[stretch.at_step])
    reasons = {
        Cause.DATA: "input made right before",
        Cause.MEMORY: f"sooner it would break the memory cap at {at}",
        Cause.IN_FLIGHT: f"sooner it would break the in-flight cap at {at}",
        Cause.PREFETCH: f"sooner it would break the prefetch cap at {at}",
    }
    return f"; {reasons[stretch.cause]}" if stretch.cause in reasons else ""


def path_json(result: Result) -> dict[str, Any] | None:
    """Return the critical path for programs; ``None`` where there is no schedule."""
    path, best = result.path, result.best
    if path is None or best is None:
        return None
    return {
        "compute_us": ticks_to_us(path.compute_ticks),
        "launches_copies_us": ticks_to_us(path.overhead_ticks),
        "transfers": [
            {
                "group": result.problem.streams[share.stretches[0].stream],
                "where": str(share.stretches[0].where),
                "us": ticks_to_us(share.ticks),
                "exposed_us": ticks_to_us(share.exposed_ticks),
            }
            for share in shares(result)
            if share.stretches
        ],
        "memory_full_at": full_node(result) if path.full_step >= 0 else None,
    }


def memory_text(result: Result) -> str:
    """Return the place where memory leaves no room for the next gather; empty if there is none."""
    if result.path is None or result.path.full_step < 0 or result.timeline is None:
        return ""
    live = result.timeline.live_bytes[result.path.full_step]
    return (
        f"memory is full at {full_node(result)}: {show_bytes(live)} alive, cap"
        f" {show_bytes(result.caps.memory_cap_bytes)}; the next gather does not fit, and a stall"
        " follows"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0 %"
