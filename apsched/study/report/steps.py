"""Forward and backward of a study as one step, where parameters are kept from one to the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apsched.names import direction_named, is_in_node
from apsched.quantities import show_bytes, show_us
from apsched.study.report.across import Line
from apsched.study.store import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step under one memory cap; of a step that does not fit, times and peak are ``None``."""

    labels: Mapping[str, str]
    memory_cap: str
    """As stated."""
    memory_cap_bytes: int | None
    step_time_us: float | None
    bound_us: float
    """Bound of both graphs with the parameters kept here; another choice may lie below."""
    peak_memory_bytes: int | None
    kept_bytes: int
    kept: tuple[str, ...]
    """Names of the parameters kept; with ``@node`` those resharded in their node."""


def steps_of(lines: Sequence[Line]) -> tuple[StepPoint, ...]:
    """Return the steps of ``lines`` whose forward and backward are answered under the same cap;
    none if no line has kept parameters.
    """
    if not any("keep" in point.described for line in lines for point in line.points):
        return ()
    together: dict[tuple[tuple[str, str], ...], list[Line]] = {}
    for line in lines:
        together.setdefault(tuple(line.labels.items()), []).append(line)
    found: list[StepPoint] = []
    for labels, lines in together.items():
        if sorted(str(direction_named(line.graph)) for line in lines) != ["backward", "forward"]:
            continue
        one, other = sorted(lines, key=lambda line: str(direction_named(line.graph)), reverse=True)
        backward = {point.memory_cap: point for point in other.points}
        found += [
            _step(dict(labels), point, backward[point.memory_cap])
            for point in one.points
            if point.memory_cap in backward
        ]
    return tuple(found)


def _step(labels: Mapping[str, str], forward: Point, backward: Point) -> StepPoint:
    times = forward.step_time_us, backward.step_time_us
    fits = None not in times
    caps = [point.outcome.memory_cap_bytes for point in (forward, backward)]
    return StepPoint(
        labels=labels,
        memory_cap=forward.memory_cap,
        memory_cap_bytes=min((cap for cap in caps if cap is not None), default=None),
        step_time_us=sum(us or 0.0 for us in times) if fits else None,
        bound_us=forward.bound_us + backward.bound_us,
        peak_memory_bytes=max(p.outcome.peak_memory_bytes or 0 for p in (forward, backward))
        if fits
        else None,
        kept_bytes=kept_bytes(backward),
        kept=tuple(backward.graph.kept.get("names", ())),
    )


def kept_bytes(point: Point) -> int:
    """Return the bytes that are kept from forward to backward."""
    return int(point.graph.kept.get("bytes", 0))


def step_text(step: StepPoint) -> str:
    """Return one step as a line."""
    labels = "".join(f", {name} {value}" for name, value in step.labels.items())
    cap = "none" if step.memory_cap_bytes is None else show_bytes(step.memory_cap_bytes)
    head = f"step{labels}, memory cap {cap}: "
    if step.step_time_us is None:
        return f"{head}none fits"
    in_node = sum(map(is_in_node, step.kept))
    whole = len(step.kept) - in_node
    return (
        f"{head}{show_us(step.step_time_us)}, peak {show_bytes(step.peak_memory_bytes)};"
        f" {show_bytes(step.kept_bytes)} kept from forward to backward ({whole}"
        f" parameter{'s' if whole != 1 else ''}"
        f"{f', {in_node} resharded in their node' if in_node else ''})"
    )


def step_json(step: StepPoint) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "labels": dict(step.labels),
        "memory_cap": step.memory_cap,
        "memory_cap_bytes": step.memory_cap_bytes,
        "step_time_us": step.step_time_us,
        "bound_us": step.bound_us,
        "peak_memory_bytes": step.peak_memory_bytes,
        "kept_bytes": step.kept_bytes,
        "kept": list(step.kept),
    }
