"""The table of features, with the program that is compiled for each."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from apsched.capture.captured import CapturedGraph
from benchmarks.intake.case import Case
from benchmarks.intake.cases.compiled import compiled_graphs
from benchmarks.intake.cases.parts import WORLD
from benchmarks.intake.cases.worlds import running_world

Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function to compile, its inputs, and options of :func:`compiled_graphs`."""

_FEATURES: dict[str, Callable[[], Made]] = {}
_SMOKE = ("plain", "selective checkpointing", "mixture of experts")
_ON_GLOO = (
    "plain",
    "checkpointing with dropout",
    "dynamic shapes",
    "autocast",
    "tied embeddings",
    "gradient accumulation",
    "compiled optimizer, AdamW",
    "mixture of experts",
    "masks whose size depends on data",
    "Ulysses",
    "sharded by DTensor",
    "tensor parallelism by DTensor, beside gathers",
    "coalesced collectives",
)
"""The features that run on gloo processes, too."""


def cases() -> Iterator[Case]:
    """Yield a case for each feature, in one process; then those on gloo processes."""
    for name, make in _FEATURES.items():
        yield Case(name=name, group="features", build=partial(_graphs, make), smoke=name in _SMOKE)
    for name in _ON_GLOO:
        build = partial(_graphs, _FEATURES[name])
        yield Case(name=f"gloo: {name}", group="gloo", build=build, processes=WORLD)


def made(name: str) -> Callable[[], Made]:
    """Return the function that makes the program of the feature ``name``."""
    return _FEATURES[name]


def _graphs(make: Callable[[], Made]) -> tuple[CapturedGraph, ...]:
    running_world(WORLD)
    torch.manual_seed(0)
    function, inputs, options = make()
    return compiled_graphs(function, inputs, **options)


def feature(name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Register the function that makes the program of the feature ``name``."""

    def registered(make: Callable[[], Made]) -> Callable[[], Made]:
        _FEATURES[name] = make
        return make

    return registered
