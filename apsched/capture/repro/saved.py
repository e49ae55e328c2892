"""The storages of the values that forward saves for backward.

A printed backward graph has the shapes of its inputs, but not which of them are views of one
storage: three saved views of one activation look like three activations. The forward graph of the
same compilation has the operators that made the views.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from apsched.capture.repro.values import UnreadableError, size_value
from apsched.fx.tensors import storage_key
from apsched.torch_compat.graphs import symbolic_size
from apsched.torch_compat.sizes import size_hint

_SYMBOL = re.compile(r"\b[a-z]\w*\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedView:
    """One saved value, as a view of a storage; numbers as text, as they may have symbols."""

    storage: int
    """Equal for the values that share one."""
    size_bytes: str
    """Bytes of the whole storage."""
    offset: str
    dtype: torch.dtype
    shape: tuple[str, ...]
    stride: tuple[str, ...]

    def is_of(self, dtype: torch.dtype, shape: list[str], stride: list[str]) -> bool:
        """Return whether a printed input may be this value: symbols may be printed in another
        form, so that numbers are compared only.
        """
        mine, printed = (*self.shape, *self.stride), (*shape, *stride)
        pairs = zip(mine, printed, strict=False)
        return (
            dtype == self.dtype
            and len(mine) == len(printed)
            and all(a == b for a, b in pairs if a.isdecimal() or b.isdecimal())
        )


def saved_views(forward: torch.fx.Graph, symbols: Mapping[str, int]) -> dict[str, SavedView]:
    """Return name -> view of the tensors that ``forward`` returns, by which backward takes the
    saved ones; without those whose storage has a size that ``symbols`` do not explain.
    """
    names = _names_in_file(symbols)
    views: dict[str, SavedView] = {}
    storages: dict[int, int] = {}
    for node in tree_leaves(forward.output_node().args[0]):
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        size, offset = (
            _text(number, names, symbols)
            for number in (value.untyped_storage().nbytes(), value.storage_offset())
        )
        if not size or not offset:
            continue
        views[node.name] = SavedView(
            storage=storages.setdefault(storage_key(value), len(storages)),
            size_bytes=size,
            offset=offset,
            dtype=value.dtype,
            shape=tuple(str(length) for length in value.shape),
            stride=tuple(str(step) for step in value.stride()),
        )
    return views


def _names_in_file(symbols: Mapping[str, int]) -> dict[str, str]:
    """Return the names that torch gives to the symbols when a graph is read -> those in the
    file.
    """
    env = ShapeEnv()
    return {str(symbolic_size(env, name, value)): name for name, value in symbols.items()}


def _text(number: Any, names: Mapping[str, str], symbols: Mapping[str, int]) -> str:
    """Return ``number`` in the symbols of the file; empty where these do not give its value."""
    text = _SYMBOL.sub(lambda found: names.get(found[0], found[0]), str(number))

    def known(name: str) -> int:
        if name not in symbols:
            raise UnreadableError(f"the symbolic size {name}")
        return symbols[name]

    try:
        value = size_value(ast.parse(text, mode="eval").body, known)
    except (UnreadableError, SyntaxError):
        return ""
    return text if value == size_hint(number) else ""
