"""Compilation of the inner loops, typed: numba's own decorator hides signatures."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba as nb

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` compiled by numba; the machine code is cached beside its file where that is writable."""
    return cast("Callable[P, R]", nb.njit(cache=True)(function))
