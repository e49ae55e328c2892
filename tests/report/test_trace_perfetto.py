"""The trace in Perfetto's own trace processor, by its Python package: nothing is dropped or moved,
and SQL says what the timelines say.
"""

from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from apsched.artifacts.solved_run import SolvedRun, load_run
from apsched.config import Caps
from apsched.report.stall_text import transfer_name
from apsched.report.trace import (
    COMPUTE_STREAM,
    FIRST_GROUP_STREAM,
    FIRST_PROCESS,
    trace,
    trace_events,
)
from apsched.report.trace_beside_profile import trace_beside
from apsched.schedule.simulate import Timeline, simulate
from tests.helpers.perfetto_engine import loaded, needs_engine
from tests.helpers.problems.by_hand import ByHand, line, schedule

pytestmark = needs_engine

BAD = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SLICES = """
    select pid, tid, slice.ts as ts, dur, slice.name as name, depth, category
    from slice join thread_track on slice.track_id = thread_track.id
        join thread using (utid) join process using (upid)
    order by slice.id
"""
COUNTERS = """
    select pid, counter.ts as ts, value, track.name as name
    from counter join process_counter_track as track on counter.track_id = track.id
        join process using (upid)
    order by counter.id
"""
FLOWS = """
    select pid, tid, extract_arg(flow.arg_set_id, 'cat') as cat, source.ts as from_ts,
        source.name as from_name, sink.name as to_name,
        extract_arg(source.arg_set_id, 'args.step') as from_step,
        extract_arg(sink.arg_set_id, 'args.step') as to_step,
        sink.ts as to_ts, sink.ts + sink.dur as to_end
    from flow join slice as source on flow.slice_out = source.id
        join slice as sink on flow.slice_in = sink.id
        join thread_track on source.track_id = thread_track.id
        join thread using (utid) join process using (upid)
"""


@pytest.fixture(scope="module")
def solved(debug_run: Path) -> SolvedRun:
    return load_run(debug_run)


@pytest.fixture(scope="module")
def timelines(solved: SolvedRun) -> dict[int, Timeline]:
    found = {}
    for g, graph in enumerate(solved.graphs):
        found[FIRST_PROCESS + 2 * g] = simulate(graph.captured, graph.before)
        found[FIRST_PROCESS + 2 * g + 1] = simulate(graph.result.problem, graph.after)
    return found


