"""For TorchTitan's graph trainer: micro-batches of its gradient accumulation as one graph.

The trainer calls ``forward_backward_step`` once for each micro-batch and adds the losses. Here a
call keeps its micro-batch until there are enough. The last call of a group traces (once) and runs
forward and backward of the whole group.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from apsched.capture.micro_batches import (
    REDUCE_EACH,
    MicroBatchChoice,
    MicroBatches,
    sum_passes,
)
from apsched.errors import InputError
from apsched.fx.chains import set_chains
from apsched.fx.graph_copies import finished
from apsched.fx.passes.parameters import is_backward
from apsched.fx.passes.run_passes import run_passes

_aten = torch.ops.aten


ALONE = MicroBatchChoice(reduce=REDUCE_EACH)


def check_accumulation(num_steps: int, count: int) -> None:
    """Raise InputError where ``num_steps`` micro-batches cannot be run in groups of ``count``."""
    if num_steps % count:
        raise InputError(
            f"micro_batches: expected a divisor of the {num_steps} micro-batches that TorchTitan"
            f" accumulates, found {count}; change --training.global_batch_size, or"
            " register(micro_batches=...)"
        )


def passes_before_tags(joined: MicroBatchChoice) -> list[Callable[..., GraphModule]]:
    """Return the passes for the joint graph of several micro-batches that run before TorchTitan
    tags the nodes that backward repeats.
    """
    if joined.count == 1:
        return []

    def sums_pass(gm: GraphModule, example_inputs: Any = None) -> GraphModule:
        return run_passes(gm, sum_passes(joined.reduce)).module

    return [sums_pass, losses_first_pass]


class JoinedMicroBatches:
    """``forward_backward_step`` of ``trainer`` for groups of ``n`` micro-batches."""

    def __init__(self, trainer: Any, n: int) -> None:
        self._trainer, self._n = trainer, n
        self._waiting: list[tuple[Any, Any, dict[str, Any]]] = []

    def __call__(
        self,
        *,
        input_dict: Mapping[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of the group with its last micro-batch, and zero before."""
        trainer = self._trainer
        self._waiting.append(trainer.post_dataloading_process(input_dict, labels))
        if len(self._waiting) < self._n:
            return torch.zeros((), device=labels.device)
        inputs, targets, keywords = zip(*self._waiting, strict=True)
        self._waiting = []
        (model,) = trainer.model_parts
        named = model.named_parameters(remove_duplicate=False)
        with _loss_of_several(trainer):
            loss = trainer._make_fx_forward_backward_step(
                _Several(model, self._n),
                inputs,
                targets,
                global_valid_tokens,
                [parameter for _, parameter in named if parameter.requires_grad],
                {"keywords": keywords},
            )
        return loss.full_tensor() if isinstance(loss, DTensor) else loss  # it is added to a zero


def mark_micro_batches(gm: GraphModule, num_state: int, n: int) -> None:
    """Tag the nodes of the joint graph ``gm`` of ``n`` micro-batches with their chain, in place.
    The first ``num_state`` placeholders are parameters and buffers.

    Raises
    ------
    InputError
        where the micro-batches depend on each other; it names the node.
    """
    _without_value(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    batches = {node for node in placeholders[num_state:] if _has_batch(node)}
    set_chains(gm.graph, expected=n, sources=batches)


def losses_first_pass(gm: GraphModule, example_inputs: Any = None) -> GraphModule:
    """Return ``gm`` with backward of the loss and of ``lm_head`` of every micro-batch ahead of the
    rest of backward, in place.

    TorchTitan's ``selective_activation_remat_pass`` begins behind the last of these nodes. As
    traced, backward of the last micro-batch is before that, and would read nodes that are made
    behind it.
    """
    early = set()
    for node in reversed(gm.graph.nodes):
        if is_backward(node) and _module(node) in _BEFORE_LAYERS:
            early.add(node)
        if node in early:
            early.update(given for given in node.all_input_nodes if is_backward(given))
    order = list(gm.graph.nodes)
    late = next((k for k, n in enumerate(order) if is_backward(n) and n not in early), len(order))
    for node in order[late:]:
        if node in early:
            order[late].prepend(node)
    gm.graph.lint()
    gm.recompile()
    return gm


_BEFORE_LAYERS = ("loss", "lm_head")
"""``_NON_AC_MODULE_FQNS`` of TorchTitan's ``selective_activation_remat``."""


def _module(node: torch.fx.Node) -> str:
    """Return the module that TorchTitan's tracer names for ``node``."""
    return str(node.meta.get("custom", {}).get("module_fqn", ""))


class _Several(MicroBatches):
    """``model`` for several micro-batches; its result is the tuple of their predictions."""

    def forward(self, inputs: Any, keywords: Any) -> Any:
        """Return the prediction of each micro-batch."""
        step: nn.Module = self._step[0]
        return tuple(step(one, **named) for one, named in zip(inputs, keywords, strict=True))


@contextmanager
def _loss_of_several(trainer: Any) -> Iterator[None]:
    """Have ``trainer`` take the sum of the losses of several micro-batches as its loss."""
    own = trainer.loss_fn

    def summed(predictions: Any, labels: Any, **rest: Any) -> torch.Tensor:
        results = [own(*pair, **rest) for pair in zip(predictions, labels, strict=True)]
        losses = [result[0] if isinstance(result, tuple) else result for result in results]
        total: torch.Tensor = sum(losses[1:], losses[0])
        return total

    trainer.loss_fn = summed
    try:
        yield
    finally:
        trainer.loss_fn = own


def _has_batch(placeholder: torch.fx.Node) -> bool:
    value = placeholder.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _without_value(gm: GraphModule) -> None:
    """Replace ``ones_like`` of a scalar by ``full``: the gradient of the loss does not depend on
    its value, so that backward of one micro-batch does not wait for the loss of another one.
    """
    for node in gm.graph.find_nodes(op="call_function", target=_aten.ones_like.default):
        value = node.meta["val"]
        if value.dim():
            continue
        with gm.graph.inserting_before(node):
            full = gm.graph.call_function(
                _aten.full.default,
                ([], 1),
                {"dtype": value.dtype, "device": value.device, "pin_memory": False},
            )
        full.meta = dict(node.meta)
        node.replace_all_uses_with(full)
    finished(gm)
