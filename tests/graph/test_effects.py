"""What nodes do beside their results: operators, packets, python functions and higher-order
operators; what is not known is a barrier."""

import operator

import pytest
import torch
import torch._dynamo.variables.streams
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from apsched.capture.graph_module import capture_graph
from apsched.errors import InputError
from apsched.fx.effects.of_node import effects_of
from apsched.fx.graph_copies import copied, finished
from apsched.graph.export.export import export_graph
from apsched.graph.records import NodeKind
from apsched.torch_compat.graphs import import_op_library
from tests.helpers.graphs.instrumented import UnitCosts, call, capture_of, traced
from tests.helpers.graphs.programs_of_functions import read_by_hand, view_by_hand

aten, c10d, higher_order = torch.ops.aten, torch.ops._c10d_functional, torch.ops.higher_order
streams = torch.ops.streams
import_op_library("higher_order")
import_op_library("rngprims")


def matrix():
    return torch.ones(4, 4)


def summary(node: torch.fx.Node) -> dict[str, object]:
    """Return what of the effects of ``node`` is there: names of the nodes that it writes, and what
    it does."""
    effects = effects_of(node)
    written = [
        n.name
        for n in torch.utils._pytree.tree_leaves(effects.writes)
        if isinstance(n, torch.fx.Node)
    ]
    found = {
        name: True
        for name in ("draws", "acts", "unknown", "sets_context")
        if getattr(effects, name)
    }
    found |= {"communicates": effects.communicates} if effects.communicates else {}
    return found | ({"writes": written} if written else {})


