"""Activation checkpointing: what is chosen, which layers it is about, and what the partitioner then
saves.
"""

import functools

import pytest
import torch
from torch import nn

from apsched.capture.captured import Capture
from apsched.capture.function import capture_function
from apsched.capture.joint import capture_module
from apsched.errors import InputError
from apsched.fx.assumed_sizes import rests_on_assumed
from apsched.fx.passes.checkpointing import (
    Checkpointing,
    blocks_of,
    checkpoint_activations,
    saved_bytes,
    saved_nodes,
)
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_preset
from tests.helpers.graphs.experts import Masked, env_of
from tests.helpers.graphs.small_models import WIDTH


class Block(nn.Module):
    """Two halves, each beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.first(x))
        return x + torch.tanh(self.second(x))


class Stack(nn.Module):
    """Blocks in a dictionary, and a loss."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({f"stage{k}": Block() for k in range(num_blocks)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.stages.values():
            x = block(x)
        return x.square().mean()


@functools.cache
def captured(kind: str) -> Capture:
    module = Stack()
    return capture_module(
        module,
        (torch.randn(8, 16),),
        source="stack",
        passes=Checkpointing.parse(kind).passes(blocks_of(module)),
    )


def saved(capture: Capture) -> int:
    return saved_bytes(capture.graphs[0].module, 1)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("none", ()),
        ("full", (0, 1, 2, 3, 4)),
        ("selective", (0, 1, 2, 3, 4)),
        ("every-2", (0, 2, 4)),
        ("every-4", (0, 4)),
        ("every-9", (0,)),
    ],
)
def test_which_layers(kind, layers):
    names = [f"stages.{k}" for k in range(5)]
    passes = Checkpointing.parse(kind).passes(names)
    assert (
        passes == () if not layers else [one.name for one in passes] == ["checkpoint_activations"]
    )
    assert names[:: Checkpointing.parse(kind).every or len(names)] == [
        names[k] for k in layers or (0,)
    ]


def test_more_is_saved_the_fewer_layers_are_recomputed():
    """Without the pass everything is; the pass is what changes it."""
    sizes = {
        kind: saved(captured(kind)) for kind in ("full", "selective", "every-2", "every-4", "none")
    }
    assert sizes["full"] < sizes["every-2"] < sizes["every-4"] < sizes["none"]
    assert sizes["full"] < sizes["selective"] < sizes["none"]
    assert checkpoint_activations(()) == ()


def test_selective_saves_the_first_residual_sum_of_each_layer():
    capture = capture_preset(
        "llama3-debug",
        mesh=MeshSpec(fsdp=4),
        seq_len=32,
        options=ModelOptions(activation_checkpoint="selective"),
    )
    sums = [
        node
        for node in saved_nodes(capture.graphs[0].module, 1)
        if node.target is torch.ops.aten.add.Tensor
    ]
    layers = [list(node.meta["nn_module_stack"])[-1] for node in sums]
    assert {"layers.0", "layers.1"} <= set(layers)
    full = capture_preset(
        "llama3-debug",
        mesh=MeshSpec(fsdp=4),
        seq_len=32,
        options=ModelOptions(activation_checkpoint="full"),
    )
    bordering = [
        node
        for node in saved_nodes(full.graphs[0].module, 1)
        if node.target is torch.ops.aten.add.Tensor
    ]
    assert len(sums) == len(bordering) + 2, "one more a layer than the sums that lie between layers"


def test_the_graphs_compute_the_same_whatever_is_recomputed():
    torch.manual_seed(0)
    module, x = Stack(), torch.randn(8, 16)
    results = []
    for kind in ("none", "full", "every-2", "selective"):
        capture = capture_module(
            module, (x,), source="stack", passes=Checkpointing.parse(kind).passes(blocks_of(module))
        )
        forward, backward = (graph.module for graph in capture.graphs)
        loss, *kept = forward(*module.parameters(), x)
        results.append(
            [loss, *(g for g in backward(*kept, torch.ones_like(loss)) if g is not None)]
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_users_module_may_be_checkpointed_too(monkeypatch, tmp_path):
    (tmp_path / "checkpointed_job.py").write_text(
        "import torch\nfrom torch import nn\nclass Block(nn.Module):\n    def __init__(self):\n    "
        "    super().__init__()\n        self.w = nn.Linear(16, 16)\n    def forward(self, x):\n   "
        "     return x + torch.tanh(self.w(x))\nclass Model(nn.Module):\n    def __init__(self):\n "
        "       super().__init__()\n        self.blocks = nn.ModuleList(Block() for _ in"
        " range(3))\n    def forward(self, x):\n        for block in self.blocks:\n            x ="
        " block(x)\n        return x.sum()\ndef build():\n    return Model(), torch.randn(8,"
        " 16)\ndef flat():\n    return nn.Linear(16, 16), torch.randn(8, 16)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = [
        saved(capture_function("checkpointed_job:build", activation_checkpoint=kind))
        for kind in ("none", "full")
    ]
    assert sizes[1] < sizes[0]
    with pytest.raises(
        InputError, match="needs layers in a ModuleList or ModuleDict, and Linear has none"
    ):
        capture_function("checkpointed_job:flat", activation_checkpoint="full")


class MaskedStack(nn.Module):
    """Layers of which one part takes some rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Masked(), Masked()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_sizes_that_depend_on_data_are_recomputed_like_others() -> None:
    """Choosing what to save compares shapes, and views with what they show; such sizes too."""
    module = MaskedStack()
    passes = Checkpointing.parse("selective").passes(blocks_of(module))
    inputs = (torch.randn(16, WIDTH, requires_grad=True),)
    capture = capture_module(module, inputs, source="masked", passes=passes)
    assert [graph.name for graph in capture.graphs] == ["forward", "backward"]
    assert any(
        isinstance(node.meta.get("val"), torch.Tensor) and rests_on_assumed(node.meta["val"])
        for node in capture.graphs[1].module.graph.nodes
    )
    assert not env_of(capture.graphs[0].module).guards
