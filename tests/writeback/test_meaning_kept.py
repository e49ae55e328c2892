"""Compute that moves keeps what data do not show: the order of draws, of writes and reads through
views, and of effects.
"""

import pytest
import torch
import torch.distributed as dist

from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.schedule.schedule import as_captured
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.toy_graphs import FlatCosts, c10d, captured_function
from tests.helpers.problems.random_schedules import compute_moves, random_schedule

aten = torch.ops.aten
SEEDS = range(30)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """The name of a real group of one process."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def step_with_draws_and_writes(group: str):
    """Return four layers with dropout, noise and a running mean that is written through a view,
    beside work that depends on none of it.
    """

    def step(x, statistics, *shards):
        outputs = []
        for k, shard in enumerate(shards):
            whole = c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 1, group))
            x = torch.tanh(x @ whole)
            dropped, mask = aten.native_dropout(x, 0.5, True)
            noise = torch.rand_like(x)
            before = statistics.clone()
            row = statistics[k % 2]
            row.mul_(0.9)
            row.add_(dropped.mean(dim=0))
            outputs += [before.sum() * 2, (noise * mask).sum(dim=0), statistics * 3]
            aside = whole.t() @ whole
            outputs.append(c10d.wait_tensor(c10d.reduce_scatter_tensor(aside, "sum", 1, group)))
            x = x + dropped
        return (x, *outputs)

    return step


def fresh_inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(*shape, generator=generator) for shape in ((4, 8), (2, 8), *(((8, 8),) * 4))
    )


def run(module: torch.fx.GraphModule) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return results and the state that the caller's tensor is left in."""
    torch.manual_seed(5)
    inputs = fresh_inputs()
    return list(module(*inputs)), inputs[1]


def test_random_orders_draw_and_write_as_captured(group):
    captured = captured_function(step_with_draws_and_writes(group), fresh_inputs(), parameters=4)
    problem = build_problem(export_graph(captured, FlatCosts()))
    expected, state = run(captured.module)
    assert len({tuple(value.flatten().tolist()) for value in expected}) == len(
        expected
    )  # whatever is mixed up shows
    num_moved = 0
    for seed in SEEDS:
        schedule = random_schedule(problem, seed)
        found, state_found = run(write_back(captured.module, problem, schedule))
        assert [torch.equal(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(
            expected
        ), seed
        assert torch.equal(state, state_found)
        num_moved += sum(map(bool, compute_moves(problem, schedule)))
    assert num_moved > 10 * len(SEEDS)


def test_draws_keep_their_order_and_the_rest_need_not(group):
    captured = captured_function(step_with_draws_and_writes(group), fresh_inputs(), parameters=4)
    problem = build_problem(export_graph(captured, FlatCosts()))
    draws = [
        node.name
        for node in captured.module.graph.nodes
        if node.target in (aten.native_dropout.default, aten.rand_like.default)
    ]
    assert len(draws) == 8
    order = [node.name for node in captured.module.graph.nodes]
    assert [
        node.name
        for node in write_back(captured.module, problem, as_captured(problem.num_nodes)).graph.nodes
    ] == order
    orders = set()
    for seed in SEEDS:
        names = [
            node.name
            for node in write_back(
                captured.module, problem, random_schedule(problem, seed)
            ).graph.nodes
        ]
        assert [name for name in names if name in draws] == draws
        orders.add(tuple(name for name in names if name.startswith("mm")))
    assert len(orders) > 1
