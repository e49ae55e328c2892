"""Metrics of schedules: counted by hand, in the result, and loud where a launch cannot be told by
its name.
"""

import logging
from dataclasses import replace

import pytest
import torch

from apsched import api as solve_problem
from apsched.capture.fake_world import world
from apsched.config import Caps, SolveOptions
from apsched.fx.graph_copies import copied
from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.report.summary import graph_json
from apsched.schedule.analysis.metrics import metrics_of
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind, as_captured
from apsched.schedule.simulate import simulate
from apsched.writeback.round_trip import round_trip, with_names_checked
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.toy_graphs import FlatCosts, capture_toy
from tests.helpers.problems.by_hand import ByHand, line

KIB = 1024


def backward(num: int) -> Problem:
    """``num`` times: two compute nodes, of which the second makes a gradient of 4 KiB that is
    scattered to four process ranks.
    """
    hand = ByHand(prices={"reduce_scatter": line(5, 1)})
    waits = []
    for i in range(num):
        hand.compute(f"relu{i}", 2, size=KIB)
        start = hand.start(
            "reduce_scatter",
            f"rs{i}",
            hand.compute(f"mm{i}", 3, size=4 * KIB),
            4 * KIB,
            KIB,
            module=f"layers.{i}.w",
        )
        waits.append(hand.wait(f"wait{i}", start))
    return replace(hand.output(*waits), name="backward")


def bucketed(problem: Problem, *buckets: tuple[int, ...]) -> Schedule:
    """All compute first; then one launch for each bucket."""
    apart = {node for c in problem.collectives for node in (c.start, c.wait)}
    steps = [
        Step(StepKind.NODE, node) for node in range(problem.num_nodes - 1) if node not in apart
    ]
    for kind in (StepKind.COPY_IN, StepKind.START, StepKind.WAIT):
        steps += [Step(kind, b) for b in range(len(buckets))]
    steps.append(Step(StepKind.NODE, problem.num_nodes - 1))
    return Schedule(buckets=tuple(map(Bucket, buckets)), steps=tuple(steps))


def test_numbers_by_hand():
    problem = backward(6)
    schedule = bucketed(problem, (0, 1, 2), (3, 4, 5))
    timeline = simulate(problem, schedule)
    found = metrics_of(problem, schedule, timeline, Caps())
    (launches,) = found.launches
    assert (
        launches.direction,
        launches.kind,
        launches.num_collectives,
        launches.num_launches,
        launches.num_buckets,
    ) == (
        "backward", "reduce_scatter", 6, 2, 2,
    )  # fmt: skip
    assert (launches.largest_bytes, launches.mean_bytes) == (12 * KIB, 12 * KIB)
    assert (launches.largest_span, launches.mean_span) == (8, 8.0), "four nodes a layer"
    assert (launches.closed_by_bytes, launches.closed_by_span) == (0, 0)
    assert (found.longest_run_captured, found.longest_run) == (2, 12)
    assert found.peak_memory_bytes == timeline.peak_memory_bytes
    assert found.exposed_us == timeline.exposed_ticks / 1000
    captured = metrics_of(
        problem,
        as_captured(problem.num_nodes),
        simulate(problem, as_captured(problem.num_nodes)),
        Caps(),
    )
    assert (captured.longest_run_captured, captured.longest_run) == (2, 2)
    assert (
        captured.launches[0].num_launches,
        captured.launches[0].num_buckets,
        captured.launches[0].largest_span,
    ) == (6, 0, 0)


@pytest.mark.parametrize(
    ("caps", "by_bytes", "by_span"),
    [
        (Caps(), 0, 0),
        (Caps(bucket_cap_bytes=24 * KIB, max_topo_span=20), 0, 0),
        (Caps(bucket_cap_bytes=23 * KIB, max_topo_span=20), 1, 0),
        (Caps(bucket_cap_bytes=24 * KIB, max_topo_span=19), 0, 1),
        (Caps(bucket_cap_bytes=23 * KIB, max_topo_span=19), 1, 0),
        (Caps(max_topo_span=19), 0, 1),
    ],
)
def test_what_closed_a_bucket(caps, by_bytes, by_span):
    """The two buckets together have 24 KiB and span 20 ranks."""
    problem = backward(6)
    schedule = bucketed(problem, (0, 1, 2), (3, 4, 5))
    (launches,) = metrics_of(problem, schedule, simulate(problem, schedule), caps).launches
    assert (launches.closed_by_bytes, launches.closed_by_span) == (by_bytes, by_span)


