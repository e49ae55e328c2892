"""Compiles the solver's inner loops in processes of their own while a source is captured.

A new environment has no machine code of them: numba needs about 20 s of processor time for the
search, and 16 s for orders of the compute. It keeps the code on disk, where this process finds it.
"""

import atexit
import subprocess
import sys

from apsched.progress import Progress

_CODE = """
import os, sys
os.nice({nice}) if hasattr(os, "nice") else None
sys.path[:] = {path!r}
from apsched.solver import compile_part
compile_part({part!r})
"""
_RUNNING: dict[str, subprocess.Popen[bytes]] = {}


def begin_to_compile(progress: Progress) -> None:
    """Begin to compile each part that has no machine code; nothing where all have it."""
    from apsched.solver import SEARCH, missing_parts

    missing = [part for part in missing_parts() if part not in _RUNNING]
    if not missing:
        return
    progress.note("the solver's inner loops are compiled in the background, this once")
    atexit.register(stop_compiling)
    for part in missing:
        nice = 0 if part == SEARCH else 5  # other parts are needed by few solves
        code = _CODE.format(nice=nice, path=sys.path, part=part)
        _RUNNING[part] = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def wait_until_compiled(progress: Progress, *, with_orders: bool) -> None:
    """Wait for the parts that a solve needs, with those for orders of the compute if it looks at
    any. Where they are not compiled then, the solver does it when it needs them.
    """
    from apsched.solver import ORDERS, SEARCH, missing_parts

    parts = (SEARCH, ORDERS) if with_orders else (SEARCH,)
    running = [_RUNNING[part] for part in parts if part in _RUNNING]
    if any(process.poll() is None for process in running):
        with progress.stage("compile the solver's inner loops"):
            for process in running:
                process.wait()
    if not set(parts).isdisjoint(missing_parts()):
        progress.note("the solver compiles its inner loops, once in this environment")


def stop_compiling() -> None:
    """End the processes that still compile."""
    for process in _RUNNING.values():
        process.kill()
        process.wait()
    _RUNNING.clear()
