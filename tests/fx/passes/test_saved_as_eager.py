"""A captured step of eager FSDP2 saves the tensors that eager autograd saves."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.fsdp2 import capture_fsdp2
from apsched.capture.function import capture_own
from tests.helpers.graphs.unit_layouts import Block, Language, Scale

TOKENS = torch.zeros(4, 8, dtype=torch.long)


class Gated(nn.Module):
    """A gated product behind a norm of its result: a compiler computes all but products again."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down, self.norm = nn.Linear(48, 32, bias=False), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = nn.functional.silu(self.gate(x)) * self.up(x)
        return x + self.norm(self.down(gated))


def saved_by_autograd(model: nn.Module) -> list[int]:
    """Return the bytes of all storages that autograd saves, without parameters and inputs."""
    given = {one.untyped_storage().data_ptr() for one in (*model.parameters(), TOKENS)}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        at = tensor.untyped_storage().data_ptr()
        if at not in given:
            saved[at] = tensor  # held, so that its address is not taken again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(TOKENS)
    assert result.requires_grad
    return sorted(tensor.untyped_storage().nbytes() for tensor in saved.values())


def saved_in_graph(model: Language, capture: Callable[..., Capture]) -> list[int]:
    """Return the bytes of all storages that the captured forward graph hands to backward."""
    for unit in (*model.blocks, model):
        fully_shard(unit, reshard_after_forward=True)
    forward, _ = capture(model, (TOKENS,)).graphs
    (output,) = forward.module.graph.find_nodes(op="output")
    _, *passed = output.args[0]
    values = [
        node.meta["val"].untyped_storage()
        for node in passed
        if isinstance(node, torch.fx.Node) and node.op != "placeholder"
    ]
    return sorted({value._cdata: value.nbytes() for value in values}.values())


@pytest.mark.parametrize(
    "capture", [capture_fsdp2, partial(capture_own, source="model", num_ranks=None, mesh=None)]
)
@pytest.mark.parametrize("block", [Block, Scale, Gated])
def test_the_same_tensors_are_saved(
    block: type[nn.Module], capture: Callable[..., Capture]
) -> None:
    model = Language(block=block)
    expected = saved_by_autograd(model)
    with world(2):
        assert saved_in_graph(model, capture) == expected