def test_they_are_in_the_result_in_its_json_and_in_the_log(caplog):
    problem = replace(backward(4), copy_price=line(0))
    with caplog.at_level(logging.INFO, "apsched.pipeline.solve_graph"):
        result = solve_problem.solve(problem, options=SolveOptions(time_slack=0.0))
    assert result.metrics is not None
    (written,) = graph_json(result)["metrics"]["launches"]
    assert (
        written["num_launches"]
        == result.metrics.launches[0].num_launches
        == result.timeline.num_launches
    )
    assert graph_json(result)["metrics"]["longest_run"] == result.metrics.longest_run
    assert caplog.messages == [f"backward: {line}" for line in result.metrics.lines()]
    assert "backward reduce_scatter on group" in caplog.messages[0]


@pytest.fixture
def rewritten():
    """A rewritten toy step with one bucket, and what is needed to check it."""
    with world(2) as running:
        captured = capture_toy(torch.distributed.group.WORLD.group_name, 2, num_shards=4)
        problem = build_problem(
            export_graph(captured, FlatCosts(), group_ranks=running.group_ranks)
        )
        result = solve_problem.solve(problem, options=SolveOptions(time_slack=0.0))
        schedule = result.schedule
        assert schedule is not None
        assert schedule.buckets
        module = write_back(captured.module, problem, schedule, process_rank_of=lambda group: 0)
        trip = round_trip(
            module, captured, FlatCosts(), running.group_ranks, simulate(problem, schedule)
        )
        yield trip, module, problem, schedule


def test_names_hold_through_write_back(rewritten):
    trip, module, problem, schedule = rewritten
    assert with_names_checked(trip, module, problem, schedule) == trip
    assert trip.exact


@pytest.mark.parametrize("what", ["a bucket loses its note", "a start is renamed"])
def test_a_rewrite_that_loses_a_name_is_not_silent(rewritten, what):
    """Times and bytes are as claimed, so that only the names tell."""
    trip, module, problem, schedule = rewritten
    module = copied(module)
    in_bucket = {c for bucket in schedule.buckets for c in bucket.members}
    alone = next(
        problem.node_names[c.start] for k, c in enumerate(problem.collectives) if k not in in_bucket
    )
    for node in module.graph.nodes:
        if (
            what == "a bucket loses its note"
            and node.meta.get("apsched", {}).get("role") == "start"
        ):
            node.meta["apsched"] = {}
            lost = "+".join(
                problem.node_names[problem.collectives[c].start]
                for c in schedule.buckets[0].members
            )
            break
        if what == "a start is renamed" and node.name == alone:
            node._rename("elsewhere")
            lost = alone
            break
    checked = with_names_checked(trip, module, problem, schedule)
    assert not checked.exact
    assert checked.difference.startswith(f"launches by name: lost {lost}; unknown ")


def test_the_forms_of_buckets_are_counted():
    problem = backward(6)
    flat = bucketed(problem, (0, 1, 2), (3, 4, 5))
    gone = {Step(StepKind.COPY_IN, 1)}
    steps = tuple(step for step in flat.steps if step not in gone)
    schedule = replace(
        flat, buckets=(flat.buckets[0], replace(flat.buckets[1], coalesced=True)), steps=steps
    )
    (launches,) = metrics_of(problem, schedule, simulate(problem, schedule), Caps()).launches
    assert (launches.num_buckets, launches.num_coalesced) == (2, 1)
    assert "2 launches, 2 of several (1 coalesced)" in str(launches)
