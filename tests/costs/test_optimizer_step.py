"""The step of an optimizer: its state, and the bytes that a fused step of torch touches."""

import pytest
import torch
from torch import nn

from apsched.costs.optimizer_step import Shards, state_bytes, step_us
from apsched.errors import InputError


def _touched_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return bytes read and written by a step, from the tensors that torch holds behind it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [
        value
        for parameter in parameters
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    ]
    gradients = [p.grad for p in parameters if p.grad is not None]
    changed = [*parameters, *states]  # read and written
    return sum(t.nbytes for t in gradients) + 2 * sum(t.nbytes for t in changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_touches_the_tensors_of_torch(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (100, 300)]
    num_elements, itemsize = 400, weights[0].element_size()
    shards = Shards(size_bytes=num_elements * itemsize, bf16_bytes=num_elements * 2)
    adamw, sgd = torch.optim.AdamW(weights), torch.optim.SGD(weights, momentum=0.9)
    assert step_us("adamw", shards, 1.0) == _touched_bytes(adamw)
    assert step_us("sgd", shards, 1.0) == _touched_bytes(sgd)
    if dtype is torch.bfloat16:
        assert step_us("adamw-bf16", shards, 1.0) == step_us("adamw", shards, 1.0)


def test_without_an_optimizer_or_a_known_bandwidth_there_is_no_time() -> None:
    shards = Shards(size_bytes=400, bf16_bytes=200)
    assert step_us("none", shards, 1.0) == 0.0
    assert step_us("adamw", shards, 0.0) == 0.0
    assert step_us("adamw", shards, 7.0) == 400.0
    assert state_bytes("adamw-bf16", shards) == 400


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match=r"optimizer: expected adamw, .*; found 'lion'"):
        state_bytes("lion", Shards(size_bytes=1, bf16_bytes=1))
