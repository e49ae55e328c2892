"""The rewritten graph, exported and simulated again, has the figures that were claimed: to the tick
and to the byte.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_world import world
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_preset
from apsched.problem.build import build_problem
from apsched.schedule.schedule import Bucket, as_captured
from apsched.schedule.simulate import simulate
from apsched.writeback.round_trip import round_trip
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.toy_graphs import (
    CoalescedCosts,
    FlatCosts,
    c10d,
    capture_toy,
    captured_function,
)
from tests.helpers.problems.random_schedules import random_schedule, schedule_with_buckets


def differences(captured, cost_model, group_ranks, num_schedules: int) -> list[str]:
    """Return the differences of round trips of random schedules."""
    problem = build_problem(export_graph(captured, cost_model, group_ranks=group_ranks))
    schedules = [random_schedule(problem, seed) for seed in range(num_schedules)]
    assert any(schedule.buckets for schedule in schedules)
    trips = []
    for schedule in schedules:
        module = write_back(captured.module, problem, schedule, process_rank_of=lambda group: 0)
        trips.append(
            round_trip(module, captured, cost_model, group_ranks, simulate(problem, schedule))
        )
    return [trip.difference for trip in trips if not trip.exact]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_schedule_of_a_toy_step_is_exact(world_size):
    with world(world_size) as running:
        captured = capture_toy(dist.group.WORLD.group_name, world_size)
        assert differences(captured, FlatCosts(), running.group_ranks, 10) == []
        assert differences(captured, CoalescedCosts(), running.group_ranks, 10) == []


@pytest.mark.parametrize(
    ("preset", "mesh", "options"),
    [
        ("llama3-debug", MeshSpec(fsdp=64), ModelOptions()),
        ("llama3-debug", MeshSpec(fsdp=64), ModelOptions(activation_checkpoint="full")),
        ("llama3-debug", MeshSpec(replicate=4, fsdp=16), ModelOptions()),
        ("llama3-debug", MeshSpec(replicate=64), ModelOptions()),
        ("llama3-debug", MeshSpec(fsdp=16, tp=2), ModelOptions(reshard_after_forward=False)),
        ("deepseek-v3-debug", MeshSpec(fsdp=16, ep=4), ModelOptions()),
    ],
    ids=str,
)
def test_any_schedule_of_a_preset_is_exact(preset, mesh, options):
    capture = capture_preset(preset, mesh=mesh, seq_len=256, options=options)
    costs = ClusterCostModel(
        replace(load_cluster("h100"), coalesced_member_us=1.25), capture.group_ranks
    )  # buckets of either form
    for captured in capture.graphs:
        if build_problem(
            export_graph(captured, costs, group_ranks=capture.group_ranks)
        ).collectives:
            assert differences(captured, costs, capture.group_ranks, 1) == []


def test_members_without_elements_are_exact():
    with world(2):
        group = dist.group.WORLD.group_name

        def step(*shards):
            gathered = [
                c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, group)) for shard in shards
            ]
            return [
                c10d.wait_tensor(c10d.reduce_scatter_tensor(whole * 2, "sum", 2, group))
                for whole in gathered
            ]

        shards = (torch.ones(0, 4), torch.ones(2, 4), torch.ones(0))
        captured = captured_function(step, shards, parameters=3)
        problem = build_problem(export_graph(captured, FlatCosts()))
        schedule = schedule_with_buckets(problem, [Bucket((0, 1, 2)), Bucket((5, 3, 4))])
        module = write_back(captured.module, problem, schedule)
        trip = round_trip(module, captured, FlatCosts(), {}, simulate(problem, schedule))
        assert trip.difference == ""
        assert [out.shape for out in module(*shards)] == [shard.shape for shard in shards]


def test_scalars_share_a_launch_and_keep_their_shape():
    with world(2) as running:
        group = dist.group.WORLD.group_name

        def step(x, y):
            return [
                c10d.wait_tensor(c10d.all_reduce(value, "sum", group)) for value in (x.sum(), y * 2)
            ]

        captured = captured_function(step, (torch.ones(3), torch.ones(3)), parameters=0)
        problem = build_problem(
            export_graph(captured, FlatCosts(), group_ranks=running.group_ranks)
        )
        schedule = schedule_with_buckets(problem, [Bucket((0, 1))])
        module = write_back(captured.module, problem, schedule)
        assert [out.shape for out in module(torch.ones(3), torch.ones(3))] == [(), (3,)]
        assert (
            round_trip(
                module, captured, FlatCosts(), running.group_ranks, simulate(problem, schedule)
            ).difference
            == ""
        )


def test_collectives_of_symbolic_size_are_in_no_bucket():
    with world(2) as running:
        group = dist.group.WORLD.group_name

        def step(x, y):
            return [c10d.wait_tensor(c10d.all_reduce(value * 2, "sum", group)) for value in (x, y)]

        module = make_fx(step, tracing_mode="symbolic")(torch.ones(3, 4), torch.ones(3, 4))
        captured = CapturedGraph(
            name="graph", module=module, kept_inputs=frozenset(), parameter_names={}
        )
        costs = ClusterCostModel(load_cluster("h100"), running.group_ranks)
        problem = build_problem(export_graph(captured, costs, group_ranks=running.group_ranks))
        assert [collective.bucketable for collective in problem.collectives] == [False, False]
        schedule = random_schedule(problem, 0)
        rewritten = write_back(module, problem, schedule)
        assert (
            round_trip(
                rewritten, captured, costs, running.group_ranks, simulate(problem, schedule)
            ).difference
            == ""
        )


def test_a_false_claim_is_found_and_named():
    with world(2):
        captured = capture_toy(dist.group.WORLD.group_name, 2)
        problem = build_problem(export_graph(captured, FlatCosts()))
        timeline = simulate(problem, as_captured(problem.num_nodes))
        claimed = replace(timeline, step_time_ticks=timeline.step_time_ticks + 1, live_bytes=(7,))
        trip = round_trip(captured.module, captured, FlatCosts(), {}, claimed)
        assert not trip.exact
        assert (
            trip.difference
            == f"step time: {timeline.step_time_ticks} ticks found, {timeline.step_time_ticks + 1}"
            f" ticks claimed; peak memory: {timeline.peak_memory_bytes} bytes found, 7 bytes"
            " claimed"
        )
