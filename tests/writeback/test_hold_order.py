"""Full Inductor keeps the order of a graph that is held, in the code that it generates, and its
kernels stay whole.
"""

import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_world import world
from apsched.compiler.inductor_settings import IN_ORDER
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.kinds import NodeKind
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.schedule.kernel_cuts import cuts_made
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.solver.solve import solve
from apsched.writeback.hold_order import hold_order
from apsched.writeback.in_flight import keep_what_is_sent
from apsched.writeback.round_trip import round_trip
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.inductor_code import (
    calls_of,
    calls_of_graph,
    decomposed,
    freed_in_flight,
    generated_code,
    segments_of,
)
from tests.helpers.graphs.inductor_memory import peak_of_code
from tests.helpers.graphs.toy_graphs import (
    CoalescedCosts,
    c10d,
    captured_function,
    toy_inputs,
    toy_step,
)
from tests.helpers.problems.random_schedules import compute_moves, random_schedule
from tests.helpers.processes import WORKERS, run_processes

WORLD_SIZE = 4
SEEDS = range(3)


@pytest.fixture(scope="module")
def running_world():
    with world(WORLD_SIZE) as running:
        yield running


@pytest.fixture(scope="module")
def group(running_world) -> str:
    return dist.group.WORLD.group_name


@pytest.fixture(scope="module")
def toy(group) -> CapturedGraph:
    captured = captured_function(
        toy_step(group, WORLD_SIZE), toy_inputs(WORLD_SIZE, 6, 0), parameters=6
    )
    return replace(captured, module=decomposed(captured.module))


