"""Modules that call ``torch.func`` in forward: their parameters are gathered outside of it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.func import functional_call, grad, vmap

import apsched
from apsched.capture.fake_world import world
from apsched.kinds import CollectiveKind
from apsched.models.own_modules import Read, gather_when_read


class EachSample(nn.Module):
    """A loss for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        return vmap(lambda row: self.head(row).square().sum())(torch.tanh(self.body(x))).mean()


class Slope(EachSample):
    """A penalty on the derivative by the input."""

    def forward(self, x):
        slopes = vmap(grad(lambda row: self.head(torch.tanh(self.body(row))).sum()))(x)
        return (slopes.square().sum(-1) - 1).square().mean()


@pytest.mark.parametrize(
    ("model", "without_gradient"), [(EachSample, set()), (Slope, {"head.bias"})]
)
def test_a_module_that_calls_transforms_is_captured(model, without_gradient):
    _, backward = apsched.capture(model(), (torch.ones(4, 4),), "fsdp=4")
    records = [one["record"] for _, one in backward.nodes(data=True) if "record" in one]
    reduced = {
        record.module
        for record in records
        if record.collective and record.collective.kind == CollectiveKind.REDUCE_SCATTER
    }
    assert reduced == {name for name, _ in model().named_parameters()} - without_gradient


def test_units_that_vmap_reads_are_tuned():
    with world(2):
        model = EachSample()
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
        tuning = apsched.tune_fsdp2(model, (torch.ones(4, 4),), budget=0.0)
    assert [unit.name for unit in tuning.settings.units] == ["(root)", "body"]


class Same(torch.autograd.Function):
    """As the functions of DTensor: without ``setup_context``, so refused in a transform."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1


@pytest.mark.parametrize("model", [EachSample, Slope])
def test_gradients_are_those_of_the_module(model):
    plain = model()
    gathered = copy.deepcopy(plain)
    for part in (gathered.body, gathered.head):
        reads = {name: Read(owner=part, name=name, read=Same.apply) for name in ("weight", "bias")}
        gather_when_read(part, reads)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for one in (plain, gathered):
        one(x).backward()
    for own, other in zip(plain.parameters(), gathered.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        assert own.grad is None or torch.equal(own.grad, other.grad)


def test_a_parameter_of_the_transform_itself_is_read_in_it():
    """``grad`` by the parameters: they are tensors of the transform."""
    model = nn.Linear(4, 4)
    gather_when_read(model, {"weight": Read(owner=model, name="weight", read=lambda x: x * 1)})
    weight = model._parameters["weight"].detach()
    x = torch.ones(2, 4)
    found = grad(lambda w: functional_call(model, {"weight": w}, (x,)).sum())(weight)
    assert torch.equal(found, torch.full((4, 4), 2.0))
