"""A name for everything that a scheduled graph depends on beside the graph itself: part of the key
of compilers' caches.
"""

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from apsched.compiler.schedule_captured import process_rank, running_groups
from apsched.compiler.settings import Settings
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.measured_model import MeasuredCostModel
from apsched.costs.model import CostModel
from apsched.problem.plan.rules import Plan


def fingerprint(settings: Settings, *more: object) -> str | None:
    """Return a digest of ``settings``, prices, caps, plan, versions, process groups and this
    process's rank, and of ``more``.

    A bucket of all-gathers has this process rank's place in its buffer baked in, so that ranks must
    not share code. ``None`` where the prices are those of a model that has no name: a class of the
    user's own without ``uuid()``.
    """
    prices = _prices(settings.prices(running_groups()))
    if prices is None:
        return None
    assert isinstance(settings.plan, Plan)
    parts = (
        _versions(),
        process_rank(),
        sorted(running_groups().items()),
        sorted((settings.group_ranks or {}).items()),
        prices,
        settings.caps,
        settings.stated_memory_cap,
        (settings.solve_request.optimizer, settings.solve_request.reserve),
        settings.plan.rules,
        settings.bitwise,
        settings.second_group,
        settings.contention,
        settings.parameter_order,
        sorted(settings.stated_hints.items()),
        settings.solve_options,
        settings.scenario_options,
        settings.on_error,
        [
            (file.graph, file.steps, file.buckets)
            for file in (*settings.answers.schedules, *settings.starts)
        ],
        len(settings.starts),
        settings.answers.near,
        *more,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _prices(model: CostModel) -> object | None:
    if isinstance(model, ClusterCostModel | MeasuredCostModel):
        return _content(model)
    uuid = getattr(model, "uuid", None)
    return uuid() if callable(uuid) else None


def _content(value: Any) -> object:
    """Return the values that an object of apsched is made of, in an order that does not depend on
    the process.
    """
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return sorted((repr(key), _content(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_content, value))
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if type(value).__module__.startswith("apsched."):
        names = [name for name in _attributes(value) if name not in _FILLED_WITH_USE]
        return (
            type(value).__qualname__,
            [(name, _content(getattr(value, name))) for name in names],
        )
    return repr(value)


_FILLED_WITH_USE = ("_shapes", "_unpriced")
"""Attributes of cost models that hold a record of calls."""


def _attributes(value: Any) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return sorted({*vars(value), *slots} if hasattr(value, "__dict__") else slots)


@cache
def _versions() -> tuple[str, ...]:
    """Return the versions of torch, OR-Tools and Numba, and a digest of apsched's own source."""
    folder = Path(__file__).resolve().parents[1]
    hasher = hashlib.sha256()
    for top in (folder, folder / "solver", folder / "models"):  # the latter two may be links
        for file in sorted(top.rglob("*.py")) + sorted(top.rglob("*.toml")):
            hasher.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return (str(torch.__version__), version("ortools"), version("numba"), hasher.hexdigest())
