"""The kept parameters under each of several memory caps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.solve_graph import SolveRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.whole_step.choices import Choice
from apsched.whole_step.pair import Graphs, Step
from apsched.whole_step.search import StepAnswer, solve_step


def answers_along_caps(
    graphs: Sequence[LoadedGraph],
    request: SolveRequest,
    caps: Sequence[MemoryCap | None],
    progress: Progress,
) -> Iterator[StepAnswer]:
    """Yield the answer for the step under each of ``caps``, which ascend; ``None`` is the memory
    of the device.

    ``graphs`` are under the plan of ``request`` already. Under each cap the choice of the cap
    before is tried, too: a looser cap keeps nothing that is slower.
    """
    made: dict[Choice, Graphs] = {}
    before: StepAnswer | None = None
    for cap in caps:
        step = Step.of(graphs, replace(request, memory_cap=cap), progress)
        step.made.update(made)
        if before is not None and before.best.fits:
            step.solve(before.best.kept)
        before = solve_step(step)
        yield before
        made.update(step.made)


def frontier(
    graphs: Sequence[LoadedGraph], request: SolveRequest, count: int, progress: Progress
) -> tuple[StepAnswer, ...]:
    """Return the answers for the step under ``count`` memory caps, evenly spaced from its least
    memory to the peak of the fastest step; equal caps once.

    ``graphs`` are under the plan of ``request`` already.
    """
    low, high = range_ends_bytes(graphs, request, progress)
    sizes = {low + (max(high, low) - low) * k // (count - 1) for k in range(count)}
    caps = [MemoryCap(size_bytes=size) for size in sorted(sizes)]
    return tuple(answers_along_caps(graphs, request, caps, progress))


def range_ends_bytes(
    graphs: Sequence[LoadedGraph], request: SolveRequest, progress: Progress
) -> tuple[int, int]:
    """Return the least memory of both graphs with only the parameters kept that rules of the plan
    keep, and the peak of the fastest step that is found without a memory cap.
    """
    step = Step.of(graphs, replace(request, memory_cap=MemoryCap()), progress)
    peak_bytes = solve_step(step).best.peak_bytes
    again = step.solve(step.always)
    return max(result.answer.floor_memory_bytes for result in again.results), peak_bytes
