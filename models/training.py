"""Run captured or rewritten graphs of a preset for real, without a compiler.

On each of ``mesh.world_size`` processes, with a real process group (gloo does on CPU)::

    built = build("llama3-debug", mesh=MeshSpec.parse("fsdp=4"), seq_len=32, materialize=True)
    forward, backward = capture_built(built).graphs
    for step in range(5):
        loss, gradients = run_step(built, forward.module, backward.module)
        descend(built, gradients, rate=0.1)

``loss`` is this process rank's share; the sum over data-parallel process ranks is the mean loss of
the step. A graph that was rewritten is run in the same way, as long as its placeholders and outputs
are those of the captured one. Group names are those of the process that captured, and the same on
every process rank that builds the same things in the same order.
"""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from apsched.errors import InputError
from apsched.models.build import BuiltModel


def forward_inputs(built: BuiltModel) -> list[torch.Tensor]:
    """Return the inputs of the forward graph, in order: parameters (local shards), buffers, inputs.
    They share memory with the module.
    """
    state = [_local(parameter) for parameter in built.module.parameters()]
    return [*state, *built.module.buffers(), *built.inputs]


def run_step(
    built: BuiltModel, forward: GraphModule, backward: GraphModule
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of this process rank and the gradient of every parameter's local shard, by
    name.
    """
    inputs = forward_inputs(built)
    placeholders = forward.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise InputError(
            f"the forward graph takes {len(placeholders)} inputs; {built.name} has {len(inputs)}:"
            " capture it again"
        )
    loss, *saved = forward(*inputs)
    sizes = [value for value in saved if not isinstance(value, torch.Tensor)]  # backward's first
    tensors = [value for value in saved if isinstance(value, torch.Tensor)]
    gradients = backward(*sizes, *tensors, torch.ones_like(loss))
    names = [name for name, _ in built.module.named_parameters()]
    return loss, dict(zip(names, gradients, strict=False))


def descend(built: BuiltModel, gradients: Mapping[str, torch.Tensor], *, rate: float) -> None:
    """Take one step of plain gradient descent, in place."""
    for name, parameter in built.module.named_parameters():
        _local(parameter).sub_(gradients[name], alpha=rate)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
