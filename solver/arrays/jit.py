"""Compilation of the inner loops, typed: numba's own decorator hides signatures.

Machine code is cached in ``NUMBA_CACHE_DIR`` where that is set, else beside its file, of an
installed package beside the package, else in the user's cache directory; where none of them is
writable each process compiles again. numba looks at
one file only to decide whether code in the cache is stale, though the code of a function includes
that of the functions that it calls; here all files with compiled code count.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba as nb

P = ParamSpec("P")
R = TypeVar("R")
_INSTALLED = ("site-packages", "dist-packages")
_IMPORTED = re.compile(rb"^from (apsched\.solver[\w.]*) import", re.MULTILINE)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` compiled by numba."""
    njit = cast("Any", nb.njit)
    try:
        with _caching_beside_the_package():
            dispatcher = njit(cache=True, no_cfunc_wrapper=True)(function)
        assert dispatcher._cache._cache_file._source_stamp
        dispatcher._cache._cache_file._source_stamp = source_stamp()
    except (
        AttributeError,  # a numba without this hook of its cache: no cache rather than stale code
        RuntimeError,  # no directory for a cache can be written
    ):
        dispatcher = njit(no_cfunc_wrapper=True)(function)
    return cast("Callable[P, R]", dispatcher)


def cache_directory(file: Path) -> Path | None:
    """Return the directory for the machine code of ``file``, a file of this package that is
    installed; ``None`` in a checkout.

    It is no part of the package: pip leaves files behind that it did not install, and Python would
    take the folders that they are in for a package of that name, in place of an editable one.
    """
    folder = next((f for f in file.parents if f.name in _INSTALLED), None)
    return None if folder is None else folder / "apsched-machine-code"


@contextmanager
def _caching_beside_the_package() -> Iterator[None]:
    """Have numba cache the functions that the body decorates there, unless the user states a
    directory.
    """
    config, directory = cast("Any", nb.config), cache_directory(Path(__file__))
    stated = config.CACHE_DIR
    if directory is not None and not stated:
        config.CACHE_DIR = str(directory)
    try:
        yield
    finally:
        config.CACHE_DIR = stated


def has_machine_code(function: Callable[..., Any]) -> bool:
    """Whether this process or the cache on disk has machine code for ``function``; true where numba
    does not show it.
    """
    dispatcher = cast("Any", function)
    try:
        return bool(dispatcher.signatures or dispatcher._cache._cache_file._load_index())
    except (AttributeError, OSError):
        return True


@cache
def source_stamp() -> str:
    """Return a digest of the solver's files with compiled code, and of those that these import
    records and constants from.
    """
    return stamp_of(Path(__file__).parents[1])


def stamp_of(solver: Path) -> str:
    """Return the stamp of the solver in folder ``solver``."""
    texts = {
        f"apsched.solver.{'.'.join(file.relative_to(solver).with_suffix('').parts)}": (
            file.read_bytes()
        )
        for file in solver.rglob("*.py")
    }
    names = {name for name, text in texts.items() if f"from {__name__} import".encode() in text}
    for name in tuple(names):
        names |= {imported.decode() for imported in _IMPORTED.findall(texts[name])}
    digest = sha256()
    for name in sorted(names & set(texts)):
        digest.update(texts[name])
    return digest.hexdigest()
