"""The choice for a step under each of several memory caps."""

from collections.abc import Iterator, Sequence
from typing import overload

from apsched.quantities import MemoryCap
from apsched.whole_step.joint_graph.step import JointAnswer, JointStep
from apsched.whole_step.pair import Step
from apsched.whole_step.search import StepAnswer
from apsched.whole_step.solve import Answer, AnyStep, best_choice

Caps = Sequence[MemoryCap | None]


@overload
def answers_along_caps(step: Step, caps: Caps) -> Iterator[StepAnswer]: ...
@overload
def answers_along_caps(step: JointStep, caps: Caps) -> Iterator[JointAnswer]: ...
@overload
def answers_along_caps(step: AnyStep, caps: Caps) -> Iterator[Answer]: ...
def answers_along_caps(step: AnyStep, caps: Caps) -> Iterator[Answer]:
    """Yield the answer for ``step`` under each of ``caps``, which ascend; ``None`` is the memory of
    the device.

    Under each cap the choice under the cap before is solved, too.
    """
    before: Answer | None = None
    for cap in caps:
        step = step.with_cap(cap)
        if before is not None and before.best.fits:
            step.solve(before.best.kept)
        before = best_choice(step)
        yield before


def frontier(step: AnyStep, count: int) -> tuple[Answer, ...]:
    """Return the answers for ``step`` under ``count`` memory caps, evenly spaced from its least
    memory to the peak of the fastest step; equal caps once.
    """
    low, high = range_ends_bytes(step)
    sizes = {low + (max(high, low) - low) * k // (count - 1) for k in range(count)}
    caps = [MemoryCap(size_bytes=size) for size in sorted(sizes)]
    return tuple(answers_along_caps(step, caps))


def range_ends_bytes(step: AnyStep) -> tuple[int, int]:
    """Return the least memory of all graphs with only those parameters kept that rules of the plan
    keep, and the peak of the fastest step that is found without a memory cap.
    """
    free = step.with_cap(MemoryCap())
    peak_bytes = best_choice(free).best.peak_bytes
    return free.solve(free.always).least_bytes, peak_bytes
