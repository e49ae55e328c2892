"""Each error that was found in the figures of other schedulers, so that it does not come here.

torch's ``flops_to_ns`` makes products faster than the chip; grouped products have no operations;
waits are charged as copies and ``getitem`` as traffic of its whole tuple; causal attention counts
dense; pointwise chains are priced unfused; tables round sizes to MiB and count an all-gather by its
input; milliseconds pass for microseconds, and every node adds one; inputs of collectives are freed
at their launch, waits and ``out=`` results get a second storage, and saved activations are never
freed.
"""

import operator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.costs.clusters.cluster import cluster_names, load_cluster
from apsched.costs.compute.roofline import Roofline
from apsched.costs.network.alpha_beta import bus_factor, collective_us, group_shape
from apsched.costs.network.table import load_table
from apsched.graph.export.export import export_graph
from apsched.kinds import NodeKind
from apsched.problem.build import build_problem
from apsched.schedule.memory import live_bytes
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.torch_compat import graphs as torch_private
from tests.helpers.graphs.instrumented import UnitCosts, capture_of, traced

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
H100 = load_cluster("h100")


@pytest.fixture(scope="module", autouse=True)
def group():
    """A fake process group of four for graphs that name it."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


def call(target, *args, val, **kwargs) -> torch.fx.Node:
    graph = torch.fx.Graph()

    def placed(value):
        if isinstance(value, torch.Tensor):
            node = graph.placeholder("p")
            node.meta["val"] = value
            return node
        return value

    node = graph.call_function(target, tuple(map(placed, args)), kwargs)
    node.meta["val"] = val
    return node


def price(target, *args, val, **kwargs) -> float:
    return Roofline(cluster=H100).compute_us(call(target, *args, val=val, **kwargs))


@pytest.mark.parametrize("name", cluster_names())
@pytest.mark.parametrize(
    "shape", [(8192, 8192, 8192), (256, 64, 512), (4096, 128, 4096), (1, 4096, 4096)]
)
def test_no_product_is_faster_than_the_chip(name: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    cluster = load_cluster(name)
    node = call(aten.mm.default, fake(m, k), fake(k, n), val=fake(m, n))
    assert Roofline(cluster=cluster).compute_us(node) >= 2 * m * n * k / (
        cluster.device.peak_tflops.bf16 * 1e6
    )


def test_grouped_products_have_operations() -> None:
    """Eight experts of 1024 rows cost at least their operations at the peak, and about what eight
    products cost.
    """
    rows, inner, columns = 8192, 4096, 4096
    grouped = price(
        aten._grouped_mm.default,
        fake(rows, inner),
        fake(8, inner, columns),
        fake(8, dtype=torch.int32),
        val=fake(rows, columns),
    )
    alone = price(
        aten.mm.default, fake(rows // 8, inner), fake(inner, columns), val=fake(rows // 8, columns)
    )
    assert grouped >= 2 * rows * inner * columns / (H100.device.peak_tflops.bf16 * 1e6)
    assert grouped == pytest.approx(8 * alone, rel=0.1)


def test_waits_and_getitem_are_free_however_large_what_they_show() -> None:
    large = fake(1 << 15, 1 << 14)  # a GiB
    parts = [large, large, large]
    assert price(c10d.wait_tensor.default, large, val=large) == 0.0
    graph = torch.fx.Graph()
    several = graph.placeholder("several")
    several.meta["val"] = parts
    item = graph.call_function(operator.getitem, (several, 1))
    item.meta["val"] = large
    assert Roofline(cluster=H100).compute_us(item) == 0.0


def test_causal_attention_is_half_of_dense() -> None:
    q = fake(2, 32, 8192, 128)
    val = (q, fake(2, 32, 8192, dtype=torch.float32))
    target = aten._scaled_dot_product_flash_attention.default
    assert price(target, q, q, q, 0.0, True, val=val) == pytest.approx(
        price(target, q, q, q, 0.0, False, val=val) / 2, rel=0.001
    )


def test_pointwise_chains_are_priced_fused() -> None:
    """A SwiGLU's gate: three reads and writes less, by default."""

    def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x.float()) * y.float()).to(torch.bfloat16)

    x = torch.empty(1024, 14336, dtype=torch.bfloat16)
    graph = make_fx(gate, tracing_mode="fake")(x, x.clone()).graph
    fused, alone = (
        sum(Roofline(cluster=H100, fused=on).compute_us(node) for node in graph.nodes)
        for on in (True, False)
    )
    assert fused == pytest.approx(3 * 2 * 1024 * 14336 / H100.device.memory_bytes_per_us + 2.0)
    assert alone > 3 * fused


