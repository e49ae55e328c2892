"""The timelines of a run as Chrome trace events, to be opened in Perfetto, beside a trace of the
real job if you like.

Format: "Trace Event Format" (Chromium). Conventions of Kineto, whose traces torch.profiler exports:
microseconds, a thread for each stream under the device's process, work of category ``kernel``, all
other entries of category ``gpu_user_annotation``, launches tied to kernels by flows of category
``ac2g``. Process numbers lie above those that Linux gives (at most 2**22), so that both traces fit
into one file.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from apsched.artifacts.solved_run import SolvedRun
from apsched.config import Caps
from apsched.kinds import CollectiveKind
from apsched.problem.problem import Problem
from apsched.report.binding import step_name
from apsched.report.page.columns import kind_of_step, module_of_step, modules_of
from apsched.report.stall_text import stalls, transfer_name
from apsched.schedule.analysis.moved_compute import moved_compute
from apsched.schedule.schedule import Schedule
from apsched.schedule.simulate import Timeline, Transfer, simulate
from apsched.units import ticks_to_us

FIRST_PROCESS = 10_000_000
COMPUTE_STREAM = 7
"""Number of the stream that torch computes on in traces of CUDA devices."""
FIRST_GROUP_STREAM = 20
_KINETO_NAMES = {
    CollectiveKind.ALL_GATHER: "_allgather_base",
    CollectiveKind.REDUCE_SCATTER: "_reduce_scatter_base",
    CollectiveKind.ALL_REDUCE: "allreduce",
    CollectiveKind.ALL_TO_ALL: "all_to_all",
    CollectiveKind.BROADCAST: "broadcast",
}

Event = dict[str, Any]


def trace(run: SolvedRun) -> bytes:
    """Return the trace of ``run``: for each graph a process as captured and one as solved; the same
    run gives the same bytes.
    """
    return orjson.dumps(
        {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": trace_events(run)}
    )


def trace_events(run: SolvedRun) -> list[Event]:
    """Return the events of ``run``: graph g has the processes ``FIRST_PROCESS`` + 2 g (as captured)
    and + 2 g + 1 (solved), each from 0.
    """
    events: list[Event] = []
    for g, graph in enumerate(run.graphs):
        caps = graph.result.caps
        orders = (
            ("as captured", graph.captured, graph.before),
            ("solved", graph.result.problem, graph.after),
        )
        for o, (label, problem, schedule) in enumerate(orders):
            pid = FIRST_PROCESS + 2 * g + o
            events += _process(pid, f"{problem.name}, {label}", problem, schedule, caps)
    return events


def _process(
    pid: int, name: str, problem: Problem, schedule: Schedule, caps: Caps
) -> Iterator[Event]:
    timeline = simulate(problem, schedule)
    yield _named("process_name", pid, 0, name=f"apsched: {name}")
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    yield _named("thread_name", pid, COMPUTE_STREAM, name=f"stream {COMPUTE_STREAM}: compute")
    sizes = {key.group: key.group_size for key in problem.keys}
    for stream, group in enumerate(problem.streams):
        tid = FIRST_GROUP_STREAM + stream
        yield _named(
            "thread_name",
            pid,
            tid,
            name=f"stream {tid}: group {group} ({sizes.get(group, 0)} process ranks)",
        )
    yield from _compute(pid, problem, schedule, timeline, caps)
    yield from _transfers(pid, problem, timeline)
    yield from _flows(pid, timeline)
    yield from _memory(pid, timeline)


def _named(what: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(
    cat: str,
    name: str,
    pid: int,
    tid: int,
    begin_ticks: int,
    end_ticks: int,
    args: dict[str, object],
) -> Event:
    where = {
        "pid": pid,
        "tid": tid,
        "ts": ticks_to_us(begin_ticks),
        "dur": ticks_to_us(end_ticks - begin_ticks),
    }
    return {"ph": "X", "cat": cat, "name": name, **where, "args": {"stream": tid, **args}}


def _compute(
    pid: int, problem: Problem, schedule: Schedule, timeline: Timeline, caps: Caps
) -> Iterator[Event]:
    """Yield the operations of the compute stream, and its stalls with their causes. Steps without
    length are left out: in Perfetto they would lie inside the entry that begins at the same time.
    If nothing runs behind a wait, its flow leads to a mark at the end.
    """
    moved = moved_compute(problem, schedule)
    why = stalls(problem, schedule, timeline, caps)
    for k, step in enumerate(schedule.steps):
        begin, end = timeline.begin_ticks[k], timeline.end_ticks[k]
        if begin == end:
            continue
        name, module, kind = (
            step_name(problem, step),
            module_of_step(problem, schedule, step),
            kind_of_step(problem, step, moved),
        )
        if k in why:
            args = {"module": module, "why": why[k], "step": k}
            yield _slice(
                "gpu_user_annotation", f"stalls at {name}", pid, COMPUTE_STREAM, begin, end, args
            )
        else:
            yield _slice(
                "kernel",
                name,
                pid,
                COMPUTE_STREAM,
                begin,
                end,
                {"kind": kind, "module": module, "step": k},
            )
    last = timeline.end_ticks[-1]
    if -1 in why:
        args = {"why": why[-1]}
        yield _slice(
            "gpu_user_annotation",
            "stalls at the end of the step",
            pid,
            COMPUTE_STREAM,
            last,
            timeline.step_time_ticks,
            args,
        )
    elif any(_arrival_ticks(timeline, transfer) == last for transfer in timeline.transfers):
        yield _slice("user_annotation", "end of the step", pid, COMPUTE_STREAM, last, last, {})


def _transfers(pid: int, problem: Problem, timeline: Timeline) -> Iterator[Event]:
    for transfer in timeline.transfers:
        key = problem.keys[problem.collectives[transfer.members[0]].key]
        args: dict[str, object] = {
            "Collective name": _KINETO_NAMES.get(key.kind, key.kind),
            "Process Group Name": key.group,
            "Group size": key.group_size,
            "dtype": key.dtype,
            "bytes": transfer.size_bytes,
            "members": len(transfer.members),
            "coalesced": transfer.coalesced,
            "module": modules_of(problem, transfer.members),
        }
        tid = FIRST_GROUP_STREAM + transfer.stream
        yield _slice(
            "kernel",
            transfer_name(problem, transfer),
            pid,
            tid,
            transfer.begin_ticks,
            transfer.end_ticks,
            args,
        )


def _flows(pid: int, timeline: Timeline) -> Iterator[Event]:
    """Yield an arrow from each launch to its transfer, and one from there to where it is waited
    for.

    Each end belongs to the slice that its thread runs then; where one ends and another begins, to
    the latter. Perfetto reads slices before flows of the same time, so an end that is bound to the
    next slice (no ``bp``) would miss the one that begins right then.
    """

    def end(cat: str, ph: str, number: int, tid: int, ticks: int) -> Event:
        bound = {"bp": "e"} if ph == "f" else {}
        return {
            "ph": ph,
            "cat": cat,
            "name": cat,
            "id": number,
            "pid": pid,
            "tid": tid,
            "ts": ticks_to_us(ticks),
            **bound,
        }

    first = (
        pid - FIRST_PROCESS + 1
    ) << 32  # above those of a real trace, which are correlation ids of 32 bits
    for i, transfer in enumerate(timeline.transfers):
        tid, number = FIRST_GROUP_STREAM + transfer.stream, first + 2 * i + 1
        yield end("ac2g", "s", number, COMPUTE_STREAM, timeline.begin_ticks[transfer.start_step])
        yield end("ac2g", "f", number, tid, transfer.begin_ticks)
        yield end("wait", "s", number + 1, tid, transfer.begin_ticks)
        yield end("wait", "f", number + 1, COMPUTE_STREAM, _arrival_ticks(timeline, transfer))


def _arrival_ticks(timeline: Timeline, transfer: Transfer) -> int:
    """Return the target of the arrow from a transfer: its stall; the operation after the wait, if
    that does not stall, or has stalled since before the transfer began (Perfetto turns arrows round
    that lead to an earlier begin).
    """
    begin, end = timeline.begin_ticks[transfer.wait_step], timeline.end_ticks[transfer.wait_step]
    return begin if begin >= transfer.begin_ticks else max(end, transfer.begin_ticks)


def _memory(pid: int, timeline: Timeline) -> Iterator[Event]:
    """Yield the live bytes; where several steps begin at one time, the most of them, so that the
    peak is seen.
    """
    most: dict[int, int] = {}
    for begin, live in zip(timeline.begin_ticks, timeline.live_bytes, strict=True):
        most[begin] = max(most.get(begin, 0), live)
    for begin, live in most.items():
        yield {
            "ph": "C",
            "cat": "memory",
            "name": "live bytes",
            "pid": pid,
            "tid": 0,
            "ts": ticks_to_us(begin),
            "args": {"bytes": live},
        }
