"""What the DAG says of small graphs: kinds, orders, prices, which collectives move, names and
directions.
"""

import pytest
import torch
import torch.distributed as dist

from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.kinds import NodeKind
from apsched.torch_compat import graphs as torch_private
from tests.helpers.graphs.instrumented import UnitCosts, capture_of, traced

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@pytest.fixture(scope="module", autouse=True)
def group():
    """A fake process group for graphs that name it without a size."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def floats(*shape):
    return torch.randn(*shape)


def dag_of(function, *inputs, kept=(), name="graph", parameters=None, cost_model=None):
    return export_graph(
        capture_of(traced(function, inputs), kept, name=name, parameters=parameters),
        cost_model or UnitCosts(),
    )


def by_name(dag):
    return {record.name: record for _, record in dag.nodes(data="record")}


def edges(dag, kind):
    names = {rank: record.name for rank, record in dag.nodes(data="record")}
    return {(names[u], names[v]) for u, v, k in dag.edges(data="kind") if k == kind}


def gathered(shard):
    return c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(shard, 4, "0"))


def reduced(gradient):
    return c10d.wait_tensor.default(c10d.reduce_scatter_tensor.default(gradient, "avg", 4, "0"))


def test_kinds_and_prices():
    def step(x, shard):
        whole = gathered(aten._to_copy.default(shard, dtype=torch.bfloat16))
        left, _ = aten.split.Tensor(aten.mm.default(x, aten.t.default(whole)), 8, 1)
        return aten.view.default(aten.clone.default(left), [-1])

    dag = dag_of(step, floats(4, 16).bfloat16(), floats(4, 16))
    kinds = [
        (record.name, record.kind.value, record.duration_us) for record in by_name(dag).values()
    ]
    assert kinds == [
        ("x", "input", 0.0),
        ("shard", "input", 0.0),
        ("_to_copy_default", "compute", 1.0),
        ("all_gather_into_tensor_default", "start", 1.0),
        ("wait_tensor_default", "wait", 0.0),
        ("t_default", "view", 0.0),
        ("mm_default", "compute", 1.0),
        ("split_tensor", "view", 0.0),
        ("getitem", "view", 0.0),
        ("getitem_1", "view", 0.0),
        ("clone_default", "compute", 1.0),
        ("view_default", "view", 0.0),
        ("output", "output", 0.0),
    ]
    assert {record.cost_source for record in by_name(dag).values()} == {"free", "model"}
    assert set(dag.graph["curves"]) == {"copy", "all_gather:0", "launch:all_gather:0"}
    assert dag.graph["curves"]["all_gather:0"](1 << 20) == (10 + 1024) * 1000
    assert by_name(dag)["all_gather_into_tensor_default"].collective.size_bytes == 16 * 16 * 2


def test_writers_stay_between_the_readers_before_and_after():
    def step(x, y):
        first = aten.sin.default(x)
        second = aten.cos.default(aten.view.default(x, [-1]))
        aten.add_.Tensor(x, y)
        third = aten.exp.default(x)
        aten.mul_.Tensor(x, y)
        return first, second, third

    order = edges(dag_of(step, floats(8, 8), floats(8, 8)), "order")
    assert order == {
        ("sin_default", "add__tensor"),
        ("cos_default", "add__tensor"),
        ("add__tensor", "exp_default"),
        ("exp_default", "mul__tensor"),
        ("add__tensor", "mul__tensor"),
        ("mul__tensor", "output"),
    }


def test_the_input_of_a_collective_is_written_only_after_the_wait():
    def step(x):
        started = c10d.all_gather_into_tensor.default(x, 4, "0")
        other = aten.sin.default(started)  # keeps the wait away from the start
        done = c10d.wait_tensor.default(started)
        aten.zero_.default(x)
        return done, other

    order = edges(dag_of(step, floats(8, 8)), "order")
    assert ("wait_tensor_default", "zero__default") in order


def test_a_collective_in_place_is_read_only_after_its_wait():
    def step(x):
        y = aten.exp.default(x)
        c10d.all_reduce_.default(y, "sum", "0")
        c10d.wait_tensor.default(y)
        return aten.sin.default(y)

    order = edges(dag_of(step, floats(8, 8)), "order")
    assert {
        ("all_reduce__default", "wait_tensor_default"),
        ("wait_tensor_default", "sin_default"),
    } <= order


def test_random_operators_keep_their_order_but_attention_without_dropout_does_not_draw():
    def step(x, q):
        a = aten.bernoulli.default(x)
        b = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q, 0.0, True)
        c = aten.rand_like.default(x)
        return a, b[0], c

    order = edges(dag_of(step, floats(8, 8), floats(1, 2, 8, 8)), "order")
    assert order == {("bernoulli_default", "rand_like_default")}


def test_asserts_keep_their_order():
    def step(x):
        aten._assert_async.msg(aten.gt.Scalar(aten.sum.default(x), 0), "positive")
        aten._assert_async.msg(aten.lt.Scalar(aten.sum.default(x), 9), "small")
        return aten.sin.default(x)

    order = edges(dag_of(step, floats(8, 8)), "order")
    assert order == {
        ("_assert_async_msg", "_assert_async_msg_1"),
        ("_assert_async_msg_1", "output"),
    }


def places(dag):
    return {
        record.name: (record.collective.on_path, record.collective.bucketable)
        for record in by_name(dag).values()
        if record.collective
    }


MOVES, ON_PATH = (False, True), (True, False)


def test_gathers_of_inputs_and_reductions_for_outputs_move():
    def step(x, shard):
        whole = gathered(
            aten._to_copy.default(aten.view.default(shard, [4, 16]), dtype=torch.float32)
        )
        y = aten.mm.default(x, whole)
        scattered = reduced(y)
        total = c10d.wait_tensor.default(
            c10d.all_reduce.default(aten.view.default(scattered, [4, 16]), "sum", "0")
        )
        return aten.div.Tensor(total, 4.0), y

    dag = dag_of(step, floats(16, 16), floats(64))
    assert places(dag) == {
        "all_gather_into_tensor_default": MOVES,
        "reduce_scatter_tensor_default": MOVES,
        "all_reduce_default": MOVES,
    }


def test_a_copy_takes_no_values_of_the_tensor_that_it_copies_into():
    """As the hook of DDP's reducer does: ``param.grad.copy_(all_reduce(param.grad / 2))``."""

    def step(x, y):
        gradient = aten.mm.default(x, y)
        total = c10d.wait_tensor.default(
            c10d.all_reduce.default(aten.div.Tensor(gradient, 2), "sum", "0")
        )
        return aten.copy.default(gradient, total)

    def sum_is_read(x, y):
        return aten.add.Tensor(step(x, y), aten.mm.default(x, y))

    assert places(dag_of(step, floats(8, 8), floats(8, 8))) == {"all_reduce_default": MOVES}
    dag = dag_of(sum_is_read, floats(8, 8), floats(8, 8))
    assert places(dag) == {"all_reduce_default": ON_PATH}


