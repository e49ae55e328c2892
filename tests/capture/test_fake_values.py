"""``meta["val"]`` is found where a graph lacks it, and not asked for where nobody needs it."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.checkpoint import checkpoint

import apsched
from apsched.capture.graph_module import capture_graph
from apsched.errors import InputError
from tests.helpers.graphs.instrumented import UnitCosts

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
higher_order = torch.ops.higher_order


class Graph:
    """A graph made by hand, with a gather, whose calls have no values."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.root = nn.Module()
        self.x = self.placeholder("x", torch.ones(4, 8))
        start = self.graph.call_function(c10d.all_gather_into_tensor.default, (self.x, 4, "0"))
        self.whole = self.graph.call_function(c10d.wait_tensor.default, (start,))

    def placeholder(self, name: str, value: object = None) -> torch.fx.Node:
        node = self.graph.placeholder(name)
        if value is not None:
            node.meta["val"] = self.mode.from_tensor(value)
        return node

    mode = FakeTensorMode()

    def call(self, target: Callable[..., object], *args: object, **kwargs: object) -> torch.fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def scheduled(self, *results: torch.fx.Node) -> torch.fx.GraphModule:
        self.graph.output(results)
        module = torch.fx.GraphModule(self.root, self.graph)
        before = [dict(node.meta) for node in module.graph.nodes]
        fast = apsched.optimize(module, cost_model=UnitCosts(), budget=0)
        assert fast.apsched_result.round_trip_exact
        assert [node.meta for node in module.graph.nodes] == before, "what was given stays"
        return fast


def shapes_of(module: torch.fx.GraphModule) -> dict[str, object]:
    return {
        node.name: torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: tuple(t.shape), node.meta["val"]
        )
        for node in module.graph.nodes
        if node.op == "call_function"
    }


def graphs_of(module: nn.Module, x: torch.Tensor) -> list[torch.fx.GraphModule]:
    """Return forward and backward as torch's partitioner leaves them."""
    found: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(gm)
        run = gm.forward

        def boxed(arguments: list[object]) -> object:
            return run(*arguments)

        boxed._boxed_call = True
        return boxed

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=default_partition)
    torch._dynamo.reset()
    torch.compile(module, backend=backend)(x).backward()
    return found


class Dropping(nn.Module):
    """Random work that backward does again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(torch.relu(x @ self.weight), 0.5, True) @ self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).sum()


def test_random_work_under_activation_checkpointing() -> None:
    """torch's partitioner gives no values to the calls that keep the generator's state."""
    graphs = graphs_of(Dropping(), torch.ones(4, 8, requires_grad=True))
    for gm, name in zip(graphs, ("run_and_save_rng_state", "run_with_rng_state"), strict=True):
        nodes = {node.name: node for node in gm.graph.nodes}
        assert "val" not in nodes[name].meta
        found = shapes_of(capture_graph(gm).module)
        dropped = ((4, 8), (4, 8))
        expected = ((16,), dropped) if name == "run_and_save_rng_state" else dropped
        assert found[name] == expected
        assert "val" not in nodes[name].meta, "what was given stays"


def test_the_graph_safe_form_needs_no_generator() -> None:
    made = Graph()
    state = made.placeholder("fwd_rng_state_0")
    run = made.call(
        higher_order.graphsafe_run_with_rng_state,
        aten.native_dropout.default,
        made.whole,
        0.5,
        True,
        rng_state=state,
    )
    fast = made.scheduled(made.call(operator.getitem, run, 0), made.call(operator.getitem, run, 1))
    found = shapes_of(fast)
    assert found["graphsafe_run_with_rng_state"] == ((16, 8), (16, 8))
    assert found["getitem"] == found["getitem_1"] == (16, 8)


@torch.library.custom_op("apsched_tests::doubled", mutates_args=("x",))
def doubled(x: torch.Tensor) -> None:
    """Double ``x`` in place."""
    x.mul_(2)


@pytest.mark.parametrize("form", ["auto_functionalized", "auto_functionalized_v2"])
def test_functional_forms(form: str) -> None:
    made, target = Graph(), torch.ops.apsched_tests.doubled.default
    passed: dict[str, object] = {"x": made.whole}
    if form == "auto_functionalized_v2":
        passed = {"_x_base_index": 0, "_all_bases": [made.whole]}
    call = made.call(getattr(higher_order, form), target, **passed)
    found = shapes_of(made.scheduled(made.call(operator.getitem, call, 1)))
    assert found["getitem"] == (16, 8)


def test_a_placeholder_that_is_no_tensor_needs_no_value() -> None:
    made = Graph()
    none, number = made.placeholder("none"), made.placeholder("number")
    number.meta["val"] = 3
    made.placeholder("unused")
    clamped = made.call(aten.clamp.default, made.whole, none, number)
    assert shapes_of(made.scheduled(clamped, none))["clamp_default"] == (16, 8)


class Opaque:
    """Stands for a device mesh, as graphs hold them."""

    ndim = 2


def test_attributes_that_are_no_tensors_need_no_value() -> None:
    made = Graph()
    made.root._opaque_obj0 = Opaque()
    made.root.weight = nn.Parameter(torch.ones(16, 8))
    ndim = made.call(getattr, made.graph.get_attr("_opaque_obj0"), "ndim")
    taller = made.call(aten.add.Tensor, made.whole, made.graph.get_attr("weight"))
    found = shapes_of(made.scheduled(made.call(aten.mul.Tensor, taller, ndim)))
    assert found["getattr_1"] == 2
    assert found["mul_tensor"] == (16, 8)


def test_advice_about_a_tensor_without_value_can_be_followed() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, "0")) @ y

    inputs = torch.ones(4, 8), torch.ones(8, 4)
    with FakeTensorMode() as mode:
        module = make_fx(function)(*map(mode.from_tensor, inputs))
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(InputError, match=r"node x_1: .*FakeTensorProp\(gm\).propagate\(\*inputs\)"):
        apsched.optimize(module, cost_model=UnitCosts())
    FakeTensorProp(module).propagate(*inputs)
    assert apsched.optimize(module, cost_model=UnitCosts(), budget=0).apsched_result.best


def test_a_call_that_cannot_be_run_is_named() -> None:
    made = Graph()
    wrong = made.call(aten.mm.default, made.whole, made.x)
    made.graph.output((wrong,))
    with pytest.raises(
        InputError, match=r"node mm_default: expected meta\[\"val\"\].*FakeTensorProp"
    ):
        capture_graph(torch.fx.GraphModule(made.root, made.graph))
