"""The state of optimizers of torch, counted parameter by parameter.

State that exists is counted as it is. The rest follows from two steps of another optimizer of the
same class and hyperparameters, on small tensors of the parameter's dtype on the CPU: bytes per
element, if these are the same for each size of tensor. Tensors without dimensions (numbers of
steps) do not count.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch.optim import Optimizer

from apsched.config import OPTIMIZERS
from apsched.costs.optimizer_step import CountedOptimizer
from apsched.errors import InputError
from apsched.options_table import BY_NAME

StatedOptimizer = str | Optimizer | Sequence[Optimizer]
"""A name, an optimizer, or all optimizers of a job."""

_SIZES = ((2, 4), (64, 128), (128, 256))
"""Of tried parameters; quantized states start at 4096 elements."""
_OF_DEVICES = ("capturable", "differentiable", "foreach", "fused")
"""Hyperparameters that change only the kernels of a step, and that tensors on CPUs may lack."""
_INSTEAD = (
    f"pass a name ({', '.join(OPTIMIZERS)}), or 'none' with a memory_cap that is lower by the"
    " state, or pass the optimizer after its first step, when its state exists"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptimizer:
    """Optimizers of a job as a value that all process ranks have, beside the optimizers
    themselves.
    """

    counted: CountedOptimizer
    references: tuple[Callable[[], Optimizer | None], ...] = field(
        default=(), compare=False, repr=False
    )

    def alive_bytes(self, device: torch.device) -> int:
        """Return the bytes of the state that ``device`` holds now."""
        optimizers = [found for one in self.references if (found := one()) is not None]
        return sum(
            _local_bytes(tensor)
            for optimizer in optimizers
            for state in optimizer.state.values()
            for tensor in _tensors(state)
            if tensor.device == device
        )


def job_optimizer(stated: object) -> JobOptimizer:
    """Return the optimizers that a setting states; ``InputError`` if it states none, or if their
    state cannot be counted.
    """
    optimizers = _checked(stated)
    return JobOptimizer(
        counted=_counted(optimizers, {}), references=tuple(map(weakref.ref, optimizers))
    )


def optimizer_of_model(
    stated: StatedOptimizer, model: torch.nn.Module
) -> Callable[[], str | CountedOptimizer]:
    """Return a function that counts the optimizers that a call states for ``model``, in the shards
    that ``model`` has at the time of that call.

    They are checked here: ``InputError`` as for :func:`job_optimizer`, and if they hold no
    parameter of ``model``.
    """
    if isinstance(stated, str):
        name: str = BY_NAME["optimizer"].read(stated, "optimizer")
        return lambda: name
    optimizers = _checked(stated)
    names = {id(one): name for name, one in model.named_parameters(remove_duplicate=False)}
    held = [parameter for one in optimizers for _, parameter in _held(one)]
    if held and not any(id(parameter) in names for parameter in held):
        raise InputError(
            "optimizer: expected one of parameters of the model, found none of them; make the"
            " optimizer after the model is sharded"
        )
    _counted(optimizers, {})

    def now() -> CountedOptimizer:
        after = dict(model.named_parameters(remove_duplicate=False))
        moved = {key: after[name] for key, name in names.items() if name in after}
        return _counted(optimizers, moved)

    return now


def _checked(stated: object) -> tuple[Optimizer, ...]:
    optimizers = tuple(stated) if isinstance(stated, list | tuple) else (stated,)
    if not optimizers or not _are_optimizers(optimizers):
        raise InputError(
            f"optimizer: expected {', '.join(OPTIMIZERS)} as text, or a torch.optim.Optimizer, or a"
            f" list of these; found {stated!r}"
        )
    for optimizer in optimizers:
        inside = [name for name, value in vars(optimizer).items() if _holds_optimizer(value)]
        if inside:
            raise InputError(
                "optimizer: expected one that updates parameters itself, found"
                f" {type(optimizer).__name__}, which holds others; pass these (its attribute"
                f" {inside[0]!r})"
            )
    return optimizers


def _are_optimizers(found: tuple[object, ...]) -> TypeGuard[tuple[Optimizer, ...]]:
    return all(isinstance(one, Optimizer) for one in found)


def _holds_optimizer(value: object) -> bool:
    inside = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(one, Optimizer) for one in inside)


def _held(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield the parameters that get a gradient, each with its group of hyperparameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield group, parameter


def _counted(
    optimizers: Sequence[Optimizer], moved: Mapping[int, torch.Tensor]
) -> CountedOptimizer:
    """Return ``optimizers`` counted; ``moved`` has by ``id`` the parameters that now stand in for
    theirs, with other shards.
    """
    parameter_bytes = size_bytes = 0
    for optimizer in optimizers:
        sizes: dict[object, tuple[int, int, int]] = {}
        for group, parameter in _held(optimizer):
            elements = _elements(moved.get(id(parameter), parameter))
            parameter_bytes += elements * parameter.element_size()
            # .get: the state is a defaultdict
            known_bytes = sum(map(_largest_bytes, _tensors(optimizer.state.get(parameter, {}))))
            if known_bytes:
                size_bytes += known_bytes * elements // max(_elements(parameter), 1)
                continue
            key = (id(group), parameter.dtype, parameter.dim())
            if key not in sizes:
                sizes[key] = _line(optimizer, group, parameter)
            base_bytes, more_bytes, more_elements = sizes[key]
            size_bytes += base_bytes + more_bytes * elements // more_elements
    names = dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)
    return CountedOptimizer(
        name=", ".join(names), parameter_bytes=parameter_bytes, size_bytes=size_bytes
    )


def _line(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> tuple[int, int, int]:
    """Return (bytes of any parameter, more bytes, for so many more elements) of the state of one
    like ``parameter``.
    """
    name = type(optimizer).__name__
    shapes = [
        (1,) * (parameter.dim() - 2) + rows_columns
        if parameter.dim() >= 2
        else (math.prod(rows_columns),)
        for rows_columns in _SIZES
    ]
    try:
        found = [_stepped_bytes(optimizer, group, shape, parameter.dtype) for shape in shapes]
    except Exception as error:
        raise InputError(
            f"optimizer: expected one that steps on a small tensor by itself, found {name}"
            f" ({type(error).__name__}: {error}); {_INSTEAD}"
        ) from error
    least, middle, most = (math.prod(shape) for shape in shapes)
    more_bytes, more_elements = found[2] - found[1], most - middle
    base_bytes = found[0] - more_bytes * least // more_elements
    if (found[1] - found[0]) * more_elements != more_bytes * (middle - least) or base_bytes < 0:
        sizes = ", ".join(map(str, found))
        raise InputError(
            f"optimizer: expected a state of so many bytes per element, found {name} with"
            f" {sizes} bytes for {least}, {middle}, {most} elements; {_INSTEAD}"
        )
    return base_bytes, more_bytes, more_elements


def _stepped_bytes(
    optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    """Return the bytes of the state after two steps of another optimizer like ``optimizer``."""
    kind: Callable[..., Optimizer] = type(optimizer)
    stated = {
        name: False if name in _OF_DEVICES else _on_cpu(value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    taken = inspect.signature(kind).parameters
    with torch.random.fork_rng(devices=[]):
        parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device="cpu"))
        other = kind([parameter], **{name: stated[name] for name in stated if name in taken})
        other.param_groups[0].update(stated)
        for _ in range(2):  # some states exist from the second step on
            parameter.grad = torch.ones_like(parameter)
            other.step()
    return sum(map(_local_bytes, _tensors(other.state.get(parameter, {}))))


def _on_cpu(value: object) -> object:
    """Return a hyperparameter that a step may write to without an effect on ``value``."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _tensors(state: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state, without those that are one number."""
    if isinstance(state, torch.Tensor):
        if state.dim():
            yield state
    elif isinstance(state, Mapping):
        yield from (tensor for value in state.values() for tensor in _tensors(value))
    elif isinstance(state, list | tuple):
        yield from (tensor for value in state for tensor in _tensors(value))


def _elements(tensor: torch.Tensor) -> int:
    """Return the elements of the largest shard that any process rank has: all count the same."""
    shape = list(tensor.shape)
    for axis, placement in enumerate(getattr(tensor, "placements", ())):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shape[dim] = -(-shape[dim] // tensor.device_mesh.size(axis))  # type: ignore[attr-defined]
    return math.prod(shape)


def _largest_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the largest shard of a tensor of state."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.numel():
        return _elements(tensor) * tensor.element_size()
    return _local_bytes(local) * _elements(tensor) // local.numel()


def _local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensors that this process holds for ``tensor``: a shard, or the parts
    of a quantized tensor.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inside = (getattr(tensor, name) for name in names)  # of a DTensor also its mesh
        return sum(_local_bytes(one) for one in inside if isinstance(one, torch.Tensor))
    return tensor.numel() * tensor.element_size()
