"""Operations measured on the device at hand: all of them run, once, and what they take is kept."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import apsched
from apsched.calibrate import measure, measure_collectives
from apsched.calibrate.arguments import STAND_INS, real_call
from apsched.calibrate.measure_collectives import _inner_mean, _wanted
from apsched.calibrate.ranks import job
from apsched.calibrate.stopwatch import duration_us
from apsched.capture.fake_world import world
from apsched.capture.graph_module import capture_graph
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.compute.traffic import op_name
from apsched.costs.measured import MeasuredCosts, Price, Transfers
from apsched.costs.measured_file import dump_costs, load_costs
from apsched.graph.export.export import export_graph
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset
from tests.conftest import Run
from tests.helpers.processes import as_torchrun

c10d = torch.ops._c10d_functional
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads that wait for each other take for ever on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("preset", "layers"), [("llama3-debug", "1"), ("deepseek-v3-debug", "2")])
def test_every_operation_of_a_model_runs_here_and_the_second_time_none(
    run: Run, tmp_path, preset, layers
):
    path = tmp_path / "costs.toml"
    source = (preset, "--layers", layers, "--mesh", "fsdp=4", "--seq", "64", "--cluster", "cpu")
    arguments = (
        "calibrate",
        "--measure",
        "--unfused",
        "--graph",
        *source,
        "-o",
        str(path),
        "--json",
    )
    first = run(*arguments)
    assert first.code == 0, first.stderr
    report = json.loads(first.stdout)
    assert report["failed"] == {}
    assert report["known"] == 0
    costs = load_costs(path)
    assert len(costs.compute) == report["measured"] > 50
    assert all(price.time_us > 0 and price.source == "measured" for price in costs.compute.values())
    assert costs.device.startswith("cpu, ")
    assert costs.transfers == ()  # one process: the formulas price what four would do
    before = path.read_bytes()
    again = json.loads(run(*arguments).stdout)
    assert (again["measured"], again["known"]) == (0, report["measured"])
    assert path.read_bytes() == before


def test_costs_of_other_graphs_and_collectives_stay(run: Run, tmp_path):
    path = tmp_path / "costs.toml"

    def measured(mesh: str, cluster: str) -> dict:
        source = ("llama3-debug", "--mesh", mesh, "--seq", "64", "--layers", "1")
        arguments = ("--graph", *source, "--cluster", cluster, "-o", str(path), "--json")
        ran = run("calibrate", "--measure", *arguments)
        assert ran.code == 0, ran.stderr
        return json.loads(ran.stdout)

    measured("fsdp=4", "cpu")
    gather = Transfers(
        kind="all_gather", num_ranks=4, num_nodes=1, source="measured", points=((512, 7.0),)
    )
    one = replace(load_costs(path), transfers=(gather,), launch_us={"all_gather": 5.0})
    path.write_bytes(dump_costs(one))
    other = measured("fsdp=2", "h100")
    both = load_costs(path)
    assert both.compute.keys() > one.compute.keys() or other["measured"] == 0
    assert all(both.compute[operation] == price for operation, price in one.compute.items())
    assert (both.transfers, both.launch_us) == (one.transfers, one.launch_us)
    assert both.cluster == "h100"
    assert other["known"] > 0, "the cluster prices the rest; times are of the device"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute": {"a": Price(time_us=1.0, source="profile")}}, "found profile times in"),
        (
            {"device": "NVIDIA H100"},
            r"of this device \(cpu, 1 thread\), found times of NVIDIA H100",
        ),
    ],
    ids=["profile", "device"],
)
def test_times_that_mean_something_else_are_not_replaced(run: Run, tmp_path, change, message):
    path = tmp_path / "costs.toml"
    known = {"a": Price(time_us=1.0, source="measured")}
    costs = MeasuredCosts(device="cpu, 1 thread", cluster="cpu", compute=known)
    path.write_bytes(dump_costs(replace(costs, **change)))
    before = path.read_bytes()
    source = ("--graph", "llama3-debug", "--mesh", "fsdp=2", "--cluster", "cpu", "-o", str(path))
    ran = run("calibrate", "--measure", *source)
    assert ran.code == 2
    assert re.search(message, ran.stderr)
    assert "state another file" in ran.stderr
    assert path.read_bytes() == before


def test_a_broken_file_is_not_replaced_and_a_profile_replaces_no_measured_times(
    run: Run, tmp_path
) -> None:
    path = tmp_path / "costs.toml"
    path.write_text("broken")
    source = ("--graph", "llama3-debug", "--mesh", "fsdp=2", "--cluster", "cpu", "-o", str(path))
    ran = run("calibrate", "--measure", *source)
    assert ran.code == 2
    assert "delete the file, or state another one" in ran.stderr
    assert path.read_text() == "broken"
    known = {"a": Price(time_us=1.0, source="measured")}
    path.write_bytes(dump_costs(MeasuredCosts(device="cpu", cluster="cpu", compute=known)))
    (tmp_path / "trace.json").write_text("{}")
    ran = run("calibrate", "--trace", str(tmp_path / "trace.json"), *source)
    assert ran.code == 2
    assert "one with profile times, found measured times in" in ran.stderr


def test_costs_price_the_source_that_they_were_measured_for(run: Run, tmp_path):
    path = tmp_path / "costs.toml"
    source = ("llama3-debug", "--mesh", "fsdp=4", "--seq", "64", "--layers", "1")
    assert (
        run("calibrate", "--measure", "--graph", *source, "--cluster", "cpu", "-o", str(path)).code
        == 0
    )
    ran = run("audit", *source, "--costs", str(path), "--budget", "1", "--json")
    assert ran.code == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["cluster"] == "cpu"  # the cluster of the costs, where none is chosen
    for graph in report["audit"]:
        assert set(graph["graph"]["costs"]) == {"measured", "formula"}


def test_what_inductor_fuses_is_left_to_the_formulas(run: Run, tmp_path):
    """Operators one by one take longer than the kernel that a compiler makes of them."""
    names = {}
    for flags in ((), ("--unfused",)):
        path = tmp_path / f"costs{len(flags)}.toml"
        source = (
            "--graph",
            "llama3-debug",
            "--mesh",
            "fsdp=2",
            "--seq",
            "32",
            "--layers",
            "1",
            "--cluster",
            "cpu",
        )
        assert run("calibrate", "--measure", *flags, *source, "-o", str(path)).code == 0
        names[flags] = {operation.partition("(")[0] for operation in load_costs(path).compute}
    assert "aten::mm" in names[()]
    assert "aten::rsqrt" not in names[()]
    assert names[()] < names["--unfused",]
    ran = run("calibrate", "--trace", "t.json", "--unfused", *source, "-o", "costs.toml")
    assert (ran.code, "it is an option of --measure" in ran.stderr) == (2, True)


def test_a_job_that_torchrun_started_gets_a_process_group_and_ends_it(monkeypatch):
    with as_torchrun(world_size=1) as environment:
        for name, value in (environment | {"RANK": "0"}).items():
            monkeypatch.setenv(name, value)
        with job() as here:
            assert (here.connected, here.rank, dist.get_world_size()) == (True, 0, 1)
    assert not dist.is_initialized()
    with world(2), job() as here:
        assert not here.connected  # a fake process group has nothing to measure


def test_a_graph_file_has_no_operators_to_run(run: Run, tmp_path):
    graph = tmp_path / "step.graph"
    assert (
        run(
            "capture",
            "llama3-debug",
            "--mesh",
            "fsdp=2",
            "--seq",
            "64",
            "--layers",
            "1",
            "-o",
            str(graph),
        ).code
        == 0
    )
    ran = run("calibrate", "--measure", "--graph", str(graph), "-o", str(tmp_path / "costs.toml"))
    assert ran.code == 2
    assert "a graph file has none; use the source of its capture" in ran.stderr


def _node(target, *values, result=None):
    graph = torch.fx.Graph()
    args = []
    for value in values:
        args.append(graph.placeholder("x") if isinstance(value, torch.Tensor) else value)
        if isinstance(value, torch.Tensor):
            args[-1].meta["val"] = value
    node = graph.call_function(target, tuple(args))
    node.meta["val"] = result
    return node


def test_arguments_have_shapes_strides_and_dtypes_of_the_graph():
    x, index = torch.empty(6, 4, dtype=torch.bfloat16).t(), torch.empty(500, dtype=torch.int64)
    target, (made, axis, rows), _ = real_call(
        _node(torch.ops.aten.index_select.default, x, 0, index), CPU
    )
    assert (made.shape, made.stride(), made.dtype, axis) == (x.shape, x.stride(), x.dtype, 0)
    assert set(rows.tolist()) == {0, 1, 2, 3}  # rows that there are
    assert target(made, axis, rows).shape == (500, 6)
    expanded = torch.empty(1).expand(8, 3)
    _, (made, _), _ = real_call(_node(torch.ops.aten.div.Tensor, expanded, 2), CPU)
    assert (made.shape, made.stride(), made.untyped_storage().nbytes()) == ((8, 3), (0, 0), 4)


def test_offsets_of_a_grouped_product_cut_its_rows_into_equal_parts():
    x, w, offs = (
        torch.empty(64, 16, dtype=torch.bfloat16),
        torch.empty(4, 16, 32, dtype=torch.bfloat16),
        torch.empty(4, dtype=torch.int32),
    )
    _, args, _ = real_call(_node(torch.ops.aten._grouped_mm.default, x, w, offs), CPU)
    assert args[2].tolist() == [16, 32, 48, 64]
    assert args[2].dtype == torch.int32


def test_the_attention_that_a_gpu_runs_gives_what_the_cpus_gives():
    """On a GPU another operator stands in for the CPU's; it computes the same."""
    q, k = torch.randn(1, 4, 32, 16), torch.randn(1, 4, 32, 16)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = forward(q, k, k, 0.0, True)
    torch.testing.assert_close(STAND_INS[op_name(forward)]()(q, k, k, 0.0, True), out)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    gradients = STAND_INS[op_name(backward)]()(out, q, k, k, out, lse, 0.0, True)
    torch.testing.assert_close(list(gradients), list(backward(out, q, k, k, out, lse, 0.0, True)))


