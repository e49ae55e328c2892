"""Branches on random draws in a graph that is traced with fake tensors.

LayerDrop of Transformers is ``if torch.rand([]) < self.layerdrop: skip the layer``. A draw lies in
[0, 1), so that a comparison with a number outside has one result whatever the draw: with 0, the
default of ``layerdrop``, no layer is skipped.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_SURE: dict[str, tuple[Callable[[float], bool], Callable[[float], bool]]] = {
    "lt": (lambda number: number >= 1, lambda number: number <= 0),
    "le": (lambda number: number >= 1, lambda number: number < 0),
    "gt": (lambda number: number < 0, lambda number: number >= 1),
    "ge": (lambda number: number <= 0, lambda number: number >= 1),
}
"""Comparison of a draw with a number -> whether it is true of all draws, whether of none."""
_DRAW = torch.rand
_DECIDES = ("__bool__", "item")


class RandomBranchError(RuntimeError):
    """A branch on a random draw whose result depends on the draw."""


class DecidedDraws(TorchFunctionMode):
    """Decides branches on comparisons of ``torch.rand`` of one element with a number, where the
    result is the same for all draws.

    Raises
    ------
    RandomBranchError
        for a branch on another comparison of a draw with a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._draws: dict[int, torch.Tensor] = {}
        """By ``id``, which stays theirs while they are kept here."""
        self._compared: dict[int, tuple[torch.Tensor, bool | None, str]] = {}
        """Result of a comparison, its value where it is sure, and the comparison in words."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DECIDES and args and id(args[0]) in self._compared:
            return self._decided(args[0])
        found = func(*args, **kwargs)
        if func is _DRAW and "out" not in kwargs and found.numel() == 1:
            self._draws[id(found)] = found
        elif self._draws:
            self._follow(name.strip("_"), found, args, kwargs)
        return found

    def _follow(self, name: str, found: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Take note of a comparison of a draw; forget a draw that another operator takes, which may
        write to it.
        """
        if (
            name in _SURE
            and len(args) == 2
            and id(args[0]) in self._draws
            and isinstance(args[1], int | float)
            and not kwargs
        ):
            always, never = (test(args[1]) for test in _SURE[name])
            value = always if always or never else None
            self._compared[id(found)] = (found, value, f"torch.rand {name} {args[1]}")
            return
        for leaf in tree_leaves((args, kwargs)):
            self._draws.pop(id(leaf), None)
            self._compared.pop(id(leaf), None)

    def _decided(self, compared: torch.Tensor) -> bool:
        _, value, words = self._compared[id(compared)]
        if value is None:
            raise RandomBranchError(words)
        return value
