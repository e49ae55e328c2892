"""The graph after write-back: order, names, metadata and nothing beyond what the schedule says."""

import operator
from dataclasses import replace

import pytest
import torch

from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_world import world
from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.kinds import NodeKind
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind, as_captured
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.toy_graphs import CoalescedCosts, FlatCosts, capture_toy
from tests.helpers.problems.random_schedules import random_schedule, schedule_with_buckets

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


@pytest.fixture(scope="module")
def running_world():
    with world(4, rank=2) as running:
        yield running


@pytest.fixture(scope="module")
def captured(running_world) -> CapturedGraph:
    captured = capture_toy(next(iter(running_world.group_ranks)), 4)
    for rank, node in enumerate(captured.module.graph.nodes):
        node.meta |= {
            "stack_trace": f"line {rank}",
            "seq_nr": rank,
            "custom": {"region": "step"},
            "recompute": 0,
        }
        node.meta["nn_module_stack"] = {"layers": (f"layers.{rank}", "Linear")}
        if "reduce" in node.name:
            node.meta["autograd_backward"] = True
    return captured


@pytest.fixture(scope="module")
def problem(captured) -> Problem:
    return build_problem(export_graph(captured, FlatCosts()))


def collectives_of_kind(problem: Problem, kind: str) -> list[int]:
    """The collectives of the first key of ``kind`` that can be bucketed."""
    keys = [collective.key for collective in problem.collectives if collective.bucketable]
    key = next(k for k in keys if problem.keys[k].kind == kind)
    return [
        c
        for c, collective in enumerate(problem.collectives)
        if collective.key == key and collective.bucketable
    ]


def calls_of(module, role: str, *roles: str):
    return [
        node
        for node in module.graph.nodes
        if node.meta.get("apsched", {}).get("role") in (role, *roles)
    ]


def test_the_captured_order_gives_the_same_code(captured, problem):
    assert (
        write_back(captured.module, problem, as_captured(problem.num_nodes)).code
        == captured.module.code
    )


def test_the_input_graph_stays_as_it_is(captured, problem):
    code, names = captured.module.code, [node.name for node in captured.module.graph.nodes]
    metas = [dict(node.meta) for node in captured.module.graph.nodes]
    for seed in range(20):
        write_back(captured.module, problem, random_schedule(problem, seed))
    assert captured.module.code == code
    assert [node.name for node in captured.module.graph.nodes] == names
    assert [node.meta for node in captured.module.graph.nodes] == metas


@pytest.mark.parametrize("seed", range(20))
def test_nodes_stand_in_exactly_the_order_of_the_steps(captured, problem, seed):
    schedule = random_schedule(problem, seed)
    module = write_back(captured.module, problem, schedule)
    roles = {
        StepKind.COPY_IN: "copy_in",
        StepKind.START: "start",
        StepKind.WAIT: "wait",
        StepKind.COPY_OUT: "copy_out",
    }

    def expected(step: Step):
        if step.kind is StepKind.NODE:
            return problem.node_names[step.index]
        members = (
            (step.index,)
            if step.kind is StepKind.COPY_OUT
            else schedule.buckets[step.index].members
        )
        return roles[step.kind], [problem.node_names[problem.collectives[c].start] for c in members]

    def found(node):
        mine = node.meta.get("apsched")
        return (mine["role"], mine["members"]) if mine else node.name

    free = calls_of(module, "view", "buffer")
    assert [found(node) for node in module.graph.nodes if node not in free] == [
        expected(step) for step in schedule.steps
    ]


@pytest.mark.parametrize("seed", range(10))
def test_buckets_add_one_kernel_in_and_for_gathers_one_a_member_out(captured, problem, seed):
    schedule = random_schedule(problem, seed)
    module = write_back(captured.module, problem, schedule)
    free = {aten.view.default, aten.slice.Tensor, aten.empty.memory_format}
    added = [
        node.target
        for node in module.graph.nodes
        if "apsched" in node.meta and node.target not in free
    ]
    gathers = [
        b
        for b in schedule.buckets
        if problem.keys[problem.collectives[b.members[0]].key].kind == "all_gather"
    ]
    assert added.count(aten._foreach_copy_.default) == len(gathers)
    assert added.count(aten.cat.default) == len(schedule.buckets) - len(gathers)
    assert added.count(aten.clone.default) == sum(len(b.members) for b in gathers)
    assert added.count(c10d.wait_tensor.default) == len(schedule.buckets)
    assert len(added) == 3 * len(schedule.buckets) + sum(len(b.members) for b in gathers)