def test_collectives_between_compute_are_on_the_path():
    def step(x, shard):
        y = aten.exp.default(x)
        a = gathered(y)
        b = c10d.wait_tensor.default(
            c10d.all_to_all_single.default(aten.sin.default(a), [8] * 4, [8] * 4, "0")
        )
        c = reduced(aten.cos.default(b))
        return aten.mm.default(c, shard)

    dag = dag_of(step, floats(8, 8), floats(8, 8))
    assert set(places(dag).values()) == {ON_PATH}


def test_a_cast_that_compute_needs_too_ties_the_gather_to_the_path():
    def step(shard):
        cast = aten._to_copy.default(shard, dtype=torch.bfloat16)
        return aten.mm.default(gathered(cast), aten.t.default(cast))

    assert places(dag_of(step, floats(8, 8)))["all_gather_into_tensor_default"] == ON_PATH


@pytest.mark.parametrize("sent_as", [torch.float8_e4m3fn, torch.uint8])
def test_a_bucket_casts_for_a_gather_that_sends_no_bytes_of_the_cast(sent_as):
    """A copy of the source into a buffer of bytes makes other bytes than the cast and its view."""

    def step(shard):
        cast = aten._to_copy.default(shard, dtype=torch.float8_e4m3fn)
        sent = cast if sent_as is torch.float8_e4m3fn else aten.view.dtype(cast, sent_as)
        return aten.sin.default(gathered(sent))

    start = by_name(dag_of(step, floats(8, 8)))["all_gather_into_tensor_default"].collective
    assert start.bucketable
    assert start.cast_bytes == (0 if sent_as is torch.uint8 else 8 * 8 * 4)


