"""A step of several micro-batches as one step, so that one graph has all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from apsched.capture.captured import Capture
from apsched.capture.joint import capture_module
from apsched.errors import InputError
from apsched.fx.passes.lists import add_at_the_end, add_before_reducing
from apsched.fx.passes.run_passes import PassList

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional inputs of one micro-batch, and those by name."""
REDUCE_ONCE, REDUCE_EACH = "once", "each"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchChoice:
    """The number of micro-batches of a step, and when their gradients are reduced."""

    count: int = 1
    reduce: str = REDUCE_ONCE
    """``once``: gradients of all micro-batches are added, then reduced; ``each``: those of each are
    reduced, then added, which is bit for bit one micro-batch at a time.
    """

    @classmethod
    def of(cls, count: object, reduce: object) -> "MicroBatchChoice":
        """Return the choice of the arguments ``micro_batches`` and ``reduce``; ``InputError`` where
        they are none.
        """
        choice = cls(count=_counted(count, "micro_batches"), reduce=check_reduce(reduce))
        if choice.count == 1 and reduce == REDUCE_ONCE:
            raise InputError(
                f"reduce: expected {REDUCE_EACH!r} for one micro-batch, found {reduce!r}; set"
                " micro_batches"
            )
        return choice

    def capture(
        self, module: nn.Module, inputs: tuple[Any, ...], *, passes: PassList = (), **rest: Any
    ) -> Capture:
        """Return the graphs of a step of so many micro-batches of ``module``, each with inputs like
        ``inputs``; see :func:`apsched.capture.joint.capture_module`.
        """
        if self.count == 1:
            return capture_module(module, inputs, passes=passes, **rest)
        return capture_module(
            MicroBatches(module, self.count),
            copies_of(inputs, self.count),
            passes=(*passes, *sum_passes(self.reduce)),
            num_micro_batches=self.count,
            **rest,
        )


class MicroBatches(nn.Module):
    """The module that :func:`micro_batches` makes of a module; its parameters, buffers and children
    are those of the module, under the same names.
    """

    def __init__(self, step: nn.Module, num_micro_batches: int) -> None:
        super().__init__()
        self._parameters = step._parameters
        self._buffers = step._buffers
        self._modules = step._modules
        self._non_persistent_buffers_set = step._non_persistent_buffers_set
        self.training = step.training
        self._step = (step,)  # a tuple: not a child, whose parameters would have other names
        self._num_micro_batches = num_micro_batches

    def forward(self, *inputs: Any, **keywords: Any) -> torch.Tensor:
        """Return the sum of the losses of all micro-batches."""
        return _summed(self._step[0], self._num_micro_batches, inputs, keywords)

    def train(self, mode: bool = True) -> "MicroBatches":
        """Set the mode of the step, too."""
        self._step[0].train(mode)
        self.training = mode
        return self


def micro_batches(step: Callable[..., torch.Tensor], n: int) -> Callable[..., torch.Tensor]:
    """Return a step that runs ``step`` on ``n`` micro-batches and adds the losses::

        model = torch.compile(apsched.micro_batches(model, 2), backend=apsched.backend())
        model(tokens, targets).backward()

    Each tensor among the inputs, also inside of tuples, lists and dicts, is split along its first
    dimension, the batch; other values go to every micro-batch. In place of a batch the result takes
    ``n`` tuples, the positional inputs of one micro-batch each. The micro-batches are independent
    of each other in the graph: a compiler that merges equal nodes gathers each parameter once for
    all of them, and the order in which they run is open. The gradients are those of ``n`` calls of
    ``step``, each followed by ``backward()``: a mean over the whole batch needs losses that are
    divided by ``n``.

    Of a module the result is a module with the same parameters, buffers and children, under the
    same names.

    Raises
    ------
    InputError
        where ``n`` is no number above 0; in a call, where a batch cannot be split into ``n`` equal
        parts, or ``step`` returns something else than a tensor of one element.
    """
    n = _counted(n, "n")
    if not callable(step):
        raise InputError(f"step: expected a module or a function, found {type(step).__name__}")
    if isinstance(step, nn.Module):
        return MicroBatches(step, n)

    def summed(*inputs: Any, **keywords: Any) -> torch.Tensor:
        return _summed(step, n, inputs, keywords)

    return summed


def check_reduce(reduce: object) -> str:
    """Return ``reduce``; ``InputError`` where it is none of the two words."""
    if reduce in (REDUCE_ONCE, REDUCE_EACH):
        return str(reduce)
    raise InputError(f"reduce: expected {REDUCE_ONCE!r} or {REDUCE_EACH!r}, found {reduce!r}")


def sum_passes(reduce: str) -> PassList:
    """Return the passes that add the gradients of several micro-batches: before they are reduced,
    or behind all else.
    """
    return add_before_reducing() if reduce == REDUCE_ONCE else add_at_the_end()


def _counted(n: object, name: str) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"{name}: expected a number of micro-batches, at least 1; found {n!r}")
    return n


def copies_of(inputs: Sequence[Any], n: int) -> tuple[tuple[Any, ...], ...]:
    """Return ``n`` tuples of inputs like ``inputs``, with tensors of their own."""
    return tuple(
        tuple(
            tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, inputs)
        )
        for _ in range(n)
    )


def _summed(
    step: Callable[..., torch.Tensor], n: int, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> torch.Tensor:
    if len(inputs) == n and not keywords and all(type(part) is tuple for part in inputs):
        parts: list[_Inputs] = [(part, {}) for part in inputs]
    else:
        parts = _split(n, inputs, keywords)
    total: torch.Tensor | None = None
    for positional, named in parts:
        loss = step(*positional, **named)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InputError(
                "micro_batches: expected a step that returns its loss, a tensor of one element,"
                f" found {_described(loss)}; have it return the loss alone"
            )
        total = loss if total is None else total + loss
    assert total is not None
    return total


def _split(n: int, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> list[_Inputs]:
    """Return the inputs of each micro-batch: a part of each tensor, all of every other value."""
    tensors = [leaf for leaf in tree_leaves((inputs, keywords)) if isinstance(leaf, torch.Tensor)]
    sizes = [tensor.shape[0] if tensor.dim() else -1 for tensor in tensors]
    if not sizes or sizes[0] < 0 or any(size != sizes[0] for size in sizes):
        raise InputError(
            "micro_batches: expected inputs that have the batch as their first dimension, found"
            f" tensors of shapes {', '.join(str(list(t.shape)) for t in tensors) or '(none)'}; hand"
            f" in {n} tuples, the inputs of one micro-batch each"
        )
    if sizes[0] % n:
        raise InputError(
            f"micro_batches: expected a batch that can be split into {n} equal parts, found"
            f" {sizes[0]}"
        )
    size = sizes[0] // n

    def part(k: int, value: Any) -> Any:
        return tree_map(
            lambda leaf: (
                leaf[k * size : (k + 1) * size] if isinstance(leaf, torch.Tensor) else leaf
            ),
            value,
        )

    return [(part(k, inputs), part(k, keywords)) for k in range(n)]


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
