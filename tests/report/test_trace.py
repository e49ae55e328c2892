"""The trace keeps the rules of the trace event format, and says what the timelines say.

The rules that Perfetto reads by are checked one by one, everywhere; ``test_trace_perfetto.py`` asks
its trace processor.
"""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from apsched.artifacts.solved_run import SolvedRun, load_run
from apsched.report.trace import COMPUTE_STREAM, FIRST_PROCESS, trace
from apsched.report.trace_beside_profile import trace_beside
from apsched.schedule.simulate import simulate
from apsched.units import TICKS_PER_US, ticks_to_us
from tests.conftest import Run
from tests.helpers.perfetto_engine import tick_read

_KEYS = {
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
    "X": {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "cat", "name", "pid", "tid", "ts", "args"},
    "s": {"ph", "cat", "name", "id", "pid", "tid", "ts"},
    "f": {"ph", "cat", "name", "id", "pid", "tid", "ts"},
}


@pytest.fixture(scope="module")
def solved(debug_run: Path) -> SolvedRun:
    return load_run(debug_run)


@pytest.fixture(scope="module")
def events(solved: SolvedRun) -> list[dict[str, Any]]:
    content = json.loads(trace(solved))
    assert content["displayTimeUnit"] == "ms"
    return list(content["traceEvents"])


def test_every_event_has_the_fields_of_its_phase(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert event.keys() - {"bp"} == _KEYS[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert event["ph"] != "C" or all(isinstance(value, int) for value in event["args"].values())


def test_streams_are_named_threads_and_slices_on_one_do_not_overlap(
    events: list[dict[str, Any]],
) -> None:
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes) == [FIRST_PROCESS + k for k in range(4)]
    assert processes[FIRST_PROCESS + 3] == "apsched: backward, solved"
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    assert set(lanes) == named
    for lane in lanes.values():
        for one, other in pairwise(lane):
            assert round(1000 * (one["ts"] + one["dur"])) <= round(1000 * other["ts"])


def test_flows_begin_and_end_once_each_within_a_slice(events: list[dict[str, Any]]) -> None:
    """An arrow without both ends, or beside every slice, would be dropped."""
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["id"]].append(event)
            here = slices[event["pid"], event["tid"]]
            assert any(
                begin <= event["ts"] < end or begin == event["ts"] == end for begin, end in here
            ), event
            assert event["ph"] == "s" or event["bp"] == "e"
    for both in ends.values():
        assert [event["ph"] for event in both] == ["s", "f"]
        assert both[0]["ts"] <= both[1]["ts"]


def test_the_trace_says_what_the_timelines_say(
    events: list[dict[str, Any]], solved: SolvedRun
) -> None:
    """Transfers, stalls and the peak of the counter are those simulated."""
    for g, graph in enumerate(solved.graphs):
        for o, (problem, schedule) in enumerate(
            ((graph.captured, graph.before), (graph.result.problem, graph.after))
        ):
            timeline = simulate(problem, schedule)
            mine = [event for event in events if event["pid"] == FIRST_PROCESS + 2 * g + o]
            sent = [e for e in mine if e["ph"] == "X" and e["tid"] != COMPUTE_STREAM]
            assert [(e["ts"], e["args"]["bytes"]) for e in sent] == [
                (ticks_to_us(t.begin_ticks), t.size_bytes) for t in timeline.transfers
            ]
            stalled = [e for e in mine if e.get("cat") == "gpu_user_annotation"]
            assert round(1000 * sum(e["dur"] for e in stalled)) == timeline.exposed_ticks
            assert all(e["args"]["why"] for e in stalled)
            assert (
                max(e["args"]["bytes"] for e in mine if e["ph"] == "C")
                == timeline.peak_memory_bytes
            )
            assert sum(e["ph"] == "s" for e in mine) == 2 * len(timeline.transfers)


@pytest.mark.parametrize(
    "begin_us",
    [
        81.5,
        2.0**41 + 0.352,
        4500367458164.736,
        2.0**42 + 0.25,
        2.0**52 / 1000 + 0.125,
        7.8e12 + 0.001,
    ],
)
def test_beside_a_profile_no_tick_is_lost(
    events: list[dict[str, Any]], solved: SolvedRun, tmp_path: Path, begin_us: float
) -> None:
    """Profiles count from up to three months ago, where floats lie a nanosecond apart and products
    half of one; readers round up.
    """
    step = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#1",
        "pid": 1,
        "tid": 1,
        "ts": begin_us,
        "dur": 1e6,
    }
    (tmp_path / "real.json").write_text(json.dumps([step]))
    both = json.loads(trace_beside(solved, tmp_path / "real.json").content)["traceEvents"]
    assert both[0] == step
    begins = {}
    for ours, shifted in zip(events, both[1:], strict=True):
        at = tick_read(shifted["ts"]) - tick_read(ours["ts"])
        assert begins.setdefault((ours["pid"] - FIRST_PROCESS) // 2, at) == at, ours
    assert begins[0] == round(begin_us * TICKS_PER_US)


def test_the_command(run: Run, debug_run: Path, solved: SolvedRun) -> None:
    ran = run("trace", debug_run, "-o", "trace.json")
    assert ran.code == 0, ran.stderr
    assert Path("trace.json").read_bytes() == trace(solved)