def test_quantised_parameters_move_but_activations_do_not():
    def step(x):
        scale = aten.amax.default(aten.abs.default(x))
        return aten.sin.default(gathered(aten.div.Tensor(x, scale)))

    assert (
        places(dag_of(step, floats(8, 8), parameters={"x": "w"}))["all_gather_into_tensor_default"]
        == MOVES
    )
    assert places(dag_of(step, floats(8, 8)))["all_gather_into_tensor_default"] == ON_PATH


def test_what_moves_but_shares_no_launch():
    def step(x, y):
        coalesced = c10d.all_gather_into_tensor_coalesced.default([x, y], 4, "0")
        a, b = c10d.wait_tensor.default(coalesced[0]), c10d.wait_tensor.default(coalesced[1])
        c = c10d.wait_tensor.default(c10d.broadcast.default(x, 0, "0"))
        d = c10d.all_gather_into_tensor.default(y, 4, "0")
        e = c10d.wait_tensor.default(d)
        again = c10d.wait_tensor.default(d)
        return (
            aten.mm.default(a, x),
            aten.mm.default(b, x),
            aten.mm.default(c, x),
            aten.mm.default(e, again),
        )

    dag = dag_of(step, floats(8, 8), floats(2, 8))
    assert set(places(dag).values()) == {(False, False)}
    records = by_name(dag)
    first, second, third, _, again = (
        records[n]
        for n in ["wait_tensor_default", *(f"wait_tensor_default_{k}" for k in range(1, 5))]
    )
    assert [w.kind for w in (first, second, third, again)] == [
        NodeKind.WAIT,
        NodeKind.VIEW,
        NodeKind.WAIT,
        NodeKind.VIEW,
    ]
    assert ("wait_tensor_default", "wait_tensor_default_1") in edges(dag, "order")
    assert {"all_gather:0", "broadcast:0"} <= set(dag.graph["curves"])


def test_a_bucket_of_write_back_is_recognised_and_its_copies_follow_the_curve():
    def step(x, y):
        packed = aten.cat.default([x, y])
        whole = gathered(packed)
        return aten.clone.default(aten.slice.Tensor(whole, 0, 0, 4)), aten.sin.default(whole)

    module = traced(step, [floats(8, 8), floats(8, 8)])
    notes = {
        "cat_default": "copy_in",
        "all_gather_into_tensor_default": "start",
        "clone_default": "copy_out",
    }
    for node in module.graph.nodes:
        if node.name in notes:
            node.meta["apsched"] = {"role": notes[node.name], "members": ["a", "b"]}

    class Costs(UnitCosts):
        def compute_us(self, node):
            return 3.0 + node.meta["val"].numel() * node.meta["val"].element_size() / 1000

    dag = export_graph(capture_of(module), Costs())
    records = by_name(dag)
    copy = dag.graph["curves"]["copy"]
    assert records["cat_default"].duration_us * 1000 == copy(2 * 8 * 8 * 4)
    assert records["clone_default"].duration_us * 1000 == copy(4 * 8 * 4)
    assert (records["cat_default"].role, records["cat_default"].cost_source) == ("copy_in", "copy")
    collective = records["all_gather_into_tensor_default"].collective
    assert (collective.num_members, collective.bucketable) == (2, False)


