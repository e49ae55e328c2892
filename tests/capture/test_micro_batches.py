"""Several micro-batches as one step: what is called with what, and which chains the graph has."""

from collections import Counter

import pytest
import torch
from torch import nn

import apsched
from apsched.capture.fake_world import world
from apsched.capture.joint import capture_module
from apsched.capture.micro_batches import MicroBatchChoice, copies_of
from apsched.errors import InputError
from apsched.fx.chains import chain_of
from apsched.fx.collectives import is_all_gather, is_reduce_scatter
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset

WIDTH = 4


class Model(nn.Module):
    """A step that returns its loss; what lies between its two products may be had in ways."""

    def __init__(self, between=None):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between or nn.Tanh()

    def forward(self, x, scale=1.0):
        return self.second(self.between(self.first(x))).square().sum() * scale


class RunningState(nn.Module):
    """Hands what it computes of one call to the next."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x):
        self.state.copy_(x.mean(0).detach() + self.state)
        return x + self.state


class Counting(nn.Module):
    """Counts what runs through it, as experts count their tokens."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        self.seen.add_((x > 0).sum(0))
        return torch.tanh(x)


def test_losses_and_gradients_are_those_of_one_after_the_other():
    model, x = Model(), torch.randn(6, WIDTH)
    stepped = apsched.micro_batches(model, 3)
    stepped(x).backward()
    found = {name: p.grad.clone() for name, p in stepped.named_parameters()}
    model.zero_grad()
    for part in x.split(2):
        model(part).backward()
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def test_a_module_stays_what_it_is():
    model = Model(nn.BatchNorm1d(WIDTH))
    stepped = apsched.micro_batches(model, 2)
    assert stepped.state_dict().keys() == model.state_dict().keys()
    assert not stepped.eval().training
    assert not model.training
    assert not model.between.training


def test_of_a_function_it_is_a_function_of_a_batch_or_of_several_inputs():
    calls = []

    def step(x, *, mask, scale):
        calls.append((x.shape[0], mask.shape[0], scale))
        return x.sum() * scale

    x, mask = torch.ones(4, 2), torch.ones(4)
    assert apsched.micro_batches(step, 2)(x, mask=mask, scale=3) == 24
    assert calls == [(2, 2, 3), (2, 2, 3)]
    parts = apsched.micro_batches(lambda x, y: (x + y).sum(), 2)
    assert parts((torch.ones(2), torch.ones(1)), (torch.ones(3), torch.ones(3))) == 10


def test_containers_are_split_leaf_by_leaf_and_other_values_go_to_each():
    calls = []

    def step(x, k, rest):
        calls.append((len(x), k, {name: list(map(shown, values)) for name, values in rest.items()}))
        return x.sum()

    def shown(value):
        return len(value) if isinstance(value, torch.Tensor) else value

    rest = {"pair": (torch.ones(4), 7), "list": [None, torch.ones(4, 3)], "none": ()}
    apsched.micro_batches(step, 2)(torch.ones(4), None, rest=rest)
    assert calls == [(2, None, {"pair": [2, 7], "list": [None, 2], "none": []})] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: apsched.micro_batches(s, 0), "n: expected a number of micro-batches"),
        (lambda s: apsched.micro_batches(s, True), "n: expected a number of micro-batches"),
        (lambda s: apsched.micro_batches(3, 2), "step: expected a module or a function, found int"),
        (lambda s: apsched.micro_batches(s, 2)(torch.ones(3)), "into 2 equal parts, found 3"),
        (lambda s: apsched.micro_batches(s, 2)(), r"tensors of shapes \(none\); hand in 2 tuples"),
        (lambda s: apsched.micro_batches(s, 2)(3, None, {"k": 1}), r"tensors of shapes \(none\)"),
        (
            lambda s: apsched.micro_batches(s, 2)(torch.ones(4), torch.ones(2)),
            r"shapes \[4\], \[2\]",
        ),
        (
            lambda s: apsched.micro_batches(lambda x: x, 2)(torch.ones(4)),
            r"a tensor of one element, found a tensor of shape \[2\]",
        ),
        (
            lambda s: apsched.micro_batches(lambda x: (x, x), 2)(torch.ones(4)),
            "a tensor of one element, found a tuple",
        ),
    ],
)
def test_what_cannot_be_split_or_added_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call(lambda *x: sum(part.sum() for part in x))


def chains(module) -> Counter:
    return Counter(chain_of(node) for node in module.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("reduce", ["once", "each"])
@pytest.mark.slow
def test_chains_of_a_preset_are_alike_and_parameters_are_gathered_once(reduce):
    capture = capture_preset(
        "llama3-debug",
        mesh=MeshSpec.parse("fsdp=2,tp=2"),
        seq_len=32,
        num_layers=1,
        micro_batches=MicroBatchChoice(count=2, reduce=reduce),
    )
    alone = capture_preset(
        "llama3-debug", mesh=MeshSpec.parse("fsdp=2,tp=2"), seq_len=32, num_layers=1
    )
    for graph, one in zip(capture.graphs, alone.graphs, strict=True):
        found = chains(graph.module)
        assert found[0] == found[1] > 10
        assert chains(one.module).keys() == {-1}
        gathers, gathers_of_one = (
            sum(is_all_gather(n) and chain_of(n) < 0 for n in g.module.graph.nodes)
            for g in (graph, one)
        )
        activations = sum(is_all_gather(n) and chain_of(n) >= 0 for n in graph.module.graph.nodes)
        assert gathers + activations // 2 == gathers_of_one
    scatters, scatters_of_one = (
        sum(is_reduce_scatter(n) for n in c.graphs[1].module.graph.nodes) for c in (capture, alone)
    )
    on_path = sum(
        is_reduce_scatter(n) and chain_of(n) >= 0 for n in capture.graphs[1].module.graph.nodes
    )
    assert scatters_of_one < scatters <= 2 * scatters_of_one
    assert (scatters == 2 * scatters_of_one) == (reduce == "each")
    assert on_path > 0


def captured(between, count=2):
    with world(1):
        return capture_module(
            apsched.micro_batches(Model(between), count),
            copies_of((torch.ones(2, WIDTH),), count),
            source="model",
            num_micro_batches=count,
        )


@pytest.mark.parametrize("between", [nn.Dropout(0.5), Counting()])
def test_draws_and_counters_join_no_chains(between):
    """Their order is kept by edges between the chains, as in any graph; the second count is of
    both.
    """
    forward, backward = (chains(graph.module) for graph in captured(between).graphs)
    assert forward[0] - isinstance(between, Counting) == forward[1] > 3
    assert backward[0] == backward[1] > 0


@pytest.mark.parametrize("between", [RunningState(), nn.BatchNorm1d(WIDTH)])
def test_a_state_that_one_leaves_to_the_next_is_refused_with_the_node(between):
    with pytest.raises(
        InputError, match=r"node \w+: expected 2 micro-batches .* found 1 .* meet here"
    ):
        captured(between)


def test_a_batch_that_is_split_in_the_graph_has_as_many_chains():
    with world(1):
        capture = capture_module(
            apsched.micro_batches(Model(), 2), (torch.ones(4, WIDTH),), source="model"
        )
    found = chains(capture.graphs[0].module)
    assert found[0] == found[1] > 3