def rewritten(toy: CapturedGraph, seed: int) -> GraphModule:
    problem = build_problem(export_graph(toy, CoalescedCosts()))
    return write_back(toy.module, problem, random_schedule(problem, seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reorder_for_peak_memory", [True, False])
def test_launches_waits_and_products_stay_where_a_random_schedule_has_them(
    toy, seed, reorder_for_peak_memory
):
    module = rewritten(toy, seed)
    code = generated_code(hold_order(module), reorder_for_peak_memory=reorder_for_peak_memory)
    assert segments_of(calls_of(code)) == segments_of(calls_of_graph(module))
    num_launches, wrong = freed_in_flight(code)
    assert num_launches > 0
    assert wrong == []


def test_compute_is_held_behind_all_waits_of_a_coalesced_launch(toy):
    """With a launch of several waits in a row, what stands behind them follows each."""
    held = hold_order(rewritten(toy, 1)).graph
    waits = [
        node
        for node in held.find_nodes(op="call_function", target=torch.ops.higher_order.control_deps)
        if node.name.endswith("_waited")
    ]
    first, second = waits
    (product,) = [node for node in held.nodes if node.name == "mm_15"]
    assert product.args[0] == (second,)
    assert second.args[0] == (first,)


def test_they_do_not_without_being_held(toy):
    modules = [rewritten(toy, seed) for seed in SEEDS]
    assert any(
        segments_of(calls_of(generated_code(module))) != segments_of(calls_of_graph(module))
        for module in modules
    )


@pytest.mark.parametrize(
    ("preset", "mesh", "num_layers", "direction"),
    [("llama3-debug", "fsdp=2,tp=2", 1, 1), ("deepseek-v3-debug", "fsdp=4,ep=2", 2, 0)],
)
def test_moved_compute_stays_where_the_solver_put_it(
    running_world, preset, mesh, num_layers, direction
):
    capture = capture_built(
        build(preset, mesh=MeshSpec.parse(mesh), seq_len=32, num_layers=num_layers)
    )
    captured = capture.graphs[direction]
    captured = replace(
        captured, module=decomposed(captured.module), kept_inputs=frozenset(), parameter_names={}
    )
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    problem = build_problem(export_graph(captured, costs, group_ranks=capture.group_ranks))
    schedule = solve(problem, Caps(max_compute_move=200), SolveOptions(budget=0.5)).best.schedule
    assert any(compute_moves(problem, schedule))
    module = write_back(captured.module, problem, schedule)
    code = generated_code(hold_order(module))
    assert segments_of(calls_of(code)) == segments_of(calls_of_graph(module))
    assert freed_in_flight(code)[1] == []
    assert calls_of(code).count("kernel") <= num_priced_kernels(problem)


def test_the_buffer_of_a_bucket_is_allocated_behind_the_compute_before_its_copy_in(group):
    """Inductor writes each member with a kernel of its own, which may be the one that makes it."""

    def step(x0, x1, x2, y, w0, w1):
        started = []
        for x, w in ((x0, w0), (x1, w1), (x2, None)):
            gradient = (x * y).sum(0).to(torch.bfloat16)
            started.append(c10d.reduce_scatter_tensor(gradient, "sum", WORLD_SIZE, group))
            y = y if w is None else torch.tanh(y @ w)
        return [c10d.wait_tensor(one) for one in started]

    shapes = ((16, 64), (16, 128), (16, 256), (16, 64), (64, 128), (128, 256))
    traced = make_fx(step, tracing_mode="fake")(*map(torch.ones, shapes))
    captured = CapturedGraph(
        name="backward", module=decomposed(traced), kept_inputs=frozenset(), parameter_names={}
    )
    ranks = {group: tuple(range(WORLD_SIZE))}
    costs = ClusterCostModel(load_cluster("h100"), ranks)
    problem = build_problem(export_graph(captured, costs, group_ranks=ranks))
    best = solve(problem, Caps(), SolveOptions(budget=0.1)).best
    assert best.num_launches == 1
    lines = generated_code(
        hold_order(write_back(captured.module, problem, best.schedule))
    ).splitlines()
    (launch,) = (k for k, line in enumerate(lines) if "reduce_scatter_tensor.default(" in line)
    payload = re.search(r"default\((\w+),", lines[launch])[1]
    (allocated,) = (k for k, line in enumerate(lines) if f" {payload} = empty_strided" in line)
    assert max(k for k, line in enumerate(lines) if "extern_kernels.mm" in line) < allocated


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(
    ("preset", "mesh", "bucket_cap_bytes"),
    [("llama3-small", "fsdp=4", None), ("llama3-debug", "fsdp=2,tp=2", 30_000)],
)
def test_the_code_takes_the_memory_that_was_predicted(
    running_world, preset, mesh, bucket_cap_bytes, direction
):
    capture = capture_built(build(preset, mesh=MeshSpec.parse(mesh), seq_len=64, num_layers=3))
    captured = capture.graphs[direction]
    captured = replace(captured, module=decomposed(captured.module))
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    problem = build_problem(export_graph(captured, costs, group_ranks=capture.group_ranks))
    best = solve(problem, Caps(bucket_cap_bytes=bucket_cap_bytes), SolveOptions(budget=0.5)).best
    held = hold_order(write_back(captured.module, problem, best.schedule))
    peak = peak_of_code(held, captured.kept_inputs, **IN_ORDER)
    assert 0.9 < peak / best.peak_memory_bytes < 1.1


def num_priced_kernels(problem: Problem) -> int:
    """Return of how many kernels the costs speak."""
    compute = [node for node, kind in enumerate(problem.kinds) if kind is NodeKind.COMPUTE]
    alone = [
        node
        for node in compute
        if problem.kernels[node] < 0 and "mm" not in problem.node_names[node]
    ]
    return len(alone) + len({problem.kernels[node] for node in compute} - {-1})


def chain(group: str):
    """A launch stands between the nodes of a pointwise chain, and a product that needs nothing of
    it.
    """

    def step(x, y, shard):
        a = torch.sin(x) * 2
        started = c10d.all_gather_into_tensor(shard, WORLD_SIZE, group)
        b = torch.exp(a + 1).sum(dim=1)
        product = y @ y
        whole = c10d.wait_tensor(started)
        return b, product @ whole

    return make_fx(step, tracing_mode="fake")(torch.ones(8, 8), torch.ones(8, 8), torch.ones(2, 8))


def test_a_chain_across_a_launch_stays_one_kernel(group):
    module = chain(group)
    held = hold_order(module)
    calls = calls_of(generated_code(held))
    assert calls == ["all_gather", "kernel", "mm", "wait", "mm"] or calls == [
        "all_gather",
        "mm",
        "kernel",
        "wait",
        "mm",
    ]
    assert calls_of(generated_code(module)).count("kernel") == 1


def test_what_a_launch_needs_comes_before_it_and_the_rest_of_its_chain_behind(group):
    def step(x, y):
        a = torch.sin(x)
        started = c10d.all_gather_into_tensor(a, WORLD_SIZE, group)
        b = torch.exp(a)
        product = y @ y
        return c10d.wait_tensor(started), b, product

    module = make_fx(step, tracing_mode="fake")(torch.ones(8, 8), torch.ones(8, 8))
    calls = calls_of(generated_code(hold_order(module)))
    assert sorted(calls[2:4]) == ["kernel", "mm"]
    assert (calls[:2], calls[4:]) == (["kernel", "all_gather"], ["wait"])


def test_what_a_launch_needs_through_a_view_comes_before_it(group):
    """A view has no place of its own: the chain that it belongs to may not be put off for it."""

    def step(x):
        a = torch.sin(x)
        started = c10d.all_gather_into_tensor(a.view(-1), WORLD_SIZE, group)
        b = torch.exp(a)
        return c10d.wait_tensor(started), b

    held = hold_order(make_fx(step, tracing_mode="fake")(torch.ones(8, 8)))
    held.graph.lint()
    names = [node.name for node in held.graph.nodes]
    order = [names.index(name) for name in ("sin", "view", "all_gather_into_tensor", "exp")]
    assert order == sorted(order)


def softmax_of_shards(group: str):
    """A chain of three results; a product and a launch can run between its first and the others."""

    def step(x, y):
        shifted = x - x.amax(dim=1, keepdim=True)
        scaled = shifted * 0.5
        exponentials = torch.exp(scaled)
        total = exponentials.sum(dim=1)
        product = scaled @ y
        summed = c10d.wait_tensor(c10d.all_reduce(product, "sum", group))
        return exponentials, total, summed

    return captured_function(step, (torch.ones(8, 8), torch.ones(8, 8)), parameters=0)


def test_a_kernel_that_the_order_cuts_is_two_in_the_code_and_at_the_price_of_two(group):
    captured = softmax_of_shards(group)
    costs = ClusterCostModel(load_cluster("h100"), {group: tuple(range(WORLD_SIZE))})
    problem = build_problem(export_graph(captured, costs))
    (cut,) = (cut for cut in problem.cuts if problem.node_names[cut.node] == "exp")
    whole = as_captured(problem.num_nodes)
    later = {problem.node_names.index(name) for name in ("exp", "sum_1")}
    steps = [step for step in whole.steps if step.index not in later]
    at = next(k for k, step in enumerate(steps) if problem.kinds[step.index] is NodeKind.WAIT)
    torn = replace(
        whole,
        steps=(*steps[:at], *(step for step in whole.steps if step.index in later), *steps[at:]),
    )
    assert cuts_made(problem, whole) == ()
    assert cuts_made(problem, torn) == (cut,)
    codes = {}
    for schedule, num_kernels in ((whole, 0), (torn, 1)):
        module = write_back(captured.module, problem, schedule)
        claimed = simulate(problem, schedule)
        assert round_trip(module, captured, costs, {}, claimed).exact
        codes[num_kernels] = calls_of(generated_code(hold_order(module)))
    assert simulate(problem, torn).compute_ticks == simulate(problem, whole).compute_ticks + sum(
        cut.extra_ticks
    )
    kernels_behind = [
        calls[calls.index("all_reduce") :].count("kernel") for calls in codes.values()
    ]
    assert kernels_behind == [0, 1], codes


def test_the_graph_itself_stays_as_it_is_and_names_are_kept(toy):
    module = rewritten(toy, 0)
    code = module.code
    held = hold_order(module)
    assert module.code == code
    assert [node.name for node in held.graph.find_nodes(op="placeholder")] == [
        n.name for n in module.graph.find_nodes(op="placeholder")
    ]
    names = {node.name for node in module.graph.nodes}
    assert names <= {node.name for node in held.graph.nodes}


def test_what_is_written_is_not_written_before_it_is_read(group):
    """A chain that reads a buffer is not put off behind a node that writes it."""

    def step(x, shard):
        buffer = x + 1
        a = torch.sin(buffer)
        started = c10d.all_gather_into_tensor(shard, WORLD_SIZE, group)
        buffer.mul_(2)
        waited = c10d.wait_tensor(started)
        return torch.exp(a), buffer, waited

    module = make_fx(step, tracing_mode="fake")(torch.ones(8, 8), torch.ones(4, 8))
    names = [node.name for node in hold_order(module).graph.nodes]
    assert names.index("sin") < names.index("mul_") < names.index("exp")


def test_a_graph_without_collectives_is_not_touched():
    module = make_fx(lambda x: torch.sin(x) @ x, tracing_mode="fake")(torch.ones(4, 4))
    held = hold_order(module)
    assert [(node.name, node.target) for node in held.graph.nodes] == [
        (node.name, node.target) for node in module.graph.nodes
    ]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.ranks
def test_held_and_compiled_it_computes_what_was_captured_on_two_processes(tmp_path):
    for report in run_processes(
        WORKERS / "graphs/hold_order_worker.py", tmp_path, 2, timeout_s=600
    ):
        assert min(report["num_moved"]) > 5
        assert report["largest"] > 0.1
        assert report["largest_distance"] < 1e-5 * report["largest"]


def into_a_buffer(group: str, *, shared: bool):
    """A gather into ``out``, and work between its launch and its wait that could use the memory of
    what is sent.
    """

    def step(x, y):
        sent = torch.sin(x)
        out = torch.empty(8 * WORLD_SIZE, 8)
        started = c10d.all_gather_into_tensor_out(sent, WORLD_SIZE, group, out=out)
        other = torch.exp(torch.cos(y) @ y) @ y
        waited = c10d.wait_tensor(started)
        return (waited, other, out) if shared else (waited, other)

    return make_fx(step, tracing_mode="fake")(torch.ones(8, 8), torch.ones(8, 8))


def test_what_is_sent_is_not_overwritten_in_flight(group, monkeypatch):
    """Inductor alone would: it takes the input of a collective with ``out`` for dead from the
    launch on.
    """
    module = into_a_buffer(group, shared=False)
    before = module.code
    num_launches, wrong = freed_in_flight(generated_code(hold_order(module)))
    assert (num_launches, wrong) == (1, [])
    assert module.code == before
    monkeypatch.setattr("apsched.writeback.hold_order.keep_what_is_sent", lambda gm: gm)
    num_launches, wrong = freed_in_flight(generated_code(hold_order(module)))
    assert num_launches == 1
    assert any("# reuse" in line for line in wrong)


def test_a_gather_into_a_buffer_of_its_own_becomes_one_without(group):
    kept = keep_what_is_sent(into_a_buffer(group, shared=False))
    targets = [node.target for node in kept.graph.nodes]
    assert c10d.all_gather_into_tensor.default in targets
    assert c10d.all_gather_into_tensor_out.default not in targets
    assert torch.ops.aten.empty.memory_format not in targets


def test_where_that_cannot_be_helped_it_is_refused(group):
    module = into_a_buffer(group, shared=True)
    with pytest.raises(
        InputError,
        match=(
            r"node all_gather_into_tensor_out: expected a collective into a new buffer, found"
            r" out=empty"
        ),
    ):
        hold_order(module)
    off = {"allow_buffer_reuse": False, "inplace_buffers": False, "memory_planning": False}
    with torch._inductor.config.patch(off):
        code = generated_code(hold_order(module))
    assert not [line for line in freed_in_flight(code)[1] if "reuse" in line]
