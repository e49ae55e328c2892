"""The graphs of a study as one step, where parameters are kept."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from apsched.names import IN_NODE, NEXT, SUM, SUM_SHARDS, direction_named, mark_of
from apsched.pipeline.load import JOINT
from apsched.quantities import show_bytes, show_us
from apsched.study.report.across import Line
from apsched.study.rows import Point
from apsched.units import ticks_to_us


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One step under one memory cap; of a step that does not fit, times and peak are ``None``."""

    labels: Mapping[str, str]
    num_micro_batches: int
    memory_cap: str
    """As stated."""
    memory_cap_bytes: int | None
    """The smallest cap of its graphs; of ``floor``, which each graph has for itself, the largest,
    which the step keeps.
    """
    least_cap_bytes: int | None
    """The smallest cap of its graphs."""
    step_time_us: float | None
    bound_us: float
    """Bound of all graphs under the choice made here; another choice may lie below."""
    peak_memory_bytes: int | None
    kept_bytes: int
    """Passed from forward to backward."""
    kept: tuple[str, ...]
    """Entries of the choice, as a ``--keep`` file has them."""


def steps_of(lines: Sequence[Line]) -> tuple[StepPoint, ...]:
    """Return the steps of ``lines`` whose graphs are all answered under the same cap; none if no
    line has kept parameters.
    """
    if not any("keep" in point.described for line in lines for point in line.points):
        return ()
    together: dict[tuple[tuple[str, str], ...], dict[str, list[Point]]] = {}
    for line in lines:
        of_setting = together.setdefault(tuple(line.labels.items()), {})
        for point in line.points:
            of_setting.setdefault(point.memory_cap, []).append(point)
    found: list[StepPoint] = []
    for labels, along_caps in together.items():
        whole = (points for points in along_caps.values() if _is_whole(points))
        found += sorted((_step(dict(labels), points) for points in whole), key=_cap)
    return tuple(found)


def _cap(step: StepPoint) -> float:
    return inf if step.memory_cap_bytes is None else step.memory_cap_bytes


def _is_whole(points: Sequence[Point]) -> bool:
    """Return whether ``points`` are all graphs of a step."""
    several: int = points[0].described.get("accumulate", 1)
    counts = Counter[str]()
    for point in points:
        name = direction_named(point.graph.name) or point.graph.name
        counts[name] += point.graph.in_step.num_micro_batches
    return counts[JOINT] == several or counts["forward"] == counts["backward"] == several


def _step(labels: Mapping[str, str], points: Sequence[Point]) -> StepPoint:
    fits = all(point.step_time_us is not None for point in points)
    caps = [p.outcome.memory_cap_bytes for p in points if p.outcome.memory_cap_bytes is not None]
    is_floor = points[0].memory_cap.startswith("floor")
    counts = [point.graph.in_step.num_micro_batches for point in points]
    counted = [(count, p.outcome) for count, p in zip(counts, points, strict=True)]
    step_ticks = sum(count * (outcome.step_ticks or 0) for count, outcome in counted)
    in_step = points[0].graph.in_step
    return StepPoint(
        labels=labels,
        num_micro_batches=points[0].described.get("accumulate", 1),
        memory_cap=points[0].memory_cap,
        memory_cap_bytes=(max if is_floor else min)(caps, default=None),
        least_cap_bytes=min(caps, default=None),
        step_time_us=ticks_to_us(step_ticks) if fits else None,
        bound_us=ticks_to_us(sum(count * outcome.bound_ticks for count, outcome in counted)),
        peak_memory_bytes=max(p.outcome.peak_memory_bytes or 0 for p in points) if fits else None,
        kept_bytes=in_step.kept_bytes,
        kept=in_step.kept,
    )


def step_text(step: StepPoint) -> str:
    """Return one step as a line."""
    labels = "".join(f", {name} {value}" for name, value in step.labels.items())
    several = step.num_micro_batches
    whole_step = f"step of {several} micro-batches" if several > 1 else "step"
    head = f"{whole_step}{labels}, {_caps_text(step)}: "
    if step.step_time_us is None:
        return f"{head}none fits"
    marks = [mark_of(entry) for entry in step.kept]
    whole, in_node = marks.count(""), marks.count(IN_NODE)
    others = (f"; {marks.count(mark)} {words}" for mark, words in _SHARED.items() if mark in marks)
    return (
        f"{head}{show_us(step.step_time_us)}, peak {show_bytes(step.peak_memory_bytes)};"
        f" {show_bytes(step.kept_bytes)} kept from forward to backward ({whole}"
        f" parameter{'s' if whole != 1 else ''}"
        f"{f', {in_node} resharded in their node' if in_node else ''}){''.join(others)}"
    )


def _caps_text(step: StepPoint) -> str:
    if step.memory_cap_bytes is None:
        return "memory cap none"
    caps = (show_bytes(step.least_cap_bytes), show_bytes(step.memory_cap_bytes))
    return f"memory cap {caps[1]}" if len({*caps}) == 1 else "memory caps {} to {}".format(*caps)


_SHARED = {
    NEXT: "gathered until the next micro-batch",
    SUM: "with gradients reduced once",
    SUM_SHARDS: "with shards of gradients all-reduced once",
}


def step_json(step: StepPoint) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "labels": dict(step.labels),
        "num_micro_batches": step.num_micro_batches,
        "memory_cap": step.memory_cap,
        "memory_cap_bytes": step.memory_cap_bytes,
        "least_cap_bytes": step.least_cap_bytes,
        "step_time_us": step.step_time_us,
        "bound_us": step.bound_us,
        "peak_memory_bytes": step.peak_memory_bytes,
        "kept_bytes": step.kept_bytes,
        "kept": list(step.kept),
    }
