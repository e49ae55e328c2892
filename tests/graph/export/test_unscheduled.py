"""Communication that is not scheduled: where it stands, what it costs, how long its memory lives,
and that the collectives of its group do not cross it.
"""

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.graph_module import capture_graph
from apsched.config import Caps
from apsched.fx.effects.of_node import effects_of
from apsched.graph.export.export import export_graph
from apsched.kinds import NodeKind
from apsched.problem.build import build_problem
from apsched.schedule.schedule import StepKind, as_captured
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.torch_compat import graphs as torch_private
from tests.helpers.graphs.instrumented import UnitCosts, capture_of, traced
from tests.helpers.graphs.programs_of_communication import c10d, traced_step
from tests.helpers.problems.random_schedules import random_schedule

aten = torch.ops.aten
GROUP = "0"
TRANSFER_US = 10.0
"""What UnitCosts asks for a transfer of few bytes, beside a microsecond for its launch."""
BARRIERS = {
    "cond with a collective": ("cond",),
    "map with a collective": ("map_impl",),
    "isend and irecv": ("isend", "irecv"),
    "batch_p2p_ops": ("batch_p2p_ops",),
}


@pytest.fixture(scope="module", autouse=True)
def group():
    """A fake process group of two process ranks."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def dag_of(function, *inputs):
    return export_graph(capture_graph(make_fx(function, tracing_mode="fake")(*inputs)), UnitCosts())


def by_name(dag):
    return {record.name: record for _, record in dag.nodes(data="record")}


def names_in(problem, schedule):
    """Return names of nodes in the order of ``schedule``; a bucket's start stands for its
    members.
    """
    names = []
    for step in schedule.steps:
        if step.kind is StepKind.NODE:
            names.append(problem.node_names[step.index])
        elif step.kind is StepKind.START:
            members = (problem.collectives[c] for c in schedule.buckets[step.index].members)
            names += (problem.node_names[member.start] for member in members)
    return names


@pytest.mark.parametrize("program", BARRIERS)
def test_no_collective_of_its_group_crosses_what_communicates(program):
    problem = build_problem(
        export_graph(capture_graph(traced_step(program, GROUP, 1)), UnitCosts())
    )
    starts = {problem.node_names[c.start] for c in problem.collectives}
    captured = names_in(problem, as_captured(problem.num_nodes))
    barriers = [name for name in captured if name.startswith(BARRIERS[program])]
    moved = set()
    for seed in range(10):
        order = names_in(problem, random_schedule(problem, seed))
        moved.add(tuple(order))
        for barrier in barriers:
            before = starts & set(order[: order.index(barrier)])
            assert before == starts & set(captured[: captured.index(barrier)]), barrier
    assert barriers
    assert len(moved) > 1


def test_a_start_without_a_wait_is_compute_as_long_as_its_transfer():
    def step(x, shard):
        sent = x.sin()
        whole = c10d.all_gather_into_tensor(shard, 2, GROUP)
        return c10d.all_gather_into_tensor(sent, 2, GROUP), c10d.wait_tensor(whole)

    dag = dag_of(step, torch.randn(4, 8), torch.randn(4, 8))
    records = by_name(dag)
    left, scheduled = records["all_gather_into_tensor_1"], records["all_gather_into_tensor"]
    assert (left.kind, scheduled.kind) == (NodeKind.COMPUTE, NodeKind.START)
    assert left.collective is None
    assert set(records["sin"].allocates) <= set(records["output"].frees)
    assert left.duration_us == pytest.approx(1.0 + TRANSFER_US + 256 / 1024)
    problem = build_problem(dag)
    assert [problem.node_names[c.start] for c in problem.collectives] == ["all_gather_into_tensor"]
    assert not verify(problem, as_captured(problem.num_nodes), Caps())


@pytest.mark.parametrize("waits", [0, 1])
def test_what_a_transfer_reads_and_writes_lives_until_its_wait_or_to_the_end(waits):
    def step(x):
        sent = x.sin()
        part = torch.stack([sent, sent])
        c10d.all_reduce_(part[0], "sum", GROUP)
        c10d.all_reduce_(part[1], "sum", GROUP)
        if waits:
            c10d.wait_tensor(part)
        return x.cos().tan()

    dag = dag_of(step, torch.randn(64, 64))
    problem, records = build_problem(dag), by_name(dag)
    (buffer,) = records["stack"].allocates
    last = problem.storages[buffer].uses[-1]
    assert problem.node_names[last] == ("wait_tensor" if waits else "output")
    live = simulate(problem, as_captured(problem.num_nodes)).live_bytes
    assert (live[records["tan"].rank] > 4 * 64 * 64 * 4) == (not waits)
    if waits:
        assert records["wait_tensor"].kind is NodeKind.COMPUTE
        assert records["wait_tensor"].duration_us == 0.0
        assert records["wait_tensor"].writes == (buffer,)


def test_what_is_sent_lives_until_the_wait():
    def step(x):
        sent = x.sin()
        work = c10d.isend(sent, 1, 0, GROUP)
        other = x.cos()
        c10d.wait_tensor(work)
        return other.tan()

    records = by_name(dag_of(step, torch.randn(4, 8)))
    (sent,) = records["sin"].allocates
    assert sent in records["wait_tensor"].frees
    assert records["isend"].duration_us == pytest.approx(1.0 + TRANSFER_US + 128 / 1024)


def test_each_wait_for_several_results_is_one():
    def step(x):
        work = c10d.batch_p2p_ops(
            ["isend", "irecv"], [1, 1], [0, 0], [x.sin(), x.new_zeros(4)], GROUP
        )
        return [c10d.wait_tensor(one) for one in work]

    records = by_name(dag_of(step, torch.randn(4, 8)))
    (received,) = records["new_zeros"].allocates
    assert records["wait_tensor_1"].kind is NodeKind.COMPUTE
    assert received in records["wait_tensor_1"].writes


@pytest.mark.parametrize("later", [False, True])
def test_the_first_wait_is_for_all_results_of_a_start(later):
    """The waits may come in any order, and a result is read after the first, waited for or not."""

    def step(x):
        first, second = c10d.all_reduce_coalesced_([x.sin(), x.cos()], "sum", GROUP)
        c10d.wait_tensor(second)
        if later:
            c10d.wait_tensor(first)
        return first * 2, second * 3

    dag = dag_of(step, torch.ones(4))
    records = by_name(dag)
    (start,) = (record.collective for record in records.values() if record.collective)
    assert start.wait == records["wait_tensor"].rank
    assert {(start.wait, records[read].rank) for read in ("mul", "mul_1")} <= set(dag.edges)
    storages = set(records["sin"].allocates + records["cos"].allocates)
    if later:
        assert storages <= set(records["wait_tensor_1"].reads), "the work holds all results"
    problem = build_problem(dag)
    for seed in range(5):
        names = names_in(problem, random_schedule(problem, seed))
        assert names.index("wait_tensor") < min(names.index("mul"), names.index("mul_1"))


def test_communication_on_a_group_that_nobody_knows_costs_its_launch():
    def step(x):
        return c10d.wait_tensor(c10d.irecv(x.sin(), 1, 0, "9"))

    assert by_name(dag_of(step, torch.randn(4, 8)))["irecv"].duration_us == 1.0


def test_who_reads_a_result_beside_the_wait_comes_after_the_wait():
    def step(shard):
        whole = c10d.all_gather_into_tensor(shard, 2, GROUP)
        waited = c10d.wait_tensor(whole.view(-1))
        return waited.cos(), whole.t().sin(), shard.tan()

    dag = dag_of(step, torch.randn(4, 8))
    records = by_name(dag)
    wait = records["wait_tensor"]
    assert wait.kind is NodeKind.WAIT
    assert dag.edges[wait.rank, records["sin"].rank]["kind"] == "order"
    assert not dag.has_edge(wait.rank, records["tan"].rank)


def test_a_tensor_that_takes_another_storage_stands_for_both():
    def step(x, y):
        mine, other = aten.sin.default(x), aten.cos.default(y)
        aten.set_.source_Tensor(mine, other)
        seen = aten.tan.default(aten.view.default(mine, [-1]))
        return seen, aten.mul_.Tensor(other, 2.0), aten.neg.default(mine)

    dag = export_graph(capture_of(traced(step, [torch.randn(4, 8)] * 2)), UnitCosts())
    records = by_name(dag)
    assert dag.has_edge(records["tan_default"].rank, records["mul__tensor"].rank)
    assert dag.has_edge(records["mul__tensor"].rank, records["neg_default"].rank)


def test_keys_and_values_that_a_body_gathers_are_communication_of_its_group():
    def body(x):
        keys, values = torch.ops.cplib.flex_cp_allgather(x, x, 0, GROUP)
        return keys * values

    def step(x):
        return torch.cond(x.sum() > 0, body, body, (x,))

    module = make_fx(step, tracing_mode="fake")(torch.ones(4, 4))
    (cond,) = (node for node in module.graph.nodes if "cond" in str(node.target))
    assert effects_of(cond).communicates == (GROUP,)
