"""Capture of modules: plain, with DTensor parameters, without gradients."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from apsched.capture.fake_world import world
from apsched.capture.joint import capture_module
from apsched.fx.collectives import is_collective
from apsched.fx.passes.parameters import PARAMETER_KEY
from apsched.torch_compat.partition import partitioned_graphs
from tests.helpers.graphs.small_models import shard


class Step(nn.Module):
    """Two layers, a buffer and a loss."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.relu(self.first(x))) * self.scale).square().mean()


def test_the_graphs_compute_what_the_module_computes() -> None:
    torch.manual_seed(0)
    module, x = Step(), torch.randn(3, 8)
    forward, backward = capture_module(module, (x,), source="step").graphs
    expected = module(x)
    expected.backward()
    loss, *saved = forward.module(*module.parameters(), *module.buffers(), x)
    gradients = backward.module(*saved, torch.ones_like(loss))
    assert torch.equal(loss, expected)
    for parameter, gradient in zip(module.parameters(), gradients, strict=False):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


class Looped(nn.Module):
    """A loop on data, and a layer with gradients behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, y = while_loop(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, torch.tanh(y + 1)),
            (torch.zeros((), dtype=torch.long), x),
        )
        return self.layer(y).square().mean()


def test_a_loop_on_data_is_one_node_and_computes_the_same() -> None:
    torch.manual_seed(0)
    module, x = Looped(), torch.randn(3, 4)
    forward, _ = capture_module(module, (x,), source="step").graphs
    assert "while_loop" in [str(node.target) for node in forward.module.graph.nodes]
    loss, *_ = forward.module(*module.parameters(), x)
    assert torch.equal(loss, module(x))


class ByName(Step):
    """Finds its parameters by their names, as modules of AutoParallel do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = ("first.weight", "first.bias", "second.weight")
        up, bias, down = map(self.get_parameter, names)
        return (torch.relu(x @ up.t() + bias) @ down.t()).square().mean()


def test_parameters_are_found_by_name() -> None:
    """Also those that a parametrization gathers."""
    x = torch.randn(3, 8)
    with world(4):
        plain = capture_module(ByName(), (x,), source="step").graphs
        sharded = shard(ByName(), init_device_mesh("cpu", (4,)))
        gathered = capture_module(sharded, (x,), source="step").graphs
    assert [len(graph.parameter_names) for graph in (plain[0], gathered[0])] == [3, 3]
    assert sum(is_collective(node) for node in gathered[0].module.graph.nodes) == 3


def test_inputs_and_parameters_are_known_in_both_graphs() -> None:
    forward, backward = capture_module(Step(), (torch.randn(3, 8),), source="step").graphs
    assert list(forward.parameter_names.values()) == ["first.weight", "first.bias", "second.weight"]
    assert len(forward.kept_inputs) == 5
    assert list(backward.parameter_names.values()) == ["second.weight"]
    assert set(backward.parameter_names) < backward.kept_inputs < set(forward.kept_inputs)
    assert len(backward.module.graph.find_nodes(op="placeholder")) > len(backward.kept_inputs)


def test_nodes_know_their_module() -> None:
    forward, backward = capture_module(Step(), (torch.randn(3, 8),), source="step").graphs
    aten = torch.ops.aten
    addmm = forward.module.graph.find_nodes(op="call_function", target=aten.addmm.default)[0]
    assert list(addmm.meta["nn_module_stack"]) == ["", "first"]
    assert addmm.meta["nn_module_stack"]["first"] == ("first", nn.Linear)
    gradients = backward.module.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert [list(node.meta["fwd_nn_module_stack"])[-1] for node in gradients] == [
        "second",
        "second",
        "first",
    ]


def test_no_hook_stays_on_the_module() -> None:
    module = Step()
    capture_module(module, (torch.randn(3, 8),), source="step")
    assert not any(child._forward_pre_hooks or child._forward_hooks for child in module.modules())


def test_a_module_without_gradients_has_no_backward() -> None:
    module = Step().requires_grad_(False)
    capture = capture_module(module, (torch.randn(3, 8),), source="step")
    assert [(graph.name, graph.has_backward) for graph in capture.graphs] == [("forward", False)]
    trained = capture_module(Step(), (torch.randn(3, 8),), source="step")
    assert all(graph.has_backward for graph in trained.graphs)


class Sharded(nn.Module):
    """One DTensor parameter, gathered by DTensor itself."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (4,))
        with FakeTensorMode() as mode:
            shard = torch.empty(2, 8)
            self.weight = nn.Parameter(
                DTensor.from_local(shard, mesh, (Shard(0),), run_check=False)
            )
        self.mode = mode

    def gathered(self) -> torch.Tensor:
        whole: DTensor = self.weight.redistribute(placements=(Replicate(),))  # type: ignore[operator]
        return whole.to_local(grad_placements=(Partial(),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.gathered().t()).relu().sum()


def test_a_users_dtensor_parameter_is_seen_as_its_shard() -> None:
    with world(4):
        module = Sharded()
        with module.mode:
            x = torch.empty(3, 8, requires_grad=True)
        capture = capture_module(module, (x,), source="sharded")
    forward, backward = capture.graphs
    assert capture.group_ranks == {"0": (0, 1, 2, 3)}
    inputs = forward.module.graph.find_nodes(op="placeholder")
    assert [tuple(node.meta["val"].shape) for node in inputs] == [(2, 8), (3, 8)]
    assert forward.parameter_names == {inputs[0].name: "weight"}
    for graph, operators in (
        (forward, ["all_gather_into_tensor"]),
        (backward, ["all_gather_into_tensor", "reduce_scatter_tensor"]),
    ):
        for operator in operators:
            target = getattr(torch.ops._c10d_functional, operator).default
            (node,) = graph.module.graph.find_nodes(op="call_function", target=target)
            assert node.meta["custom"][PARAMETER_KEY] == "weight"


class SummedOverRanks(torch.autograd.Function):
    """An all-reduce in forward and in backward, as ``SyncBatchNorm`` has them."""

    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return SummedOverRanks.forward(_, gradient)


class Centred(nn.Module):
    """A layer whose result is centred over all process ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        mean: torch.Tensor = SummedOverRanks.apply(x.mean(0))  # type: ignore[no-untyped-call]
        return (x - mean / 2).square().mean()


def test_a_backward_that_calls_torch_distributed_is_captured() -> None:
    """Process groups cannot be copied, and AOTAutograd copies the backward graph."""
    with world(2):
        graphs = capture_module(Centred(), (torch.randn(3, 8),), source="centred").graphs
        copies = [copy.deepcopy(graph.module.graph) for graph in graphs]
    all_reduce = torch.ops.c10d.allreduce_.default
    for graph in copies:
        assert [all_reduce in node.args for node in graph.nodes].count(True) == 1


def test_the_backward_graph_can_be_copied() -> None:
    """Only AOTAutograd gets the graph itself in place of a copy."""
    _, backward, _ = partitioned_graphs(
        Step(),
        (torch.randn(3, 8),),
        prepare=lambda joint: joint,
        is_static=lambda node: False,
        saves=lambda joint: [],
    )
    assert copy.deepcopy(backward) is not backward
