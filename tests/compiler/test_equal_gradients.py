"""Equal gradients under torch.compile: each is a tensor of its own, as in eager torch."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import apsched
from apsched.capture.fake_world import world


class Sum(nn.Module):
    def __init__(self, mesh) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(2)
        )

    def forward(self, x):
        first, second = (
            one.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            for one in (self.first, self.second)
        )
        return (x @ first + x @ second).sum()


@pytest.mark.parametrize("asked", [{}, {"reshard_after_forward": True}, {"keep": "auto"}])
def test_equal_gradients_share_no_memory(asked):
    """Of ``aot_eager`` they are one tensor, and ``clip_grad_norm_`` scales it twice."""
    with world(2):
        model = Sum(init_device_mesh("cpu", (2,)))
        backend = apsched.backend(budget=0, **asked)
        torch.compile(model, backend=backend)(torch.ones(2, 4)).backward()
        first, second = (one.grad.to_local() for one in model.parameters())
        first.zero_()
        second.fill_(1.0)
        assert first.sum() == 0