CSV = """\
kind,group_size,size_bytes,time_us
all_gather,8,1024,10
all_gather,8,1048576,40
all_gather,8,2097152,60
"""


def test_tables_know_sizes_below_and_between_mebibytes(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(CSV)
    table, shape = load_table(path), group_shape(H100, 8)
    assert table.collective_us("all_gather", shape, 1 << 15) == pytest.approx(
        20.0
    )  # half way in log size, not the price of a MiB
    assert 40.0 < table.collective_us("all_gather", shape, 3 << 19) < 60.0  # 1.5 MiB is not 1
    assert collective_us(H100, "all_gather", shape, 1 << 10) < collective_us(
        H100, "all_gather", shape, 1 << 20
    )


def test_a_gather_is_counted_by_its_output_and_a_reduction_by_its_input() -> None:
    def step(shard: torch.Tensor, gradient: torch.Tensor):
        whole = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(shard, 4, "0"))
        return whole, c10d.wait_tensor.default(
            c10d.reduce_scatter_tensor.default(gradient, "sum", 4, "0")
        )

    dag = export_graph(
        capture_of(traced(step, (torch.randn(64), torch.randn(256))), ()), UnitCosts()
    )
    sizes = [
        record.collective.size_bytes for _, record in dag.nodes(data="record") if record.collective
    ]
    assert sizes == [4 * 64 * 4, 256 * 4]
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75


def test_microseconds_are_microseconds_and_nodes_add_nothing() -> None:
    """A copy of 3.015 GB at 3.015 TB/s takes a millisecond each way; ten views beside two nodes of
    1 us leave 2 us.
    """
    x = fake(3_015_000_000 // 2)
    assert price(aten.clone.default, x, val=fake(3_015_000_000 // 2)) == pytest.approx(2000 + 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = aten.sin.default(x)
        for _ in range(5):
            y = aten.t.default(aten.view.default(y, [8, 8]))
        return aten.cos.default(y)

    problem = build_problem(
        export_graph(capture_of(traced(step, (torch.randn(8, 8),)), ()), UnitCosts())
    )
    assert simulate(problem, as_captured(problem.num_nodes)).step_time_ticks == 2000


def test_inputs_of_collectives_live_until_the_wait_and_waits_own_nothing() -> None:
    def step(x: torch.Tensor):
        payload = aten.sin.default(x)
        launched = c10d.all_gather_into_tensor.default(payload, 4, "0")
        between = aten.cos.default(x)
        return aten.mul.Tensor(c10d.wait_tensor.default(launched), 2.0), between

    dag = export_graph(capture_of(traced(step, (torch.randn(64),)), ()), UnitCosts())
    records = {record.name: record for _, record in dag.nodes(data="record")}
    start = next(record for record in records.values() if record.kind is NodeKind.START)
    wait = next(record for record in records.values() if record.kind is NodeKind.WAIT)
    (payload,) = records["sin_default"].allocates
    assert payload in wait.frees
    assert wait.allocates == ()
    assert wait.aliases == start.allocates


def test_an_out_result_has_the_storage_that_it_is_written_to() -> None:
    def step(x: torch.Tensor):
        buffer = aten.new_empty.default(x, [256])
        launched = c10d.all_gather_into_tensor_out.default(x, 4, "0", out=buffer)
        return aten.mul.Tensor(c10d.wait_tensor.default(launched), 2.0)

    dag = export_graph(capture_of(traced(step, (torch.randn(64),)), ()), UnitCosts())
    records = [record for _, record in dag.nodes(data="record")]
    (buffer,) = next(record for record in records if "empty" in record.name).allocates
    start = next(record for record in records if record.kind is NodeKind.START)
    assert start.allocates == ()
    assert start.aliases == start.writes == (buffer,)


def test_saved_activations_are_freed_at_their_last_use_in_backward() -> None:
    """Four saved activations of 4 KiB, used one after the other: the peak is at the first use, and
    each is gone after its own.
    """

    def backward(
        gradient: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
    ):
        for activation in (d, c, b, a):
            gradient = aten.mul.Tensor(gradient, activation)
        return gradient

    inputs = tuple(torch.randn(1024) for _ in range(5))
    problem = build_problem(
        export_graph(capture_of(traced(backward, inputs), (), name="backward"), UnitCosts())
    )
    curve = live_bytes(problem, as_captured(problem.num_nodes))
    assert max(curve) == (5 + 1) * 4096
    assert curve[-1] <= 2 * 4096
