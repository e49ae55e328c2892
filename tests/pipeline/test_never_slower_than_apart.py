"""Forward and backward as one graph are never slower than both apart."""

import sys
from dataclasses import replace

import pytest

from apsched.capture.keep import keep
from apsched.capture.one_graph import with_joint_graph
from apsched.config import Caps, SolveOptions
from apsched.pipeline.load import LoadedGraph, with_apart
from apsched.pipeline.solve_graph import SolveRequest, solve_graph
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.in_a_row import Part, in_a_row
from apsched.schedule.result import Scored
from apsched.schedule.schedule import Schedule, as_captured
from apsched.schedule.verify import verify
from apsched.solver.answer import scored_start
from apsched.solver.arrays.instance import Instance
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers

REQUEST = SolveRequest(
    caps=Caps(max_compute_move=0),
    memory_cap=MemoryCap(),
    options=SolveOptions(time_slack=0.0, budget=0.0),
)


def joint_of(prices: FlatPrices, kept: tuple[str, ...] = ()) -> LoadedGraph:
    capture = captured_layers((32, 64, 128, 64))
    capture = replace(capture, graphs=keep(*capture.graphs, frozenset(kept)))
    *apart, joint = loaded_layers(with_joint_graph(capture), prices)
    return with_apart(joint, apart)


def parts_of(joint: LoadedGraph, *, solved: bool) -> list[Part]:
    parts = []
    for half in joint.apart:
        schedule = as_captured(half.problem.num_nodes)
        if solved:
            best = solve_graph(half, REQUEST, Progress(quiet=True)).best
            assert best is not None
            schedule = best.schedule
        parts.append(Part(problem=half.problem, schedule=schedule, places=half.places))
    return parts


@pytest.mark.parametrize("kept", [(), ("weights.1",)], ids=["again", "kept"])
def test_two_schedules_in_a_row_are_one_of_the_joint_graph(kept: tuple[str, ...]) -> None:
    """As captured they are the joint graph as captured; solved they keep every dependence, with all
    their buckets, and take no longer than both.
    """
    joint = joint_of(FlatPrices(bytes_per_us=500.0, latency_us=40.0), kept)
    captured = in_a_row(joint.problem, parts_of(joint, solved=False))
    assert captured == as_captured(joint.problem.num_nodes)
    parts = parts_of(joint, solved=True)
    schedule = in_a_row(joint.problem, parts)
    assert schedule is not None
    assert verify(joint.problem, schedule, Caps()) == ()
    assert len(schedule.buckets) == sum(len(part.schedule.buckets) for part in parts) > 0
    assert in_a_row(joint.problem, parts[:1]) is None


@pytest.mark.parametrize("bytes_per_us", [100.0, 4000.0])
def test_one_graph_is_never_slower_than_two(
    bytes_per_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search starts from the schedules of both, which keep the caps of the joint graph."""
    joint = joint_of(FlatPrices(bytes_per_us=bytes_per_us, latency_us=40.0))
    apart = [solve_graph(half, REQUEST, Progress(quiet=True)).best for half in joint.apart]
    both = sum(best.step_time_ticks for best in apart if best is not None)
    found = solve_graph(joint, REQUEST, Progress(quiet=True)).best
    assert found is not None
    assert found.step_time_ticks <= both
    starts = []

    def given(*args: object) -> object:
        starts.append(scored_start(*args))  # type: ignore[arg-type]
        return starts[-1]

    monkeypatch.setattr(sys.modules["apsched.solver.solve"], "scored_start", given)
    solve_graph(joint, REQUEST, Progress(quiet=True))
    assert starts[-1] is not None, "the schedules in a row keep the caps"
    assert starts[-1].step_time_ticks <= both


def test_halves_are_solved_within_the_memory_that_they_have_in_one_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shards that only the other half takes are alive, too; so each start keeps the cap."""
    joint = joint_of(FlatPrices(bytes_per_us=500.0, latency_us=40.0), ("weights.1", "weights.2"))
    free = solve_graph(joint, REQUEST, Progress(quiet=True))
    assert free.best is not None
    low, high = free.answer.floor_memory_bytes, free.best.peak_memory_bytes
    starts = []

    def given(instance: Instance, start: Schedule | None) -> Scored | None:
        found = scored_start(instance, start)
        if start is not None:
            starts.append(found)
        return found

    monkeypatch.setattr(sys.modules["apsched.solver.solve"], "scored_start", given)
    caps = range(low, high, max((high - low) // 8, 1))
    for cap in caps:
        request = replace(REQUEST, memory_cap=MemoryCap(size_bytes=cap))
        assert solve_graph(joint, request, Progress(quiet=True)).best is not None
    assert len(starts) > len(caps) // 2
    assert None not in starts