@pytest.fixture(scope="module")
def processor(solved: SolvedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    path.write_bytes(trace(solved))
    with loaded(path) as processor:
        yield processor


def _slices(processor: Any) -> list[tuple[Any, ...]]:
    """Return the slices of this program; each lies on its thread, in no other slice."""
    rows = [row for row in processor.query(SLICES) if row.pid >= FIRST_PROCESS]
    assert {row.depth for row in rows} == {0}
    return sorted((row.pid, row.tid, row.ts, row.dur, row.name) for row in rows)


def _written(solved: SolvedRun) -> list[tuple[Any, ...]]:
    events = [event for event in trace_events(solved) if event["ph"] == "X"]
    return sorted(
        (e["pid"], e["tid"], round(1000 * e["ts"]), round(1000 * e["dur"]), e["name"])
        for e in events
    )  # a tick is a nanosecond


def test_nothing_is_dropped_or_moved(processor: Any, solved: SolvedRun) -> None:
    assert [(row.name, row.value) for row in processor.query(BAD)] == []
    assert _slices(processor) == _written(solved)


def test_streams_are_threads_that_do_what_the_timelines_say(
    processor: Any, timelines: dict[int, Timeline]
) -> None:
    slices = _slices(processor)
    for pid, timeline in timelines.items():
        sent = sorted(
            (FIRST_GROUP_STREAM + t.stream, t.begin_ticks, t.end_ticks - t.begin_ticks)
            for t in timeline.transfers
        )
        assert [
            (tid, ts, dur) for p, tid, ts, dur, _ in slices if p == pid and tid != COMPUTE_STREAM
        ] == sent
        busy = sum(
            dur
            for p, tid, _, dur, name in slices
            if p == pid and tid == COMPUTE_STREAM and not name.startswith("stalls at ")
        )
        assert busy == timeline.step_time_ticks - timeline.exposed_ticks
    names = {
        row.tid: row.name
        for row in processor.query(
            "select tid, thread.name as name from thread where tid > 0 and name is not null"
        )
    }
    assert names == {
        COMPUTE_STREAM: "stream 7: compute",
        FIRST_GROUP_STREAM: "stream 20: group 0 (4 process ranks)",
    }


def test_flows_lead_from_each_launch_to_its_transfer_and_on_to_the_wait(
    processor: Any, solved: SolvedRun, timelines: dict[int, Timeline]
) -> None:
    """By the slices that they are bound to, which no trace says, but the engine finds."""
    rows = list(processor.query(FLOWS))
    (flows,) = processor.query("select count(*) as number from flow")
    assert len(rows) == flows.number
    launched = [
        (row.pid, row.from_step, row.to_name, row.to_ts, row.to_end)
        for row in rows
        if row.cat == "ac2g"
    ]
    awaited = [
        (row.pid, row.from_name, row.from_ts, row.to_step, row.to_ts)
        for row in rows
        if row.cat == "wait"
    ]
    problems = [
        problem for graph in solved.graphs for problem in (graph.captured, graph.result.problem)
    ]
    expected_launched, expected_awaited = [], []
    for (pid, timeline), problem in zip(timelines.items(), problems, strict=True):
        for t in timeline.transfers:
            name = transfer_name(problem, t)
            expected_launched.append((pid, t.start_step, name, t.begin_ticks, t.end_ticks))
            assert timeline.begin_ticks[t.wait_step] >= t.begin_ticks, (
                "expected no wait for what is still queued"
            )
            behind = range(t.wait_step, len(timeline.end_ticks))  # the wait itself, where it stalls
            step = next(
                (k for k in behind if timeline.end_ticks[k] > timeline.begin_ticks[k]), None
            )
            expected_awaited.append(
                (pid, name, t.begin_ticks, step, timeline.begin_ticks[t.wait_step])
            )
    assert sorted(launched) == sorted(expected_launched)
    assert Counter(awaited) == Counter(
        expected_awaited
    )  # where nothing is behind, there is no step: not sorted
    assert {row.to_name.startswith("stalls at ") for row in rows if row.cat == "wait"} == {
        True,
        False,
    }


def test_the_counter_has_the_live_bytes(processor: Any, timelines: dict[int, Timeline]) -> None:
    rows = list(processor.query(COUNTERS))
    assert {row.name for row in rows} == {"live bytes bytes"}  # counter and series
    for pid, timeline in timelines.items():
        most: dict[int, int] = {}
        for begin, live in zip(timeline.begin_ticks, timeline.live_bytes, strict=True):
            most[begin] = max(most.get(begin, 0), live)
        assert {row.ts: row.value for row in rows if row.pid == pid} == most
        assert max(most.values()) == timeline.peak_memory_bytes


def test_flows_lead_to_what_runs_behind_steps_without_length_and_never_back(tmp_path: Path) -> None:
    """Launches are free. The wait for second stalls since before that begins, and the wait for
    first, behind all others, not at all.
    """
    hand = ByHand(prices={"all_gather": line(10)})
    starts = [
        hand.start("all_gather", name, hand.input(of, 1024), 1024, 2048)
        for name, of in (("first", "u"), ("second", "v"), ("third", "w"))
    ]
    waits = [hand.wait(f"{hand.names[start]}_wait", start) for start in starts]
    problem = hand.output(hand.compute("a", 4), hand.compute("b", 5), *waits)
    order = schedule(
        problem, "u v w first a second third second_wait b third_wait first_wait output"
    )
    graph = SimpleNamespace(
        captured=problem,
        before=order,
        result=SimpleNamespace(problem=problem, caps=Caps()),
        after=order,
    )
    (tmp_path / "trace.json").write_bytes(trace(SimpleNamespace(graphs=[graph])))
    with loaded(tmp_path / "trace.json") as processor:
        assert [(row.name, row.value) for row in processor.query(BAD)] == []
        assert [
            (tid, ts, dur, name)
            for pid, tid, ts, dur, name in _slices(processor)
            if pid == FIRST_PROCESS
        ] == [
            (COMPUTE_STREAM, 0, 4, "a"),
            (COMPUTE_STREAM, 4, 16, "stalls at second_wait"),
            (COMPUTE_STREAM, 20, 5, "b"),
            (COMPUTE_STREAM, 25, 5, "stalls at third_wait"),
            (COMPUTE_STREAM, 30, 0, "end of the step"),
            (FIRST_GROUP_STREAM, 0, 10, "all_gather of first"),
            (FIRST_GROUP_STREAM, 10, 10, "all_gather of second"),
            (FIRST_GROUP_STREAM, 20, 10, "all_gather of third"),
        ]
        flows = [
            (row.cat, row.from_name, row.to_name)
            for row in processor.query(FLOWS)
            if row.pid == FIRST_PROCESS
        ]
        assert sorted(flows) == [
            ("ac2g", "a", "all_gather of first"),
            ("ac2g", "stalls at second_wait", "all_gather of second"),
            ("ac2g", "stalls at second_wait", "all_gather of third"),
            ("wait", "all_gather of first", "end of the step"),
            ("wait", "all_gather of second", "b"),
            ("wait", "all_gather of third", "stalls at third_wait"),
        ]


@pytest.mark.parametrize(
    "begin_us", [1.25, 2_111_333_444_555.667, 4_464_207_175_196.747, 7_889_238_000_000.001]
)
def test_beside_a_profile_slices_keep_touching(
    solved: SolvedRun, tmp_path: Path, begin_us: float
) -> None:
    """However long ago the profile counts from (three months at most), where floats are as coarse
    as nanoseconds.
    """
    step = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#1",
        "pid": 1,
        "tid": 1,
        "ts": begin_us,
        "dur": 10.0,
    }
    (tmp_path / "profile.json").write_bytes(orjson.dumps({"traceEvents": [step]}))
    (tmp_path / "both.json").write_bytes(trace_beside(solved, tmp_path / "profile.json").content)
    with loaded(tmp_path / "both.json") as processor:
        assert [(row.name, row.value) for row in processor.query(BAD)] == []
        begin = int(Decimal(str(begin_us)) * 1000)
        forward = simulate(solved.graphs[0].result.problem, solved.graphs[0].after)
        shifts = [begin, begin + forward.step_time_ticks]  # graphs end to end
        expected = sorted(
            (pid, tid, ts + shifts[(pid - FIRST_PROCESS) // 2], dur, name)
            for pid, tid, ts, dur, name in _written(solved)
        )
        assert _slices(processor) == expected
