"""Compilation of the inner loops, typed: numba's own decorator hides signatures.

Machine code is cached in ``NUMBA_CACHE_DIR`` where that is set, else beside its file, else in the
user's cache directory; where none of them is writable each process compiles again. numba looks at
one file only to decide whether code in the cache is stale, though the code of a function includes
that of the functions that it calls; here all files with compiled code count.
"""

import re
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba as nb

P = ParamSpec("P")
R = TypeVar("R")
_IMPORTED = re.compile(rb"^from (apsched\.solver[\w.]*) import", re.MULTILINE)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` compiled by numba."""
    njit = cast("Any", nb.njit)
    try:
        dispatcher = njit(cache=True, no_cfunc_wrapper=True)(function)
        assert dispatcher._cache._cache_file._source_stamp
        dispatcher._cache._cache_file._source_stamp = source_stamp()
    except (
        AttributeError,  # a numba without this hook of its cache: no cache rather than stale code
        RuntimeError,  # no directory for a cache can be written
    ):
        dispatcher = njit(no_cfunc_wrapper=True)(function)
    return cast("Callable[P, R]", dispatcher)


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