@pytest.mark.parametrize("seed", range(5))
def test_values_have_the_shapes_and_storages_that_running_would_give(captured, problem, seed):
    module = write_back(captured.module, problem, random_schedule(problem, seed))
    mode = next(node.meta["val"].fake_mode for node in module.graph.nodes if "val" in node.meta)
    values: dict[torch.fx.Node, torch.Tensor] = {}
    storage_of: dict[int, int] = {}
    with mode:
        for node in module.graph.nodes:
            if node.op == "output":
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = (
                node.meta["val"] if node.op == "placeholder" else node.target(*args, **kwargs)
            )
            if node.target is c10d.all_gather_into_tensor_out.default:
                values[node] = kwargs["out"]  # torch's fake kernel forgets that it returns ``out``
            mine, run = node.meta["val"], values[node]
            if mine is None and run is None:
                continue  # an operator that only writes
            assert (mine.shape, mine.stride(), mine.dtype, mine.device) == (
                run.shape,
                run.stride(),
                run.dtype,
                run.device,
            ), node
            if "apsched" in node.meta:
                assert mine.storage_offset() == run.storage_offset(), node
                assert (
                    storage_of.setdefault(
                        run.untyped_storage()._cdata, mine.untyped_storage()._cdata
                    )
                    == mine.untyped_storage()._cdata
                )


def test_a_gather_writes_into_the_place_of_this_process_rank(captured, problem):
    bucket = Bucket(tuple(collectives_of_kind(problem, "all_gather")[:3]))
    module = write_back(captured.module, problem, schedule_with_buckets(problem, [bucket]))
    (own,) = [
        node for node in calls_of(module, "view") if node.args[0] in calls_of(module, "buffer")
    ]
    assert own.args[1:] == (0, 2 * 48, 3 * 48)  # process rank 2 of 4; three shards of 2 x 8
    other = write_back(
        captured.module,
        problem,
        schedule_with_buckets(problem, [bucket]),
        process_rank_of=lambda group: 0,
    )
    (own,) = [node for node in calls_of(other, "view") if node.args[0] in calls_of(other, "buffer")]
    assert own.args[1:] == (0, 0, 48)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_payload_is_in_the_order_of_the_members(captured, problem, kind):
    members = tuple(reversed(collectives_of_kind(problem, kind)[:2]))
    module = write_back(captured.module, problem, schedule_with_buckets(problem, [Bucket(members)]))
    (copy_in,) = calls_of(module, "copy_in")
    assert [view.meta["apsched"]["members"] for view in copy_in.args[0]] == [
        [problem.node_names[problem.collectives[c].start]] for c in members
    ]


def test_metadata_is_kept_merged_and_says_where_it_comes_from(captured, problem):
    members = tuple(collectives_of_kind(problem, "reduce_scatter")[:2])
    module = write_back(captured.module, problem, schedule_with_buckets(problem, [Bucket(members)]))
    old = {node.name: node for node in captured.module.graph.nodes}
    for node in module.graph.nodes:
        if "apsched" not in node.meta:
            assert node.meta == old[node.name].meta
    starts = [old[problem.node_names[problem.collectives[c].start]] for c in members]
    (start,) = calls_of(module, "start")
    assert start.meta["apsched"] == {
        "role": "start",
        "members": [s.name for s in starts],
        "sources": [s.name for s in starts],
    }
    assert [source.name for source in start.meta["from_node"]] == [s.name for s in starts]
    for key in ("nn_module_stack", "stack_trace", "custom"):
        assert start.meta[key] == starts[0].meta[key]
    assert start.meta["autograd_backward"] is True
    assert start.meta["recompute"] == 0
    assert "seq_nr" not in start.meta  # the members differ
    (wait,) = calls_of(module, "wait")
    assert "autograd_backward" not in wait.meta  # the waits have none
    assert wait.meta["apsched"]["sources"] == [
        problem.node_names[problem.collectives[c].wait] for c in members
    ]


