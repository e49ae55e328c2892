"""CP-SAT on windows of a large program: it decides a stretch of the operations again, exactly,
against the fixed rest.

Collectives that are launched and waited for within the window are free: membership, position,
order. The present schedule is the hint, complete in every literal.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from apsched.config import Caps, SolveOptions
from apsched.schedule.verify import verify
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import Ints, ProblemArrays
from apsched.solver.cpsat.model import ExactModel
from apsched.solver.cpsat.windows.splice import hint, spliced
from apsched.solver.cpsat.windows.subproblem import Window, WindowView
from apsched.solver.program.evaluate import evaluate, trace
from apsched.solver.program.program import COPY_OUT, LAUNCH, NODE, WAIT, Program
from apsched.solver.program.to_schedule import expand

MOST_FREE = 6
"""Collectives that one window decides again."""
_MOST_OPERATIONS = 400
_MOST_PINNED = 12

_MOST_WINDOWS = 2
"""Windows in a row that change nothing, after which the search stops."""


def windows(arrays: ProblemArrays, program: Program) -> Iterator[Window]:
    """Yield windows around the waits where the compute stream stalls, the longest first,
    without repeats.
    """
    waits, stalls = stalls_of(arrays, program)
    seen: set[tuple[int, ...]] = set()
    for i in waits[np.argsort(-stalls, kind="stable")]:
        window = _around(program, int(i))
        if window.free and window.free not in seen:
            seen.add(window.free)
            yield window


def stalls_of(arrays: ProblemArrays, program: Program) -> tuple[Ints, Ints]:
    """Return the waits of ``program``, and for how many ticks the compute stream stalls at
    each; less than none where it does not.
    """
    where = trace(arrays, program)
    waits = np.nonzero(program.operation == WAIT)[0]
    return waits, where.transfer_end_ticks[program.argument[waits]] - where.begin_ticks[waits]


def _around(program: Program, center: int) -> Window:
    """Return the largest window around an operation that frees at most MOST_FREE collectives; it
    grows towards the launch first.
    """
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
    for i, (operation, argument) in enumerate(
        zip(program.operation.tolist(), program.argument.tolist(), strict=True)
    ):
        if operation == NODE:
            continue
        b = int(bucket_of[argument]) if operation == COPY_OUT else argument
        first[b], last[b] = min(first[b], i), max(last[b], i)
    return first, last


def _inside(
    program: Program, first: int, past: int, launched: list[int], last: list[int]
) -> tuple[int, ...]:
    buckets = program.partition.buckets
    seen = {int(program.argument[i]) for i in range(first, past) if program.operation[i] == LAUNCH}
    return tuple(
        sorted(c for b in seen if first <= launched[b] and last[b] < past for c in buckets[b])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """The result of windows on a program."""

    program: Program
    deterministic_work: float


def improve(
    pricer: Pricer, caps: Caps, program: Program, options: SolveOptions, *, stop_at_ticks: int
) -> Improved:
    """Return ``program`` after windows that decide it again, one after the other, until none helps,
    the work is used up or the bound is met.

    None is decided where all stalls of the compute stream are within the slack.
    ``options.budget`` is the work for all windows together; one takes at most a tenth of it.
    """
    best, figures = program, evaluate(pricer.arrays, program)
    work, done = 0.0, set[tuple[int, ...]]()
    worth = int(figures.step_time_ticks * options.time_slack)
    while (
        figures.step_time_ticks > stop_at_ticks
        and np.maximum(stalls_of(pricer.arrays, best)[1], 0).sum() > worth
    ):
        window = next((w for w in windows(pricer.arrays, best) if w.free not in done), None)
        if window is None or work >= options.budget or len(done) >= _MOST_WINDOWS:
            break
        done.add(window.free)
        found, found_work = _decide(
            pricer, caps, best, window, replace(options, budget=options.budget / 10)
        )
        work += found_work
        if found is None:
            continue
        now = evaluate(pricer.arrays, found)
        if now.step_time_ticks < figures.step_time_ticks and _fits(pricer, caps, found):
            best, figures = found, now
            done.clear()
    return Improved(program=best, deterministic_work=work)


def _decide(
    pricer: Pricer, caps: Caps, program: Program, window: Window, options: SolveOptions
) -> tuple[Program | None, float]:
    """Return the program with ``window`` decided again (None if nothing was found), and the work
    done.
    """
    view = WindowView(pricer, caps, program, window)
    if len(view.pinned) > _MOST_PINNED:
        return None, 0.0
    model = ExactModel(view.instance, view.horizon_ticks, view.boundary)
    found = model.minimize_step_time(options, hint(view))
    return spliced(
        view, found.program
    ) if found.program is not None else None, found.deterministic_work


def _fits(pricer: Pricer, caps: Caps, program: Program) -> bool:
    """Whether ``program`` keeps every cap, prefetch included, by the independent check."""
    return not verify(pricer.problem, expand(pricer.instance, program), caps)
