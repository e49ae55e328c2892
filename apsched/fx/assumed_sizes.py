"""Assumed numbers for the sizes of a graph that depend on data, and the nodes with such sizes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from apsched.fx.collectives import argument, collective_kind, input_nodes, tensors_of
from apsched.kinds import AssumedSize, CollectiveKind
from apsched.torch_compat.sizes import assume, depends_on_data


def assume_sizes(
    graph: torch.fx.Graph, stated: Mapping[str, int], profiled: Mapping[str, int] | None = None
) -> tuple[AssumedSize, ...]:
    """Decide the assumed sizes of ``graph`` that depend on data; return them by symbol.

    ``stated`` are hints of the user's own, ``profiled`` those of a profile, symbol -> size. See
    :func:`apsched.torch_compat.sizes.assume`; of an all-to-all is known that all rows of its input
    are sent, and as many rows are taken to come back.
    """
    sizes = [
        size for node in graph.nodes for tensor in tensors_of(node) for size in _numbers(tensor)
    ]
    symbolic = [size for size in sizes if depends_on_data(size)]
    return assume(symbolic, _routed(graph), stated, profiled) if symbolic else ()


def rests_on_assumed(tensor: torch.Tensor) -> bool:
    """Whether the bytes of ``tensor`` depend on data."""
    return any(depends_on_data(size) for size in _numbers(tensor))


def _numbers(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape)
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def _routed(graph: torch.fx.Graph) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield sums that are equal: the splits that an all-to-all sends add up to its input; the
    splits that it receives add up to as much where routing is balanced.
    """
    for node in graph.nodes:
        if collective_kind(node) != CollectiveKind.ALL_TO_ALL:
            continue
        (sent,) = (tensor for source in input_nodes(node) for tensor in tensors_of(source))
        for name in ("input_split_sizes", "output_split_sizes"):
            splits = pytree.tree_map_only(
                torch.fx.Node, lambda n: n.meta.get("val"), argument(node, name, None)
            )
            if splits and all(isinstance(split, int | torch.SymInt) for split in splits):
                yield list(splits), [sent.shape[0]]
