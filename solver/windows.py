"""CP-SAT on windows of a large program: a stretch of its operations is decided anew, exactly, against the fixed rest.

Collectives that are launched and waited for within the window are free: membership, position, order. The schedule at hand is the
hint, complete in every literal.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from apsched.config import Caps, SolveOptions
from apsched.solver.compact import Compact
from apsched.solver.cpsat import ExactModel
from apsched.solver.evaluate import COPY_OUT, LAUNCH, SPINE, WAIT, Program, anatomy
from apsched.solver.partition import Pricer
from apsched.solver.window_view import Window, WindowView

MOST_FREE = 8
"""Collectives that one window decides anew."""
_MOST_OPERATIONS = 400


def windows(compact: Compact, program: Program) -> Iterator[Window]:
    """Yield windows around the waits where the compute stream stands still, the longest first, without repeats."""
    where = anatomy(compact, program)
    operation, argument = program.operation, program.argument
    waits = np.nonzero(operation == WAIT)[0]
    stalls = where.transfer_end_ticks[argument[waits]] - where.begin_ticks[waits]
    seen: set[tuple[int, ...]] = set()
    for i in waits[np.argsort(-stalls, kind="stable")]:
        window = _around(program, int(i))
        if window.free and window.free not in seen:
            seen.add(window.free)
            yield window


def _around(program: Program, center: int) -> Window:
    """Return the largest window around an operation that frees at most MOST_FREE collectives; it grows towards the launch first."""
    launched, last = _extents(program)
    first = past = center
    bucket = int(program.argument[center])
    first = min(first, launched[bucket])
    past = max(past, last[bucket]) + 1
    best = Window(first=first, past=past, free=_inside(program, first, past, launched, last))
    step = 8
    while past - first < _MOST_OPERATIONS:
        first, past = max(first - step, 0), min(past + step, len(program.operation))
        free = _inside(program, first, past, launched, last)
        if len(free) > MOST_FREE:
            break
        best = Window(first=first, past=past, free=free)
        if first == 0 and past == len(program.operation):
            break
    return best if len(best.free) <= MOST_FREE else replace(best, free=())


def _extents(program: Program) -> tuple[list[int], list[int]]:
    """Return for each bucket its first and its last operation."""
    first = [len(program.operation)] * len(program.partition.buckets)
    last = [-1] * len(program.partition.buckets)
    bucket_of = program.partition.bucket_of
    for i, (operation, argument) in enumerate(zip(program.operation.tolist(), program.argument.tolist(), strict=True)):
        if operation == SPINE:
            continue
        b = int(bucket_of[argument]) if operation == COPY_OUT else argument
        first[b], last[b] = min(first[b], i), max(last[b], i)
    return first, last


def _inside(program: Program, first: int, past: int, launched: list[int], last: list[int]) -> tuple[int, ...]:
    buckets = program.partition.buckets
    seen = {int(program.argument[i]) for i in range(first, past) if program.operation[i] == LAUNCH}
    return tuple(sorted(c for b in seen if first <= launched[b] and last[b] < past for c in buckets[b]))


def improve(pricer: Pricer, caps: Caps, program: Program, window: Window, options: SolveOptions) -> tuple[Program | None, float]:
    """Return the program with ``window`` decided anew (None where nothing was found), and the deterministic work done."""
    view = WindowView(pricer, caps, program, window)
    model = ExactModel(view.problem, view.compact, view.caps, view.horizon_ticks, view.boundary)
    found = model.minimize_step_time(options, view.hint())
    if found.program is None:
        return None, found.deterministic_work
    return view.spliced(found.program), found.deterministic_work