def test_names_of_earlier_write_backs_are_not_taken_twice(captured, problem):
    bucket = Bucket(tuple(collectives_of_kind(problem, "all_gather")[:2]))
    once = write_back(captured.module, problem, schedule_with_buckets(problem, [bucket]))
    again = build_problem(export_graph(replace(captured, module=once), FlatCosts()))
    bucket = Bucket(tuple(collectives_of_kind(again, "reduce_scatter")[:2]))
    twice = write_back(once, again, schedule_with_buckets(again, [bucket]))
    names = {node.name for node in twice.graph.nodes}
    assert {"bucket_0_copy_in", "bucket_0_copy_in_1"} <= names
    kept = {node.name for node in once.graph.nodes} - {
        problem.node_names[n] for c in problem.collectives for n in (c.start, c.wait)
    }
    assert kept <= names


def test_submodules_codegen_and_meta_of_the_module_are_kept(running_world):
    captured = capture_toy(next(iter(running_world.group_ranks)), 4)
    graph = captured.module.graph
    constant = torch.ones(())
    captured.module.register_buffer("constant", constant)
    loss = graph.output_node().args[0][0]
    with graph.inserting_after(loss):
        read = graph.get_attr("constant")
    read.meta["val"] = loss.meta["val"]
    with graph.inserting_after(read):
        scaled = graph.call_function(aten.mul.Tensor, (loss, read))
    scaled.meta["val"] = loss.meta["val"]
    graph.output_node().args = ((scaled, *graph.output_node().args[0][1:]),)
    captured.module.recompile()
    captured.module.meta["tag"] = "kept"
    problem = build_problem(export_graph(captured, FlatCosts()))
    module = write_back(captured.module, problem, random_schedule(problem, 0))
    assert module.constant is constant
    assert module.meta == {"tag": "kept"}
    assert type(module.graph._codegen) is type(graph._codegen)


def test_a_problem_of_another_graph_is_refused(captured, problem):
    schedule = as_captured(problem.num_nodes)
    names = ("other", *problem.node_names[1:])
    with pytest.raises(
        InputError, match="1 nodes differ: arg0_1 in the graph is other in the problem"
    ):
        write_back(captured.module, replace(problem, node_names=names), schedule)


def test_a_problem_of_another_size_is_refused(running_world, captured, problem):
    smaller = capture_toy(next(iter(running_world.group_ranks)), 4, num_shards=2)
    with pytest.raises(
        InputError,
        match=(
            f"problem has {problem.num_nodes} nodes, the graph has"
            f" {len(smaller.module.graph.nodes)}"
        ),
    ):
        write_back(smaller.module, problem, as_captured(problem.num_nodes))


def test_incomplete_and_disordered_schedules_are_refused(captured, problem):
    steps = as_captured(problem.num_nodes).steps
    with pytest.raises(InputError, match=r"no complete order of this graph: .* is missing"):
        write_back(captured.module, problem, Schedule(buckets=(), steps=steps[1:]))
    with pytest.raises(InputError, match="depends on"):
        write_back(
            captured.module, problem, Schedule(buckets=(), steps=(*reversed(steps[:-1]), steps[-1]))
        )


def test_inputs_keep_their_order(captured, problem):
    steps = as_captured(problem.num_nodes).steps
    with pytest.raises(InputError, match="order of the graph's inputs"):
        write_back(
            captured.module, problem, Schedule(buckets=(), steps=(steps[1], steps[0], *steps[2:]))
        )


def test_an_output_before_other_nodes_is_refused(captured, problem):
    steps = as_captured(problem.num_nodes).steps
    unread = replace(problem, predecessors=(*problem.predecessors[:-1], ()))
    with pytest.raises(InputError, match="last"):
        write_back(
            captured.module, unread, Schedule(buckets=(), steps=(*steps[:-2], steps[-1], steps[-2]))
        )


def test_an_unknown_group_is_refused(captured, problem):
    bucket = Bucket(tuple(collectives_of_kind(problem, "all_gather")[:2]))

    def nowhere(group: str) -> int:
        raise LookupError("no process group runs")

    schedule = schedule_with_buckets(problem, [bucket])
    with pytest.raises(
        InputError, match="no process group runs; start it, or state this process rank's place"
    ):
        write_back(captured.module, problem, schedule, process_rank_of=nowhere)
    for rank in (4, -1):
        with pytest.raises(
            InputError, match=f"has 4 process ranks; process_rank_of states that this one is {rank}"
        ):
            write_back(
                captured.module, problem, schedule, process_rank_of=lambda _, rank=rank: rank
            )


