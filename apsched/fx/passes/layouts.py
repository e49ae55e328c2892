"""What a chain of views and copies does to the elements of a tensor, found by running it on strides
instead of values.
"""

from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

_aten = torch.ops.aten
_COPIES = frozenset(
    (
        _aten.clone.default,
        _aten.contiguous.default,
        _aten._to_copy.default,
        _aten.alias.default,
        _aten.detach.default,
    )
)
_VIEWS = frozenset(
    (
        _aten.permute.default,
        _aten.transpose.int,
        _aten.t.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.slice.Tensor,
        _aten.narrow.default,
        _aten.select.int,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.chunk.default,
        _aten.view.default,
        _aten.unflatten.int,
        getitem,
    )
)
_VIEWS_OR_COPIES = frozenset((_aten.reshape.default, _aten._unsafe_view.default))


def elements(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the layout of all elements of ``tensor`` in their order; ``None`` where sizes are
    symbolic.

    A layout is a tensor without memory: shape, strides and offset say which element of the original
    stands where.
    """
    if not all(isinstance(size, int) for size in tensor.shape):
        return None
    return torch.empty(tensor.shape, dtype=torch.uint8, device="meta")


def moved(layout: Any, node: Node, source: Node) -> Any:
    """Return the layout after ``node`` takes ``source``, whose layout is given; ``None`` where it
    does more than move, or is not known.

    A copy leaves every element in its place, whatever its strides, so that views behind a copy are
    run on the layout before it: exact where it works, and where torch refuses such a view the
    answer is ``None``.
    """
    if node.op != "call_function" or node.all_input_nodes != [source]:
        return None
    if node.target in _COPIES:
        return layout if _same_dtype(node, source) else None
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: layout)
    try:
        if node.target in _VIEWS_OR_COPIES:
            return layout.view(args[1])
        return node.target(*args, **kwargs) if node.target in _VIEWS else None  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError, AttributeError):
        return None


def moved_along(tensor: torch.Tensor, chain: Sequence[Node], source: Node) -> Any:
    """Return the layout of ``tensor``, the value of ``source``, after all of ``chain``; ``None``
    where that is not known.
    """
    layout: Any = elements(tensor)
    for node in chain:
        if layout is None:
            return None
        layout, source = moved(layout, node, source), node
    return layout


def moves_of(source: Node) -> Iterator[tuple[Node, Any]]:
    """Yield every node that only moves elements of ``source``, with its layout."""
    stack = [(source, elements(source.meta["val"]))]
    while stack:
        node, layout = stack.pop()
        for user in node.users:
            after = moved(layout, user, node) if layout is not None else None
            if after is not None:
                stack.append((user, after))
                yield user, after


def is_part(layout: Any, shape: Sequence[int], offset: int) -> bool:
    """Return whether a layout is ``shape`` elements in their order, from ``offset`` on."""
    if (
        not isinstance(layout, torch.Tensor)
        or tuple(layout.shape) != tuple(shape)
        or layout.storage_offset() != offset
    ):
        return False
    expected = 1
    for size, stride in zip(reversed(layout.shape), reversed(layout.stride()), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _same_dtype(node: Node, source: Node) -> bool:
    own, other = node.meta.get("val"), source.meta.get("val")
    if not isinstance(own, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return own.dtype == other.dtype and own.device == other.device
