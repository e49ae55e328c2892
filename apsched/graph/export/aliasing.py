"""The storages of a value, as a tree of the value's shape, and those that a result shares.

A tensor is a tuple of storage ids (one, rarely more), a list, tuple or dict of results is a list of
trees (of a dict in the order of its keys), and anything else is an empty tuple.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

Tree: TypeAlias = "tuple[int, ...] | list[Tree]"

STANDS_FOR = "apsched_stands_for"
"""Key in ``meta`` of a node that write-back put in place of a wait: the fake value of that wait,
with which later ones may share."""


def map_tensors(leaf: Callable[[torch.Tensor], tuple[int, ...]], value: Any) -> Tree:
    """Return the tree of ``value``; ``leaf`` returns the storages of a tensor."""
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, Mapping):
        return [map_tensors(leaf, item) for item in value.values()]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [map_tensors(leaf, item) for item in value]
    return ()


def item_of(tree: list[Tree], value: Any, key: Any) -> Tree:
    """Return the tree of ``value[key]``, where ``tree`` is that of the list, tuple or dict
    ``value``."""
    if isinstance(value, Mapping) and key in value:
        return tree[list(value).index(key)]
    bounds = (key.start, key.stop, key.step) if isinstance(key, slice) else (key,)
    known = all(bound is None or isinstance(bound, int) for bound in bounds)
    return (
        tree[key] if known else unique(storages_in(tree))
    )  # which one it is depends on a number of the graph


def storages_in(tree: Tree) -> Iterator[int]:
    """Yield every storage id of a value."""
    for item in tree:
        if isinstance(item, int):
            yield item
        else:
            yield from storages_in(item)


def storages_by_tensor(tree: Tree) -> list[tuple[int, ...]]:
    """Return the storages of each tensor of a value."""
    if isinstance(tree, tuple):
        return [tree] if tree else []
    return [leaf for item in tree for leaf in storages_by_tensor(item)]


def unique(ids: Iterable[int]) -> tuple[int, ...]:
    """Return the ids without repetition, in order."""
    return tuple(dict.fromkeys(ids))
