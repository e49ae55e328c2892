"""The trace in Perfetto's own trace processor, by its Python package: nothing is dropped, and SQL says what the timelines say.

The package fetches its engine when it runs, which a test must not; so these tests are collected only where the engine is there already
(``conftest.py``): a ``trace_processor_shell`` on PATH, or one that ``PERFETTO_TRACE_PROCESSOR`` names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import trace_processor
from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

from apsched.run_files import SolvedRun, load_run
from apsched.simulate import simulate
from apsched.trace_file import FIRST_GROUP_STREAM, FIRST_PROCESS, trace

_THREADS = "from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"
_COUNTERS = "from counter join process_counter_track as track on counter.track_id = track.id join process using (upid)"


@pytest.fixture(scope="module")
def solved(debug_run: Path) -> SolvedRun:
    return load_run(debug_run)


@pytest.fixture(scope="module")
def processor(solved: SolvedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    path.write_bytes(trace(solved))
    found = TraceProcessor(trace=str(path), config=TraceProcessorConfig(bin_path=trace_processor()))
    yield found
    found.close()


def test_nothing_is_dropped(processor: Any) -> None:
    bad = processor.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
    assert [(row.name, row.value) for row in bad] == []


def test_slices_flows_and_the_counter_are_those_of_the_timelines(processor: Any, solved: SolvedRun) -> None:
    timelines = {}
    for g, graph in enumerate(solved.graphs):
        timelines[FIRST_PROCESS + 2 * g] = simulate(graph.captured, graph.before)
        timelines[FIRST_PROCESS + 2 * g + 1] = simulate(graph.result.problem, graph.after)
    sent = processor.query(
        f"select pid, count(*) as launches, sum(dur) as busy_ns {_THREADS} where tid >= {FIRST_GROUP_STREAM} group by pid order by pid"
    )
    expected = [(pid, len(t.transfers), sum(x.end_ticks - x.begin_ticks for x in t.transfers)) for pid, t in timelines.items()]
    assert [(row.pid, row.launches, row.busy_ns) for row in sent] == expected  # a tick is a nanosecond
    (flows,) = processor.query("select count(*) as number from flow")
    assert flows.number == 2 * sum(len(timeline.transfers) for timeline in timelines.values())
    peaks = processor.query(f"select pid, max(counter.value) as most {_COUNTERS} group by pid order by pid")
    assert [(row.pid, row.most) for row in peaks] == [(pid, timeline.peak_memory_bytes) for pid, timeline in timelines.items()]
