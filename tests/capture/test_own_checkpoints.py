"""Checkpointing that a model does itself: the graphs recompute as eager torch does."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import apsched
from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.function import capture_own
from apsched.capture.joint import capture_module
from apsched.errors import InputError
from apsched.fx.passes.checkpointing import checkpoint_activations, saved_bytes, saved_nodes

WIDTH, ROWS, BLOCKS = 8, 64, 4


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.sin(self.up(x)).cos()))


class Stack(nn.Module):
    """Blocks, each of which ``call`` runs."""

    def __init__(self, call: Callable[..., torch.Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x).sum()


def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


recomputed = partial(checkpoint, use_reentrant=False)


def products() -> object:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def nested(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return recomputed(lambda y: recomputed(block, y).tanh(), x)


def captured(model: nn.Module) -> tuple[Capture, GraphModule, GraphModule]:
    torch.manual_seed(0)
    found = capture_module(model, (torch.randn(ROWS, WIDTH),), source="stack")
    forward, backward = (graph.module for graph in found.graphs)
    return found, forward, backward


def targets(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def eager_bytes(model: nn.Module) -> int:
    """Return the bytes that autograd saves of activations, each storage once."""
    kept = {one.untyped_storage().data_ptr() for one in model.parameters()}
    inputs, alive = torch.randn(ROWS, WIDTH), {}
    kept.add(inputs.untyped_storage().data_ptr())

    def pack(saved: torch.Tensor) -> torch.Tensor:
        alive[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(inputs)
    return sum(one.untyped_storage().nbytes() for key, one in alive.items() if key not in kept)


def test_regions_are_those_of_ac_full():
    """The option ``--ac full`` and checkpointing in the model make one and the same pair."""
    _, *own = captured(Stack(recomputed))
    passes = checkpoint_activations([f"blocks.{k}" for k in range(BLOCKS)])
    inputs = (torch.randn(ROWS, WIDTH),)
    asked = capture_module(Stack(plain), inputs, source="stack", passes=passes)
    for mine, other in zip(own, asked.graphs, strict=True):
        assert targets(mine) == targets(other.module)
    assert "aten.addmm.default" in targets(own[1]), "backward runs the blocks again"
    assert "aten.addmm.default" not in targets(captured(Stack(plain))[2])


def test_memory_is_that_of_eager_torch():
    """Of each region its input alone: the middle of a block, 4 times as wide, is not saved."""
    size = ROWS * WIDTH * 4
    _, forward, _ = captured(Stack(recomputed))
    assert eager_bytes(Stack(recomputed)) == BLOCKS * size
    assert (BLOCKS - 1) * size <= saved_bytes(forward, 1) <= BLOCKS * size
    assert saved_bytes(captured(Stack(plain))[1], 1) > 2 * BLOCKS * size


def wrapped() -> nn.Module:
    model = Stack(plain)
    for k, block in enumerate(model.blocks):
        model.blocks[k] = checkpoint_wrapper(block)
    return model


@pytest.mark.parametrize(
    "build",
    [
        partial(Stack, recomputed),
        partial(Stack, recomputed, dropout=0.5),
        partial(Stack, partial(recomputed, context_fn=products)),
        partial(Stack, nested),
        partial(Stack, partial(recomputed, debug=True)),
        wrapped,
    ],
    ids=["whole", "dropout", "selective", "nested", "debug", "wrapper"],
)
def test_the_graphs_compute_the_gradients_of_eager_torch(build):
    model = build()
    _, forward, backward = captured(model)
    inputs = torch.randn(ROWS, WIDTH)
    torch.manual_seed(1)
    model(inputs).backward()
    torch.manual_seed(1)
    parameters = [parameter.detach() for parameter in model.parameters()]
    loss, *saved = forward(*parameters, inputs)
    gradients = backward(*saved, torch.ones_like(loss))
    for parameter, gradient in zip(model.parameters(), gradients, strict=False):
        assert torch.equal(parameter.grad, gradient)
    activations = [node for node in saved_nodes(forward, 1) if node.meta["val"].ndim == 2]
    widest = max(node.meta["val"].shape[1] for node in activations)
    assert widest == (4 * WIDTH if "context_fn" in getattr(model.call, "keywords", {}) else WIDTH)


def test_a_selective_policy_is_kept():
    """The products are saved, and no backward computes one of the blocks again."""
    _, forward, backward = captured(Stack(partial(recomputed, context_fn=products)))
    saved = [str(node.target) for node in saved_nodes(forward, 1)]
    assert saved.count("aten.addmm.default") >= BLOCKS
    assert "aten.addmm.default" not in targets(backward)
    assert "aten.sin.default" not in saved


def test_ac_takes_the_place_of_own_regions_in_its_layers():
    """Regions of both kinds are numbered as they run: what one hands to the next is saved."""
    model = Stack(recomputed)
    inputs = (torch.randn(ROWS, WIDTH),)
    found = [
        capture_own(
            model, inputs, source="stack", num_ranks=None, mesh=None, activation_checkpoint=kind
        )
        for kind in ("none", "full", "every-2")
    ]
    own, *others = [targets(one.graphs[1].module) for one in found]
    assert others == [own, own]


def test_a_context_that_is_no_dispatch_mode_is_refused():
    from contextlib import nullcontext

    call = partial(recomputed, context_fn=lambda: (nullcontext(), nullcontext()))
    with pytest.raises(InputError, match=r"returns two dispatch modes.* found nullcontext"):
        captured(Stack(call))


def test_reentrant_checkpointing_is_refused_with_its_remedy():
    """In the capture of a module, and in that of a model with units."""
    advice = "found use_reentrant=True, which cannot be captured; pass use_reentrant=False"
    stack, inputs = Stack(partial(checkpoint, use_reentrant=True)), (torch.randn(ROWS, WIDTH),)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), stack)
    with pytest.raises(InputError, match=advice):
        capture_own(model, inputs, source="stack", num_ranks=None, mesh=None)
    with world(2):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(InputError, match=advice):
            apsched.tune_fsdp2(model, inputs, budget=0)


def test_torch_checkpoints_as_before_behind_a_capture():
    before = eager_bytes(Stack(recomputed))
    captured(Stack(recomputed))
    assert eager_bytes(Stack(recomputed)) == before


@pytest.mark.parametrize("build", [partial(Stack, recomputed), wrapped], ids=["call", "wrapper"])
def test_units_of_fsdp2_are_recomputed_and_priced(build):
    """Less memory, and a longer backward, in what :func:`apsched.tune_fsdp2` solves."""
    peaks, times = [], []
    with world(2):
        for make in (partial(Stack, plain), build):
            model, mesh = make(), init_device_mesh("cpu", (2,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            inputs = (torch.randn(1024, WIDTH),)
            tuned = apsched.tune_fsdp2(model, inputs, budget=0, memory_cap="60GiB")
            peaks.append(max(one.best.peak_memory_bytes for one in tuned.results))
            times.append(tuned.results[1].step_time_us)
    assert peaks[1] < 0.5 * peaks[0]
    assert times[1] > times[0]


def test_a_region_with_several_units_is_saved_and_that_is_said(caplog):
    """FSDP2 runs their hooks in one order while it recomputes, and in another one behind that."""
    peaks = []
    with world(2):
        for make in (partial(Stack, plain), partial(Stack, recomputed)):
            model, mesh = make(), init_device_mesh("cpu", (2,))
            for block in model.blocks:
                fully_shard(block.up, mesh=mesh)
                fully_shard(block.down, mesh=mesh)
            fully_shard(model, mesh=mesh)
            inputs = (torch.randn(64, WIDTH),)
            tuned = apsched.tune_fsdp2(model, inputs, budget=0, memory_cap="60GiB")
            peaks.append([one.best.peak_memory_bytes for one in tuned.results])
            said = [
                record.getMessage() for record in caplog.records if record.levelname == "WARNING"
            ]
            said = [line for line in said if "checkpointed regions" in line]
            assert len(said) == (make.args[0] is not plain)
    assert peaks[0] == peaks[1]
    assert said[0].startswith(f"{BLOCKS} checkpointed regions have several units")