BARRIER = {"draws": True, "acts": True, "unknown": True}
CONTEXT = {"draws": True, "acts": True, "sets_context": True}
DRAWS, ACTS = {"draws": True}, {"acts": True}
RESHAPED = BARRIER | CONTEXT


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: F.dropout(x, 0.5), DRAWS),
        (lambda x, y: F.dropout(x, 0.5, training=False), {}),
        (lambda x, y: F.dropout(x, 0.5, inplace=True), DRAWS | {"writes": ["x"]}),
        (lambda x, y: torch.rand_like(x), DRAWS),
        (lambda x, y: call(torch.rand, x.shape), DRAWS),
        (lambda x, y: F.relu(x), {}),
        (lambda x, y: F.relu(x, inplace=True), {"writes": ["x"]}),
        (lambda x, y: torch.mul(x, 2.0, out=y), {"writes": ["y"]}),
        (lambda x, y: torch.mul(x, y), {}),
        (lambda x, y: call(operator.iadd, y, x), {"writes": ["y"]}),
        (lambda x, y: call(operator.setitem, x, 0, 1.0), {"writes": ["x"]}),
        (lambda x, y: call(operator.add, x, y), {}),
        (lambda x, y: call(torch.Tensor.add_, x, y), {"writes": ["x"]}),
        (
            lambda x, y: F.batch_norm(x, y[0], y[1], training=True),
            {"writes": ["getitem", "getitem_1"]},
        ),
        (lambda x, y: F.batch_norm(x, y[0], y[1]), {}),
        (
            lambda x, y: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
            DRAWS,
        ),
        (lambda x, y: F.scaled_dot_product_attention(x[None], x[None], x[None]), {}),
        (lambda x, y: call(aten.add_, x, 1.0), {"writes": ["x"]}),
        (lambda x, y: call(aten.mul, x, y), {}),
        (lambda x, y: call(aten.rand_like, x), DRAWS),
        (lambda x, y: aten.dropout.default(x, 0.5, True), DRAWS),
        (lambda x, y: aten.dropout.default(x, 0.5, False), {}),
        (lambda x, y: call(read_by_hand, x, y), BARRIER | {"writes": ["x", "y"]}),
        (lambda x, y: call(torch.manual_seed, x.shape[0]), CONTEXT),
        (lambda x, y: call(print, x), ACTS),
        (lambda x, y: call(torch._assert_async, x), ACTS),
        (lambda x, y: call(torch._assert, x.shape[0] == 4, "four"), ACTS),
        (lambda x, y: x.shape[0] + 1, {}),
        (lambda x, y: x[0], {}),
        (lambda x, y: call(higher_order.run_and_save_rng_state, aten.rand_like.default, x)[1], {}),
        (lambda x, y: call(higher_order.run_and_save_rng_state, aten.rand_like.default, x), DRAWS),
        (lambda x, y: call(higher_order.run_and_save_rng_state, aten.neg.default, x), DRAWS),
        (
            lambda x, y: call(higher_order.run_and_save_rng_state, aten.bernoulli_.float, y),
            DRAWS | {"writes": ["y"]},
        ),
        (lambda x, y: call(higher_order.run_with_rng_state, y, aten.neg.default, x), DRAWS),
        (
            lambda x, y: call(
                higher_order.graphsafe_run_with_rng_state, aten.neg.default, x, rng_state=None
            ),
            DRAWS,
        ),
        (lambda x, y: call(higher_order.with_effects, x, aten.neg.default, y), ACTS),
        (lambda x, y: call(higher_order.with_effects, x, aten.rand_like.default, y), ACTS | DRAWS),
        (lambda x, y: call(higher_order.auto_functionalized, aten.bernoulli_.float, self=x), DRAWS),
        (lambda x, y: call(higher_order.auto_functionalized_v2, aten.add_.Tensor, self=x), {}),
        (
            lambda x, y: call(higher_order.triton_kernel_wrapper_mutation, kwargs={"a": x, "b": y}),
            {"writes": ["x", "y"]},
        ),
        (lambda x, y: call(higher_order.triton_kernel_wrapper_functional, kwargs={"a": x}), {}),
        (lambda x, y: c10d.all_reduce.default(x, "sum", "0"), {}),
        (
            lambda x, y: c10d.irecv.default(x, 1, 0, "pp"),
            BARRIER | {"writes": ["x"], "communicates": ("pp",)},
        ),
        (
            lambda x, y: torch.ops.c10d_functional.all_reduce.default(x, "sum", "", [0, 1], 2),
            BARRIER | {"writes": ["x"], "communicates": ("*",)},
        ),
        (
            lambda x, y: torch.ops.c10d.send.default([x], None, 1, 0),
            BARRIER | {"writes": ["x"], "communicates": ("*",)},
        ),
        (
            lambda x, y: torch.ops.inductor.resize_storage_bytes_.default(x, 0),
            BARRIER | {"writes": ["x"]},
        ),
        (lambda x, y: aten.resize_.default(x, [2]), RESHAPED | {"writes": ["x"]}),
        (lambda x, y: aten.set_.source_Tensor(x, y), RESHAPED | {"writes": ["x", "y"]}),
        (lambda x, y: call(torch.Tensor.resize_, x, 8), RESHAPED | {"writes": ["x"]}),
        (lambda x, y: call(streams.record_stream.default, x, 1), CONTEXT),
        (
            lambda x, y: call(higher_order.call_torchbind, y, "method", x),
            BARRIER | {"writes": ["y", "x"]},
        ),
    ],
)
def test_what_a_call_does(function, expected):
    graph = torch.fx.symbolic_trace(function).graph
    mode = FakeTensorMode()
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = mode.from_tensor(matrix())
        elif node.op == "call_function" and node.target in (
            getattr,
            operator.getitem,
            operator.add,
            operator.eq,
        ):
            args = torch.fx.map_arg(node.args, lambda n: n.meta.get("val"))
            with mode:
                node.meta["val"] = None if None in args[:1] else node.target(*args)
        else:
            node.meta["val"] = mode.from_tensor(matrix())
            if node.target in (torch.manual_seed, print, torch._assert, torch._assert_async):
                node.meta["val"] = None
    assert summary(graph.output_node().args[0]) == expected


def higher_order_node(target, body, *, at=0, operands=2):
    """Return a node that calls ``target`` with ``body`` among its arguments."""
    graph, root = torch.fx.Graph(), torch.nn.Module()
    values = [graph.placeholder(name) for name in "xyz"[:operands]]
    root.body = body
    args = [*values]
    args.insert(at, graph.get_attr("body"))
    node = graph.call_function(target, tuple(args))
    graph.output(node)
    module = torch.fx.GraphModule(root, graph)
    mode = FakeTensorMode()
    for n in module.graph.nodes:
        n.meta["val"] = mode.from_tensor(matrix())
    return next(n for n in module.graph.nodes if n.op == "call_function")