def test_a_collective_that_blocks_takes_its_time_on_the_compute_stream():
    def step(x):
        return torch.ops._dtensor.shard_dim_alltoall.default(x, 0, 1, "0")

    (record,) = [
        r for r in by_name(dag_of(step, floats(8, 8))).values() if r.kind is NodeKind.COMPUTE
    ]
    assert record.duration_us == 1.0 + 10.0 + 8 * 8 * 4 / 1024


def test_names_come_from_parameters_notes_and_modules():
    def step(x, shard):
        whole = gathered(shard)
        y = aten.mm.default(x, whole)
        return reduced(y), reduced(aten.sin.default(y))

    module = traced(step, [floats(16, 4), floats(1, 16)])
    nodes = {node.name: node for node in module.graph.nodes}
    nodes["mm_default"].meta["nn_module_stack"] = {
        "a": ("", object),
        "b": ("L['self']._modules['layers']._modules['0']", object),
    }
    nodes["sin_default"].meta["custom"] = {"module_fqn": "layers.1"}
    nodes["reduce_scatter_tensor_default"].meta["custom"] = {"apsched_parameter": "layers.0.weight"}
    records = by_name(
        export_graph(capture_of(module, parameters={"shard": "layers.0.w"}), UnitCosts())
    )
    names = {name: record.module for name, record in records.items() if record.module}
    assert names == {
        "shard": "layers.0.w",
        "all_gather_into_tensor_default": "layers.0.w",
        "wait_tensor_default": "layers.0.w",
        "mm_default": "layers.0",
        "sin_default": "layers.1",
        "reduce_scatter_tensor_default": "layers.0.weight",
        "wait_tensor_default_1": "layers.0.weight",
    }


def directions(dag):
    return [record.direction for record in by_name(dag).values()]


def test_directions():
    def step(x, tangents_1):
        y = aten.sin.default(x)
        return y, aten.mul.Tensor(aten.cos.default(x), tangents_1)

    inputs = floats(4), floats(4)
    assert set(directions(dag_of(step, *inputs, name="backward"))) == {"backward"}
    assert set(directions(dag_of(step, *inputs, name="forward"))) == {"forward"}
    joint = dag_of(step, *inputs, name="joint")
    assert directions(joint) == ["forward", "backward", "forward", "forward", "backward", "forward"]
    module = traced(
        lambda x: aten.mul.Tensor(aten.cos.default(aten.sin.default(x)), 2.0), inputs[:1]
    )
    for node, number in zip(list(module.graph.nodes)[1:4], (1, 2, 1), strict=True):
        node.meta["seq_nr"] = number
    assert directions(export_graph(capture_of(module, name="joint"), UnitCosts())) == [
        "forward",
        "forward",
        "forward",
        "backward",
        "forward",
    ]


def test_symbolic_sizes_are_read_by_their_hints():
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x):
        return torch.relu(x.view(-1, 2, 8)) @ x.new_ones(8, x.shape[0])

    module = make_fx(step, tracing_mode="symbolic")(floats(6, 8))
    dag = export_graph(capture_of(module), UnitCosts())
    sizes = {
        r.target: dag.graph["storages"][r.allocates[0]].size_bytes
        for r in by_name(dag).values()
        if r.allocates and r.target
    }
    assert sizes["aten.relu.default"] == 6 * 8 * 4
    assert all(
        r.duration_us == 0
        for r in by_name(dag).values()
        if r.target.startswith(("aten.sym_size", "operator."))
    )


class Wrong(UnitCosts):
    def compute_us(self, node):
        return float("nan") if node.name == "sin_default" else 1.0


def pointwise(x):
    return aten.sin.default(x)


def test_what_cannot_be_used_is_refused_with_its_node():
    with pytest.raises(InputError, match="sin_default"):
        dag_of(pointwise, floats(4), cost_model=Wrong())
    module = traced(pointwise, [floats(4)])
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(
        InputError, match=r'node x \(x\): expected meta\["val"\] with its shape, found none'
    ):
        export_graph(capture_of(module), UnitCosts())
    with pytest.raises(
        InputError, match="node relu: expected a graph of operators, found call_method relu"
    ):
        dag_of(lambda x: x.relu(), floats(4))
