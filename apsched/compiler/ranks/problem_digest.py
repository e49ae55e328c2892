"""The address of an answer: a digest of all that it depends on, and of nothing else."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule

_NAMES = ("name", "node_names", "streams")
"""Fields of a problem that may differ from process rank to process rank, and that no answer depends
on.
"""
_PACKAGES = ("apsched", "ortools", "numpy", "numba")


def problem_digest(problem: Problem) -> str:
    """Return the hexadecimal digest of ``problem`` with all its costs and rules; names of nodes and
    groups are left out.
    """
    hasher = hashlib.sha256(b"apsched problem 1\n")
    for text in _printed(problem):
        hasher.update(text.encode() + b"\n")
    return hasher.hexdigest()


def answer_digest(
    problem: Problem,
    caps: Caps,
    options: SolveOptions,
    start: Schedule | None = None,
    *,
    near: bool = False,
) -> str:
    """Return the hexadecimal digest of all that ``solve(problem, caps, options, start=start)``
    depends on, versions included.

    ``near`` is another digest: of an answer whose search began at whatever was near.
    """
    parts = (
        problem_digest(problem),
        sorted(asdict(caps).items()),
        sorted(asdict(options).items()),
        start,
        versions(),
        solver_code(),
        *(["near"] if near else []),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of all that an answer depends on."""
    return tuple((package, _version(package)) for package in _PACKAGES)


@lru_cache(maxsize=1)
def solver_code() -> str:
    """Return a digest of the solver's own files: a checkout changes without a new version."""
    import apsched.solver

    return code_digest(Path(apsched.solver.__path__[0]))


def code_digest(folder: Path) -> str:
    """Return a digest of the Python files of ``folder`` and of all folders in it."""
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _printed(problem: Problem) -> Iterator[str]:
    for field in fields(Problem):
        value: Any = getattr(problem, field.name)
        if field.name in _NAMES:
            continue
        if field.name == "keys":
            value = tuple(replace(key, group="") for key in value)  # ``stream`` tells them apart
        if field.name == "contention" and value is not None:
            links = tuple(map(value.links_of, problem.streams))  # links and groups by number
            value = links, value.slowdowns
        yield f"{field.name} {value!r}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