BODIES = {
    "pure": (lambda x, y: aten.mul.Tensor(x, y), {}),
    "draws": (lambda x, y: aten.rand_like.default(x), DRAWS),
    "draws by a function": (lambda x, y: F.dropout(x, 0.5), DRAWS),
    "asserts": (lambda x, y: (aten._assert_async.default(x), y)[1], ACTS),
    "writes what it is handed": (
        lambda x, y: aten.add_.Tensor(aten.t.default(x), y),
        {"writes": ["body", "x", "y"]},
    ),
    "communicates": (
        lambda x, y: c10d.wait_tensor.default(
            c10d.all_reduce.default(aten.neg.default(x), "sum", "0")
        ),
        {"communicates": ("0",)},
    ),
    "communicates as nobody knows": (
        lambda x, y: c10d.isend.default(x, 1, 0, "pp"),
        BARRIER | {"communicates": ("pp",), "writes": ["body", "x", "y"]},
    ),
    "waits for what was started outside": (
        lambda x, y: c10d.wait_tensor.default(x),
        {"writes": ["body", "x", "y"]},
    ),
    "writes what it made": (lambda x, y: aten.add_.Tensor(aten.neg.default(x), y), {}),
    "calls what nobody knows": (
        lambda x, y: call(read_by_hand, x, y),
        BARRIER | {"writes": ["body", "x", "y"]},
    ),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(
    "target",
    [
        higher_order.cond,
        higher_order.invoke_subgraph,
        higher_order.scan,
        higher_order.flex_attention,
    ],
)
def test_a_higher_order_operator_does_what_it_contains(target, name):
    function, expected = BODIES[name]
    assert summary(higher_order_node(target, traced(function, [matrix(), matrix()]))) == expected


def test_a_body_in_a_body_counts():
    inner = higher_order_node(
        higher_order.cond, traced(BODIES["draws"][0], [matrix(), matrix()])
    ).graph.owning_module
    assert summary(higher_order_node(higher_order.invoke_subgraph, inner)) == DRAWS


def test_a_body_that_writes_and_holds_tensors_is_a_barrier():
    body = traced(BODIES["writes what it is handed"][0], [matrix(), matrix()])
    body.register_buffer("held", matrix())
    with body.graph.inserting_before(next(n for n in body.graph.nodes if n.op == "call_function")):
        body.graph.get_attr("held")
    assert summary(higher_order_node(higher_order.cond, body)) == BARRIER | {
        "writes": ["body", "x", "y"]
    }


def test_functions_that_change_shapes_leave_the_values_of_the_graph_alone():
    module = traced(lambda x: call(torch.Tensor.t_, aten.clone.default(x)), [torch.ones(2, 3)])
    copy = next(n for n in module.graph.nodes if n.target is aten.clone.default)
    before = copy.meta["val"].shape
    effects_of(module.graph.output_node().args[0])
    assert copy.meta["val"].shape == before


@pytest.fixture
def library():
    """A library of operators of our own, which goes with the test."""
    library = torch.library.Library("apsched_test", "FRAGMENT")
    yield library
    library._destroy()


def test_an_operator_made_of_higher_order_operators_or_collectives_is_a_barrier(library):
    def drawn(x):
        return higher_order.run_and_save_rng_state(aten.rand_like.default, x)[1]

    def summed(x):
        return torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(x, "sum", "0")
        )

    for name, function in (("drawn", drawn), ("summed", summed)):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, function, "CompositeImplicitAutograd")
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        node = graph.call_function(getattr(torch.ops.apsched_test, name).default, (x,))
        x.meta["val"] = node.meta["val"] = FakeTensorMode().from_tensor(matrix())
        communicates = {"communicates": ("*",)} if name == "summed" else {}
        assert summary(node) == BARRIER | {"writes": ["x"]} | communicates


def test_without_values_the_schema_and_what_is_known_of_it_decide():
    graph = torch.fx.symbolic_trace(
        lambda x, m, v: aten.batch_norm.default(x, None, None, m, v, True, 0.1, 1e-5, False)
    ).graph
    assert summary(graph.output_node().args[0]) == {"writes": ["m", "v"]}
    graph = torch.fx.symbolic_trace(lambda x: F.dropout(x, 0.5)).graph
    graph.output_node().args[0].meta["val"] = matrix()
    assert summary(graph.output_node().args[0]) == BARRIER | {"writes": ["x"]}


