"""The private functions of torch that apsched uses, and the check of each."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import apsched.torch_compat

Check = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one check."""

    name: str
    """The function in ``apsched.torch_compat`` around a private one of torch."""
    found: bool
    """Everything that it needs exists."""
    broken: str
    """The breach of its contract, in a line; empty if it keeps it."""


CHECKS: dict[str, Check] = {}


def contract(*names: str) -> Callable[[Check], Check]:
    """Register a check of these functions."""

    def registered(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return registered


def wrappers() -> dict[str, ModuleType]:
    """Return every public function of the modules that know private functions of torch, with its
    module.
    """
    names = [
        m.name
        for m in pkgutil.iter_modules(apsched.torch_compat.__path__)
        if not m.ispkg and m.name != "version"
    ]
    modules = [importlib.import_module(f"apsched.torch_compat.{name}") for name in sorted(names)]
    return {
        name: module
        for module in modules
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    }


def outcomes() -> Iterator[Outcome]:
    """Run all checks; a function without one is broken."""
    for name in wrappers():
        yield outcome(name)


def outcome(name: str) -> Outcome:
    """Run the check of one function."""
    try:
        CHECKS[name]()
    except KeyError as error:
        if name in CHECKS:
            return Outcome(name=name, found=True, broken=_line(error))
        return Outcome(name=name, found=True, broken="no contract is written down for it")
    except (ImportError, AttributeError) as error:
        return Outcome(name=name, found=False, broken=_line(error))
    except Exception as error:
        return Outcome(name=name, found=True, broken=_line(error))
    return Outcome(name=name, found=True, broken="")


@contextmanager
def group(size: int = 1, *, fake: bool = False) -> Iterator[str]:
    """Run the body in a process group of one process, or a fake one of ``size``; yields its
    name.
    """
    from apsched.torch_compat.graphs import fake_store

    store: Any = fake_store() if fake else torch._C._distributed_c10d.HashStore()
    dist.init_process_group("fake" if fake else "gloo", store=store, rank=0, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def expect(holds: object, what: str) -> None:
    """Raise where something that is relied on does not hold."""
    if not holds:
        raise AssertionError(what)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
