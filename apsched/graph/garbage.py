"""Fewer searches for garbage while many objects are made that all stay alive."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_RARE = 200_000
"""New objects between two collections of the youngest ones; Python's default is 700 or 2,000."""
_lock = threading.Lock()
_inside = 0
_usual = gc.get_threshold()


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect garbage less often. A graph of ten thousands of nodes is millions of objects: to look
    at all of them takes seconds and frees nothing. Threads may overlap: the last one to leave
    restores the thresholds.
    """
    global _inside, _usual
    with _lock:
        _inside += 1
        if _inside == 1:
            _usual = gc.get_threshold()
            if _usual[0]:  # 0 turns collections off
                gc.set_threshold(max(_RARE, _usual[0]), *_usual[1:])
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_usual)