NORMS = {
    "native_batch_norm": lambda x, m, v, train: (x, None, None, m, v, train, 0.1, 1e-5),
    "cudnn_batch_norm": lambda x, m, v, train: (x, x, None, m, v, train, 0.1, 1e-5),
    "miopen_batch_norm": lambda x, m, v, train: (x, x, None, m, v, train, 0.1, 1e-5),
    "_batch_norm_impl_index": lambda x, m, v, train: (x, None, None, m, v, train, 0.1, 1e-5, False),
    "batch_norm": lambda x, m, v, train: (x, None, None, m, v, train, 0.1, 1e-5, False),
    "instance_norm": lambda x, m, v, train: (x, None, None, m, v, train, 0.1, 1e-5, False),
}
"""Operators whose schemas are silent about the running statistics, and their arguments."""


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_read_before_and_after_the_norm_that_updates_them(name, train):
    """In training nothing crosses the norm that reads them; elsewhere the norm only reads."""

    def step(x, mean, variance):
        before = aten.neg.default(mean), aten.neg.default(variance)
        normed = call(getattr(aten, name).default, *NORMS[name](x, mean, variance, train))
        return *before, normed, aten.sin.default(mean), aten.sin.default(variance)

    module = torch.fx.symbolic_trace(step)
    mode = FakeTensorMode()
    for node in module.graph.nodes:
        node.meta["val"] = mode.from_tensor(matrix())
    norm = next(node.name for node in module.graph.nodes if name in node.name)
    around = {("neg_default", norm), ("neg_default_1", norm)}
    around |= {(norm, "sin_default"), (norm, "sin_default_1")}
    assert around & orders(module) == (around if train else set())


@pytest.mark.parametrize(
    "body", [torch.nn.ReLU(), None], ids=["a module that is no graph", "no body"]
)
def test_what_cannot_be_read_is_a_barrier(body):
    node = higher_order_node(higher_order.cond, body or torch.nn.Parameter(matrix()))
    assert summary(node) == BARRIER | {"writes": ["body", "x", "y"]}


def test_an_unknown_higher_order_operator_is_a_barrier():
    body = traced(BODIES["pure"][0], [matrix(), matrix()])
    assert summary(higher_order_node(higher_order.inline_asm_elementwise, body)) == BARRIER | {
        "writes": ["body", "x", "y"]
    }


def orders(module: torch.fx.GraphModule) -> set[tuple[str, str]]:
    """Return the pairs of nodes that must keep their order, directly or through others."""
    dag = export_graph(capture_of(module), UnitCosts())
    names = [record.name for _, record in dag.nodes(data="record")]
    reached: dict[int, set[int]] = {}
    for rank in reversed(range(len(names))):
        reached[rank] = set().union(*({v} | reached[v] for v in dag.successors(rank)))
    return {(names[u], names[v]) for u, later in reached.items() for v in later}


def test_no_effect_crosses_a_barrier_and_the_rest_does():
    def step(x, y, z, w):
        drawn = aten.rand_like.default(w)
        z = aten.add_.Tensor(z, 1.0)
        read = aten.neg.default(y)
        free = aten.mul.Tensor(w, 2.0)
        a = call(read_by_hand, x, y)
        later = aten.mul_.Tensor(z, 2.0)
        noise = aten.rand_like.default(w)
        return drawn, free, a, later, aten.sin.default(y), aten.cos.default(w), noise, read

    kept = orders(traced(step, [matrix() for _ in range(4)]))
    before, barrier = ("rand_like_default", "add__tensor", "neg_default"), "read_by_hand"
    assert {(name, barrier) for name in before} <= kept
    assert {
        (barrier, name) for name in ("mul__tensor", "rand_like_default_1", "sin_default")
    } <= kept
    assert ("mul_tensor", barrier) not in kept
    assert (barrier, "cos_default") not in kept


def test_nothing_crosses_what_sets_the_context():
    def step(x):
        before = aten.neg.default(x)
        n = x.shape[0]
        call(torch.manual_seed, n)
        return before, aten.sin.default(x)

    module = traced(step, [matrix()])
    next(node for node in module.graph.nodes if node.target is torch.manual_seed).meta["val"] = (
        None  # a generator
    )
    assert {("neg_default", "manual_seed"), ("manual_seed", "sin_default")} <= orders(module)


