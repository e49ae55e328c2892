"""Bytes, storages and layouts of the (fake) tensors in ``meta["val"]``."""

from typing import Any

import torch

from apsched.torch_compat import graphs as torch_private
from apsched.torch_compat.sizes import size_hint


def needed_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a storage needs to hold ``tensor``: offset and strides included, as
    ``torch.empty_strided`` counts them.
    """
    extent = 1
    for size, stride in zip(tensor.shape, _strides(tensor), strict=True):
        length = size_hint(size)
        if length == 0:
            return 0
        extent += (length - 1) * size_hint(stride)
    return (extent + size_hint(tensor.storage_offset())) * tensor.element_size()


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the whole storage behind ``tensor``, which may be a view of a part of
    it.
    """
    needed = needed_bytes(tensor)
    try:
        return max(needed, size_hint(tensor.untyped_storage().nbytes()))
    except (NotImplementedError, RuntimeError):  # no storage (sparse)
        return needed


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that is equal for two tensors exactly if they share a storage."""
    try:
        return torch_private.storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` lie one after the other, without a guard on symbolic
    sizes.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(_strides(tensor)), strict=True):
        length = size_hint(size)
        if length == 0:
            return True
        if length != 1 and size_hint(stride) != expected:
            return False
        expected *= length
    return True


def is_cast(node: torch.fx.Node) -> bool:
    """Whether ``node`` changes the dtype of a tensor and nothing else."""
    if node.target is torch.ops.prims.convert_element_type.default:
        return True
    return node.target is torch.ops.aten._to_copy.default and all(
        value is None or key in ("dtype", "non_blocking") for key, value in node.kwargs.items()
    )


def dtype_name(value: Any) -> str:
    """Return the dtype of a tensor as ``bfloat16``; empty for anything else."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""


def _strides(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.stride()) if tensor.layout is torch.strided else (0,) * tensor.dim()