@pytest.mark.alone
def test_the_stopwatch_tells_much_work_from_little():
    """A million times the bytes; a busy machine makes both slower."""
    small, large = torch.zeros(64, dtype=torch.uint8), torch.zeros(2**26, dtype=torch.uint8)
    assert duration_us(large.clone, CPU) > 10 * duration_us(small.clone, CPU) > 0


def test_each_message_and_buckets_up_to_all_of_one_graph_are_timed():
    """A bucket never spans two graphs."""
    with world(2):
        capture = capture_preset(
            "llama3-debug", mesh=MeshSpec.parse("fsdp=2"), seq_len=32, num_layers=1
        )
        costs = ClusterCostModel(load_cluster("cpu"), capture.group_ranks)
        dags = [
            export_graph(captured, costs, group_ranks=capture.group_ranks)
            for captured in capture.graphs
        ]
    wanted = {kind: sizes for kind, _, _, sizes, _ in _wanted(dags)}
    largest = {kind: size for kind, _, _, _, size in _wanted(dags)}
    for kind in ("all_gather", "reduce_scatter"):
        totals = []
        for dag in dags:
            collectives = [
                dag.nodes[rank]["record"].collective for rank in range(dag.number_of_nodes())
            ]
            messages = [c.size_bytes for c in collectives if c is not None and c.kind == kind]
            assert set(messages) <= set(wanted[kind])
            assert max(messages, default=0) <= largest[kind] < wanted[kind][-1]
            totals.append(sum(messages))
        assert wanted[kind][-1] == max(totals)


