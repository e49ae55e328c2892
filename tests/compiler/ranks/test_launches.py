"""The launches of a graph, in words that are the same on every process rank of a group."""

import torch
import torch.distributed.tensor.experimental._context_parallel._cp_custom_ops  # registers cplib
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_world import world
from apsched.compiler.ranks.launches import (
    dump_launches,
    first_difference,
    groups_of,
    launches_of,
    order_digest,
    parse_launches,
)
from apsched.config import Caps, SolveOptions
from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.solver import solve
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.toy_graphs import FlatCosts, capture_toy


def toy(process_rank: int = 0) -> tuple[str, CapturedGraph]:
    with world(2, process_rank) as running:
        group = next(iter(running.group_ranks))
        return group, capture_toy(group, 2, num_shards=4, process_rank=process_rank)


def bucketed(captured: CapturedGraph, group: str, process_rank: int = 0) -> torch.fx.GraphModule:
    problem = build_problem(export_graph(captured, FlatCosts(), group_ranks={group: (0, 1)}))
    best = solve(problem, Caps(), SolveOptions(budget=0.5)).best
    assert best is not None
    assert best.schedule.buckets
    return write_back(
        captured.module, problem, best.schedule, process_rank_of=lambda name: process_rank
    )


def test_a_graph_as_captured_launches_its_collectives_in_turn():
    group, captured = toy()
    assert groups_of(captured.module) == (group,)
    launches = launches_of(captured.module, captured.module)[group]
    assert [launch.members for launch in launches] == [(k,) for k in range(len(launches))]
    assert [launch.what.split(" ")[0] for launch in launches[:5]] == ["all_gather"] * 4 + [
        "all_reduce"
    ]
    assert str(launches[0]) == "all_gather bfloat16 64 -> 128 bytes of all_gather_into_tensor"


def test_buckets_launch_their_members_by_their_place_as_captured():
    group, captured = toy()
    launches = launches_of(
        bucketed(captured, group), captured.module, {"all_gather_into_tensor": "layers.0.weight"}
    )[group]
    whole = launches_of(captured.module, captured.module)[group]
    assert sorted(c for launch in launches for c in launch.members) == list(range(len(whole)))
    assert len(launches) < len(whole)
    assert any("layers.0.weight" in launch.names for launch in launches)
    assert parse_launches(dump_launches(launches)) == launches


def test_process_ranks_of_a_group_agree_and_another_order_does_not():
    digests = []
    for process_rank in (0, 1):
        group, captured = toy(process_rank)
        digests.append(
            order_digest(
                launches_of(bucketed(captured, group, process_rank), captured.module)[group]
            )
        )
    assert digests[0] == digests[1]
    assert order_digest(launches_of(captured.module, captured.module)[group]) != digests[0]


def test_names_are_for_people():
    group, captured = toy()
    plain, named = (
        launches_of(captured.module, captured.module, names)[group]
        for names in (None, {"all_reduce": "norm"})
    )
    assert plain != named
    assert order_digest(plain) == order_digest(named)


def test_an_operator_that_transfers_inside_is_a_launch_of_its_group():
    with world(2):
        keys = torch.empty(1, 4, 8, 16)
        module = make_fx(
            lambda k, v: torch.ops.cplib.flex_cp_allgather(k, v, 2, "0"), tracing_mode="fake"
        )(keys, keys)
    (launch,) = launches_of(module, module)["0"]
    assert launch.what == "all_gather float32 2048 -> 8192 bytes"


def test_the_first_difference():
    group, captured = toy()
    launches = launches_of(captured.module, captured.module)[group]
    assert first_difference(launches, launches[:-1]).startswith(f"launch {len(launches)} is ")
    assert first_difference(launches[:2], launches).startswith(
        "it ends after 2 launches, there launch 3 is all_gather"
    )
    assert first_difference(launches, (launches[0], launches[2], *launches[2:])).startswith(
        "launch 2 is all_gather float32"
    )


def test_bytes_that_depend_on_data_are_nobodys_business():
    """Each process rank may gather as many rows as the others, or not: the launch is the same."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = torch.empty(env.create_unbacked_symint(), 8)
    c10d = torch.ops._c10d_functional
    module = make_fx(lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0")))(rows)
    (launch,) = launches_of(module, module)["0"]
    assert launch.what == "all_gather float32 0 -> 0 bytes"
