"""The timelines of a run and a profile of the real job in one trace.

A step of the profile is chosen (``ProfilerStep#N``, which ``prof.step()`` marks). Each graph is
shifted so that its first transfer begins where that of the job does: the collectives of the step,
in order of their begin, are those of forward, then those of backward, as many of each kind as the
schedule has. Where their numbers are those of no order of the run (another model, other buckets),
graphs are laid end to end from the begin of the step, which the answer says.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from apsched.artifacts.solved_run import SolvedGraph, SolvedRun
from apsched.calibrate.profile.messages import KIND_OF_NAME, is_nccl
from apsched.calibrate.profile.trace import GLOO, STEP, Work, read_chrome_trace
from apsched.errors import InputError
from apsched.kinds import CollectiveKind
from apsched.report.trace import FIRST_PROCESS, trace_events
from apsched.schedule.simulate import Timeline, simulate
from apsched.units import TICKS_PER_US, ticks_to_us

ORDERS = ("as captured", "solved")
_NAMES_OF_KERNELS = {
    "allgather": CollectiveKind.ALL_GATHER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
    "allreduce": CollectiveKind.ALL_REDUCE,
    "sendrecv": CollectiveKind.ALL_TO_ALL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Both traces in one."""

    content: bytes
    matched: str
    """The order that has the collectives of the job's step: one of :data:`ORDERS`; empty for
    none.
    """
    step: int | None
    """The number of that step; ``None`` where the profile marks none."""