def test_a_result_of_an_unknown_function_may_be_what_it_was_handed():
    def step(x):
        row = call(view_by_hand, x)
        return aten.add_.Tensor(row, 1.0), aten.neg.default(x)

    module = traced(step, [matrix()])
    for node in (
        module.graph.nodes
    ):  # values that do not tell who shares: every tensor has a storage of its own
        if node.target is view_by_hand:
            node.meta["val"] = node.meta["val"].clone()
    assert ("add__tensor", "neg_default") in orders(module)


def test_items_that_are_copies_are_read_when_they_are_taken():
    def step(x, y):
        picked, part = x[y], x[0:2]
        return picked, aten.add_.Tensor(x, 1.0), aten.neg.default(part)

    module = traced(step, [matrix(), torch.tensor([0, 1])])
    records = {
        r.name: r for _, r in export_graph(capture_of(module), UnitCosts()).nodes(data="record")
    }
    assert records["getitem"].kind is NodeKind.COMPUTE
    assert records["getitem_1"].kind is NodeKind.VIEW
    assert {("getitem", "add__tensor"), ("add__tensor", "neg_default")} <= orders(module)


def test_items_of_dicts_and_slices_of_tuples_share_what_is_in_them():
    def step(x, y):
        out = call(higher_order.triton_kernel_wrapper_functional, kwargs={"a": x, "b": y})
        first = aten.neg.default(out["a"])
        written = aten.add_.Tensor(out["a"], 1.0)
        pair = aten.split.Tensor(y, 2)[1:]
        return (
            first,
            written,
            aten.add_.Tensor(pair[0], 1.0),
            aten.sin.default(y),
            aten.cos.default(out["a"]),
        )

    module = torch.fx.symbolic_trace(step)
    mode = FakeTensorMode()
    for node in module.graph.nodes:
        value = mode.from_tensor(matrix())
        values = {
            higher_order.triton_kernel_wrapper_functional: {
                "a": value,
                "b": mode.from_tensor(matrix()),
            }
        }
        values[aten.split.Tensor] = (value[:2], value[2:])
        node.meta["val"] = values.get(node.target, value)
    sliced = next(
        n
        for n in module.graph.nodes
        if n.target is operator.getitem and isinstance(n.args[1], slice)
    )
    sliced.meta["val"] = sliced.args[0].meta["val"][1:]
    found = orders(module)
    assert {
        ("neg_default", "add__tensor"),
        ("add__tensor", "cos_default"),
        ("add__tensor_1", "sin_default"),
    } <= found


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: call(operator.setitem, aten.split.Tensor(x, 2), 0, x),
            "expected lists and dicts that stay as they are",
        ),
    ],
)
def test_what_no_order_can_keep_is_refused(function, message):
    node = torch.fx.symbolic_trace(function).graph.output_node().args[0]
    mode = FakeTensorMode()
    for n in node.graph.nodes:
        n.meta["val"] = mode.from_tensor(matrix())
        if n.target is aten.split.Tensor:
            n.meta["val"] = [n.meta["val"][:2], n.meta["val"][2:]]
    with pytest.raises(InputError, match=f"node {node.name}: .*{message}"):
        effects_of(node)


def test_capture_puts_overloads_for_packets():
    module = traced(lambda x: call(aten.add_, call(aten.mul, x, 2.0), x), [matrix()])
    targets = [
        node.target
        for node in capture_graph(module).module.graph.nodes
        if node.op == "call_function"
    ]
    assert targets == [aten.mul.Tensor, aten.add_.Tensor]
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [
        aten.mul,
        aten.add_,
    ]


def test_passes_keep_what_draws_or_writes_though_nobody_uses_it():
    def step(x, y):
        F.dropout(x, 0.5)
        call(read_by_hand, x, y)
        call(operator.iadd, x, 1.0)
        aten.rand_like.default(x)
        torch.mul(x, 2.0)
        aten.neg.default(x)
        return y

    kept = [
        node.name
        for node in finished(copied(traced(step, [matrix(), matrix()]))).graph.nodes
        if node.op == "call_function"
    ]
    assert kept == ["dropout", "read_by_hand", "iadd", "rand_like_default"]
