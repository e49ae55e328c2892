"""The time of a call on this device: by events on a GPU's stream, by the clock on a CPU."""

import time
from collections.abc import Callable
from statistics import median

import torch

from apsched.torch_compat.graphs import hold_stream

_WARM_UPS = 2
_BATCHES = 5
_BATCH_US = 2_000.0
"""Least time of a batch of calls, so that the clock's own time is negligible; a slow call is a
batch of its own.
"""
_MOST_CALLS = 200
_SLOW_US = 200_000.0
"""A call of that length is timed once."""
_HELD_LONGER, _HELD_US, _MOST_HELD_US = 2.0, 1_000.0, 100_000.0
"""How long the stream is held: twice the time of the host's launches, and a millisecond; less where
a first call loads libraries or compiles a kernel.
"""


def duration_us(call: Callable[[], object], device: torch.device) -> float:
    """Return the median over batches of the time of one ``call``; calls before that warm up."""
    timed = _on_gpu_us if device.type == "cuda" else _on_cpu_us
    for _ in range(_WARM_UPS):
        once_us = timed(call, 1)
    if once_us > _SLOW_US:
        return once_us
    calls = max(1, min(_MOST_CALLS, int(_BATCH_US / max(once_us, 1e-3))))
    return median(timed(call, calls) / calls for _ in range(_BATCHES))


def _on_cpu_us(call: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begin) / 1e3


def _on_gpu_us(call: Callable[[], object], calls: int) -> float:
    """Return the time between two events; the stream is held back first, for longer than the host
    needs for its launches, so that the host's own time is not in it.

    On an H200 with a fixed millisecond, 200 operators of a microsecond looked like operators of
    seven: the host launched the last of them long after the stream was free.
    """
    begin, end = timing_event(), timing_event()
    torch.cuda.synchronize()
    launching = time.perf_counter_ns()
    for _ in range(calls):
        call()
    host_us = (time.perf_counter_ns() - launching) / 1e3
    torch.cuda.synchronize()
    hold_stream(min(_HELD_LONGER * host_us + _HELD_US, _MOST_HELD_US))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def timing_event() -> torch.cuda.Event:
    """Return an event that knows when it happened."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