def trace_beside(run: SolvedRun, path: str | Path, step: int | None = None) -> Beside:
    """Return the trace of ``run`` and that in ``path``; events of the latter stay as they are.
    ``InputError`` where it is none.
    """
    real = read_chrome_trace(Path(path))
    content: dict[str, Any] = real if isinstance(real, dict) else {"traceEvents": real}
    events = content.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InputError(
            f"{path}: expected a Chrome trace with traceEvents, as torch.profiler's"
            " export_chrome_trace writes; found none"
        )
    try:
        spans = [
            event
            for event in events
            if event.get("ph") == "X" and float(event["ts"]) + float(event["dur"]) >= 0
        ]
        number, begin, end = _step_of(spans, step, path)
        happened = _collectives(spans, begin, end)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}: expected events as torch.profiler writes them, found {type(error).__name__}:"
            f" {error}"
        ) from None
    timelines = {order: [_timeline(graph, order) for graph in run.graphs] for order in ORDERS}
    on_gloo = any(str(event.get("name", "")).startswith(GLOO) for event in spans)
    kinds = Counter(_as_run(kind, on_gloo=on_gloo) for kind, _ in happened)
    matched = next(
        (
            order
            for order in reversed(ORDERS)
            if kinds and kinds == _kinds(run, timelines[order], on_gloo=on_gloo)
        ),
        "",
    )
    shifts = _shifts(
        timelines[matched or ORDERS[1]], [at for _, at in happened] if matched else (), begin
    )
    ours = [
        {**event, "ts": _shifted(event["ts"], shifts[(event["pid"] - FIRST_PROCESS) // 2])}
        for event in trace_events(run)
    ]
    return Beside(
        content=orjson.dumps({**content, "traceEvents": [*events, *ours]}),
        matched=matched,
        step=number,
    )


def _timeline(graph: SolvedGraph, order: str) -> Timeline:
    return (
        simulate(graph.captured, graph.before)
        if order == ORDERS[0]
        else simulate(graph.result.problem, graph.after)
    )


def _as_run(kind: str, *, on_gloo: bool) -> str:
    """Return the kind that a trace shows: gloo has no reduce-scatter, and runs an all-reduce in its
    place.
    """
    return CollectiveKind.ALL_REDUCE if on_gloo and kind == CollectiveKind.REDUCE_SCATTER else kind


def _kinds(run: SolvedRun, timelines: Sequence[Timeline], *, on_gloo: bool) -> Counter[str]:
    """Return the number of collectives of each kind that the graphs launch, as a trace shows
    them.
    """
    found = Counter[str]()
    for graph, timeline in zip(run.graphs, timelines, strict=True):
        problem = graph.result.problem
        kinds = (
            problem.keys[problem.collectives[t.members[0]].key].kind for t in timeline.transfers
        )
        found.update(_as_run(kind, on_gloo=on_gloo) for kind in kinds)
    return found


def _shifts(
    timelines: Sequence[Timeline], happened: Sequence[float], step_begin_us: float
) -> list[int]:
    """Return by how many ticks to shift each graph: its first transfer to the job's, or graphs end
    to end from the begin of the step.
    """
    shifts: list[int] = []
    first, begin = 0, round(step_begin_us * TICKS_PER_US)
    for timeline in timelines:
        if happened and timeline.transfers:
            begin = round(happened[first] * TICKS_PER_US) - min(
                t.begin_ticks for t in timeline.transfers
            )
            first += len(timeline.transfers)
        shifts.append(begin)
        begin += timeline.step_time_ticks
    return shifts


def _shifted(at_us: float, shift_ticks: int) -> float:
    """Return the time ``at_us`` of ours in the profile, such that a reader who multiplies it by
    1000 and rounds has its tick again.

    Profiles count from up to three months ago, where floats lie up to a nanosecond (2**-10 us)
    apart: slices that touch would overlap by one, and readers drop those. So sums are those of
    ticks; and where the product lies halfway to the next tick (which such floats do from 2**42 us
    on), the float below is taken.
    """
    ticks = round(at_us * TICKS_PER_US) + shift_ticks
    shifted = ticks_to_us(ticks)
    return shifted if shifted * TICKS_PER_US - ticks < 0.5 else math.nextafter(shifted, 0.0)


def _step_of(
    spans: Sequence[Mapping[str, Any]], wanted: int | None, path: str | Path
) -> tuple[int | None, float, float]:
    """Return number, begin and end of the step ``wanted`` (else of the last); the whole trace where
    it marks none.
    """
    steps = {}
    for event in spans:
        name = str(event.get("name", ""))
        if name.startswith(STEP) and event.get("cat") != "gpu_user_annotation":
            steps[int(name.removeprefix(STEP))] = (
                float(event["ts"]),
                float(event["ts"]) + float(event["dur"]),
            )
    if wanted is not None and wanted not in steps:
        raise InputError(
            f"--step: expected a step that {path} marks, found {wanted}; it has"
            f" {', '.join(map(str, sorted(steps))) or 'none'}"
        )
    if not steps:
        begins = [float(event["ts"]) for event in spans if isinstance(event.get("pid"), int)]
        return None, min(begins, default=0.0), float("inf")
    number = max(steps) if wanted is None else wanted
    return number, *steps[number]


def _collectives(
    spans: Sequence[Mapping[str, Any]], begin: float, end: float
) -> list[tuple[str, float]]:
    """Return kind and begin of the collectives in a span of time: transfers of gloo, kernels of
    NCCL.
    """
    found = []
    for event in spans:
        at = float(event["ts"])
        if begin <= at < end and (kind := _kind(event)):
            found.append((kind, at))
    return sorted(found, key=lambda one: one[1])


def _kind(event: Mapping[str, Any]) -> str:
    """Return the kind of collective that an event is; empty for none (barriers, point to point)."""
    name, args = str(event.get("name", "")), event.get("args", {})
    if name.startswith(GLOO):
        return KIND_OF_NAME.get(name.removeprefix(GLOO).lower(), "")
    if event.get("cat") != "kernel" or not is_nccl(Work(name, 0.0, 0.0, -1, args)):
        return ""
    collective_name = str(args.get("Collective name", "")).lower()
    return KIND_OF_NAME.get(collective_name) or next(
        (kind for part, kind in _NAMES_OF_KERNELS.items() if part in name.lower().replace("_", "")),
        "",
    )