def broken(captured: CapturedGraph, change) -> CapturedGraph:
    """The captured graph after ``change`` has seen its gathers."""
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in captured.module.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    change(
        [
            node
            for node in graph.nodes
            if node.target is c10d.all_gather_into_tensor.default
            and node.args[0].op == "call_function"
        ]
    )
    return replace(captured, module=torch.fx.GraphModule(captured.module, graph))


def transpose_payload(gathers):
    payload = gathers[0].args[0]
    payload.meta["val"] = payload.meta["val"].t().contiguous().t()


def widen_payload(gathers):
    payload = gathers[0].args[0]
    payload.meta["val"] = payload.meta["val"].to(torch.float64)


def forget_value(gathers):
    del gathers[0].args[0].meta["val"]


def use_start(gathers):
    graph = gathers[0].graph
    with graph.inserting_before(graph.output_node()):
        graph.call_function(operator.is_, (gathers[0], None))


def launch_in_place(gathers):
    gathers[0].target = c10d.broadcast.default
    gathers[0].args = (gathers[0].args[0], 0, "0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (transpose_payload, "isn't contiguous; leave it in no bucket"),
        (widen_payload, "must agree in dtype: .* has torch.bfloat16, .* has torch.float64"),
        (forget_value, r'expected a tensor in meta\["val"\], found None'),
        (
            launch_in_place,
            "only functional all-gathers, reduce-scatters and all-reduces of one tensor",
        ),
    ],
)
def test_members_that_cannot_share_a_launch_are_refused_by_name(captured, problem, change, message):
    bucket = Bucket(tuple(collectives_of_kind(problem, "all_gather")))
    with pytest.raises(InputError, match=message):
        write_back(
            broken(captured, change).module, problem, schedule_with_buckets(problem, [bucket])
        )


def test_a_start_with_other_users_is_refused(captured, problem):
    changed = broken(captured, use_start)
    nodes = list(changed.module.graph.nodes)
    names, kinds = (
        (*problem.node_names[:-1], nodes[-2].name, "output"),
        (*problem.kinds[:-1], NodeKind.COMPUTE, NodeKind.OUTPUT),
    )
    start = nodes.index(nodes[-2].args[0])
    grown = replace(
        problem,
        node_names=names,
        kinds=kinds,
        duration_ticks=(*problem.duration_ticks, 0),
        predecessors=(*problem.predecessors[:-1], (start,), problem.predecessors[-1]),
        modules=(*problem.modules, ""),
        storages=tuple(
            replace(s, uses=tuple(u + (u == problem.num_nodes - 1) for u in s.uses))
            for s in problem.storages
        ),
    )
    bucket = Bucket(tuple(collectives_of_kind(grown, "all_gather")))
    with pytest.raises(InputError, match="to be the only user of its result; found"):
        write_back(changed.module, grown, schedule_with_buckets(grown, [bucket]))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_coalesced_bucket_is_one_launch_and_a_wait_for_each_member(captured, kind):
    """No buffer, no copy: it sends what the members sent, casts included, and notes which
    collectives it stands for.
    """
    problem = build_problem(export_graph(captured, CoalescedCosts()))
    members = tuple(collectives_of_kind(problem, kind)[:3])
    schedule = schedule_with_buckets(problem, [Bucket(members, coalesced=True)])
    module = write_back(captured.module, problem, schedule)
    starts = [problem.node_names[problem.collectives[c].start] for c in members]
    (launch,) = calls_of(module, "start")
    old = {node.name: node for node in captured.module.graph.nodes}
    operators = {
        "all_gather": c10d.all_gather_into_tensor_coalesced.default,
        "reduce_scatter": c10d.reduce_scatter_tensor_coalesced.default,
    }
    assert launch.target is operators[kind]
    assert launch.args[1:] == old[starts[0]].args[1:]
    assert [sent.name for sent in launch.args[0]] == [old[name].args[0].name for name in starts]
    assert [value.shape for value in launch.meta["val"]] == [
        old[name].meta["val"].shape for name in starts
    ]
    assert launch.meta["apsched"] == {"role": "start", "members": starts, "sources": starts}
    assert launch.meta["custom"] == {"region": "step"}
    waits = calls_of(module, "wait")
    assert [wait.meta["apsched"]["members"] for wait in waits] == [[name] for name in starts]
    assert [part.args for wait in waits for part in wait.all_input_nodes] == [
        (launch, place) for place in range(len(members))
    ]
    assert calls_of(module, "buffer", "copy_in", "copy_out") == []
