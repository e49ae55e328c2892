"""The cost of a node that holds several operators, on graphs that make_fx traced."""

import pytest
import torch
import torch.distributed as dist
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.costs.checked import checked
from apsched.fx.collectives import group_sizes
from apsched.fx.subgraphs import inside_of, with_all_inside
from apsched.graph.export.whole_nodes import whole_us
from apsched.torch_compat import graphs as torch_private
from apsched.torch_compat.graphs import add_control_deps, import_op_library

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
higher_order = torch.ops.higher_order
import_op_library("higher_order")
import_op_library("rngprims")

GROUP = "0"
COMPUTE_US = {
    "mm": 5.0,
    "relu": 1.0,
    "sin": 2.0,
    "mul": 3.0,
    "lt": 7.0,
    "add": 0.5,
    "rand_like": 4.0,
}
LAUNCH_US, TRANSFER_US, WHOLE_US = 0.25, 100.0, 1000.0


class ByOperator:
    """Round numbers for each operator; anything that is no operator of the table costs much."""

    def compute_us(self, node):
        name = getattr(node.target, "_schema", None)
        name = name.name.rpartition("::")[2] if name else "none"
        return LAUNCH_US if name == "all_reduce" else COMPUTE_US.get(name, WHOLE_US)

    def collective_us(self, kind, group_name, group_size, size_bytes):
        assert (kind, group_name, group_size) == ("all_reduce", GROUP, 2)
        return TRANSFER_US


@pytest.fixture(scope="module", autouse=True)
def group():
    """A fake process group of two process ranks."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def node_of(function, *inputs, target, mode="fake"):
    module = make_fx(function, tracing_mode=mode)(*inputs)
    return next(n for n in module.graph.nodes if target in str(n.target) and n.op != "get_attr")


def price(node):
    sizes = group_sizes(with_all_inside(node.graph.nodes), {})
    return whole_us(checked(ByOperator()), node, sizes)


def branches(x):
    return torch.cond(x.sum() > 0, lambda x: x.mm(x).relu(), lambda x: x.mm(x).sin() * 2, (x,))


def rows(x):
    return mapped(lambda row: (row * 2).relu(), x)


def carried(x):
    return scan(lambda carry, row: ((carry * row).sin(), row.relu()), x[0].clone(), x)


def rounds(x):
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.zeros(()), x))


def nested(x):
    def body(row):
        return torch.cond(row.sum() > 0, lambda row: row.sin(), lambda row: row.relu(), (row,))

    return mapped(body, x)


def communicating(x):
    def yes(x):
        return c10d.wait_tensor(c10d.all_reduce(x.view(16).sin(), "sum", GROUP)).view(4, 4)

    return torch.cond(x.sum() > 0, yes, lambda x: x.mul(2), (x,))


@pytest.mark.parametrize(
    ("function", "target", "expected_us"),
    [
        (branches, "cond", 5.0 + 2.0 + 3.0),
        (rows, "map", 4 * (3.0 + 1.0)),
        (carried, "scan", 4 * (3.0 + 2.0 + 1.0)),
        (rounds, "while_loop", 7.0 + 0.5 + 2.0),
        (nested, "map", 4 * (WHOLE_US + WHOLE_US + 2.0)),
        (communicating, "cond", 2.0 + LAUNCH_US + TRANSFER_US),
    ],
    ids=["the dearer branch", "each row", "each step", "one round", "in each other", "a transfer"],
)
def test_a_higher_order_operator_costs_what_is_inside(function, target, expected_us):
    node = node_of(function, torch.randn(4, 4), target=target)
    assert price(node) == pytest.approx(expected_us)


def test_a_call_with_a_generator_costs_what_it_calls():
    def step(x):
        state, drawn = higher_order.run_and_save_rng_state(aten.rand_like.default, x)
        return drawn, higher_order.run_with_rng_state(state, aten.sin.default, x)

    saving = node_of(step, torch.randn(4, 4), target="run_and_save_rng_state", mode="real")
    assert price(saving) == COMPUTE_US["rand_like"]
    assert price(next(n for n in saving.graph.nodes if "run_with" in n.name)) == COMPUTE_US["sin"]


def test_control_dependencies_cost_what_they_hold():
    module = make_fx(lambda x: x.mm(x).sin(), tracing_mode="fake")(torch.randn(4, 4))
    nodes = {n.name: n for n in module.graph.nodes}
    add_control_deps(module.graph, {nodes["sin"]: [nodes["mm"]]})
    (held,) = (n for n in module.graph.nodes if n.name == "sin")
    assert held.target is higher_order.control_deps
    assert price(held) == COMPUTE_US["sin"]


def test_sizes_that_dynamo_makes_symbols_are_known_inside():
    def step(x):
        return torch.cond(x.sum() > 0, lambda x: x.view(-1).sin(), lambda x: x.flatten() * 2, (x,))

    torch._dynamo.reset()
    for rows in (4, 5, 6):
        node = node_of(step, torch.randn(rows, 4), target="cond")
        assert price(node) == COMPUTE_US["mul"]
    assert any(not isinstance(operand, torch.fx.Node) for operand in node.args[-1])


@pytest.mark.parametrize("op", ["placeholder", "call_function"])
def test_bodies_without_shapes_are_priced_as_a_whole(op):
    node = node_of(branches, torch.randn(4, 4), target="cond")
    body = getattr(node.graph.owning_module, node.args[1].target)
    del next(n for n in body.graph.nodes if n.op == op).meta["val"]
    assert inside_of(node) is None
    assert price(node) == WHOLE_US


def test_kernels_of_their_own_are_priced_by_the_model():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    kernel = graph.call_function(
        higher_order.triton_kernel_wrapper_functional, (), {"kwargs": {"x": x}}
    )
    x.meta["val"], kernel.meta["val"] = torch.ones(4), {"x": torch.ones(4)}
    assert inside_of(kernel) is None
    assert price(kernel) == WHOLE_US