def test_the_launch_of_a_bucket_is_timed_at_sizes_of_buckets(monkeypatch):
    """gloo's reduce-scatter copies its input before it returns: a launch of 14 MB takes four times
    as long as one of 1 MB.
    """
    with world(2):
        capture = capture_preset(
            "llama3-debug", mesh=MeshSpec.parse("fsdp=2"), seq_len=32, num_layers=1
        )
        costs = ClusterCostModel(load_cluster("cpu"), capture.group_ranks)
        dags = [
            export_graph(captured, costs, group_ranks=capture.group_ranks)
            for captured in capture.graphs
        ]
    largest = {kind: size for kind, _, _, _, size in _wanted(dags)}
    monkeypatch.setattr(
        measure_collectives,
        "_transfer_us",
        lambda kind, group, num_ranks, size_bytes, device: (float(size_bytes), 1.0),
    )
    monkeypatch.setattr(
        measure_collectives,
        "queued_us",
        lambda kind, group, num_ranks, size_bytes, device: (float(size_bytes), 7.0),
    )
    assert set(largest) == {"all_gather", "reduce_scatter"}
    assert measure_collectives.measure_collectives(dags, load_cluster("cpu"), CPU)[1] == {
        "all_gather": 7.0,
        "reduce_scatter": 7.0,
    }


def test_what_is_copied_is_in_no_cache(monkeypatch):
    """Each call copies another part of a pool that no cache holds."""
    read: dict[int, list[int]] = {}

    class Slices(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.slice.Tensor:
                read.setdefault(args[3] - args[2], []).append(args[2])
            return func(*args, **(kwargs or {}))

    def duration_us(call, device):
        with Slices():
            assert call().shape == call().shape
        return 1.0

    monkeypatch.setattr(measure, "duration_us", duration_us)
    assert [size_bytes for size_bytes, _ in measure._copies(CPU)] == list(read) == sorted(read)
    assert all(begins == [0, size_bytes] for size_bytes, begins in read.items())
    assert 2 * max(read) <= measure._POOL_BYTES


def test_a_transfer_costs_the_mean_without_the_extremes():
    """A hundred small messages take a hundred times their mean; the median leaves their long tail
    out.
    """
    assert _inner_mean([1.0] * 7 + [9.0] * 2 + [500.0]) == pytest.approx((6 * 1.0 + 2 * 9.0) / 8)


def test_a_bucket_costs_what_it_takes_behind_another_not_what_the_first_waits(monkeypatch):
    """The first of three launched at once takes five times as long, since it wakes everybody. The
    clock is ours.
    """
    now_ns, launched = [0], []

    def start() -> torch.Tensor:
        now_ns[0] += 1_000
        launched.append(now_ns[0])
        return torch.zeros(())

    def wait_tensor(_: torch.Tensor) -> None:
        now_ns[0] += 500_000 if len(launched) % 3 == 0 and now_ns[0] == launched[-1] else 100_000

    monkeypatch.setattr(measure_collectives, "_starter", lambda *_: start)
    monkeypatch.setattr(measure_collectives, "_c10d", SimpleNamespace(wait_tensor=wait_tensor))
    monkeypatch.setattr(
        measure_collectives, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns[0])
    )
    monkeypatch.setattr(measure_collectives, "dist", SimpleNamespace(barrier=lambda _: None))
    monkeypatch.setattr(measure_collectives, "group_of_name", lambda _: None)
    assert measure_collectives.queued_us("all_gather", "0", 2, 4096, CPU) == (100.0, 1.0)


def test_what_communicates_is_not_run_and_subgraphs_are():
    def step(x):
        sent = c10d.isend(x.sin(), 1, 0, "0")
        c10d.wait_tensor(sent)
        both = torch.cond(
            x.sum() > 0, lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")), torch.sin, (x,)
        )
        alone = torch.cond(x.sum() > 1, torch.cos, torch.sin, (x,))
        return c10d.all_reduce(both, "sum", "0"), alone

    with world(2):
        module = make_fx(step, tracing_mode="fake")(torch.randn(4, 8))
        dag = export_graph(capture_graph(module), ClusterCostModel(load_cluster("cpu")))
    found = measure.measure_compute([(module, dag)], CPU, "cpu", fused=False)
    assert found.failed == {}
    operators = [operation.partition("(")[0] for operation in found.costs.compute]
    assert sorted(operators) == ["aten::cos", "aten::gt", "aten::sin", "aten::sum"]


def test_operations_run_on_real_tensors_inside_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd calls the compiler of forward while it traces with fake tensors."""
    real: list[bool] = []

    def timed(call: Callable[[], object], device: torch.device) -> float:
        real.append(not isinstance(call(), FakeTensor))
        return duration_us(call, device)

    def compiler(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        model = apsched.measure_costs(gm, cluster="cpu")
        assert model.costs.compute
        return make_boxed_func(apsched.optimize(gm, cost_model=model, budget=0).forward)

    monkeypatch.setattr(measure, "duration_us", timed)
    layer = torch.nn.Linear(8, 8)
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    torch.compile(layer, backend=backend, fullgraph=True)(torch.ones(2, 8)).sum().backward()
    assert real
    assert all(real)
