"""Gradients of several micro-batches in one graph: reduced once or each, whichever is faster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import LoadedGraph, loaded
from apsched.pipeline.solve_graph import SolveRequest, solve_graph, under_plan
from apsched.pipeline.sources import REDUCE_AUTO, SourceRequest
from apsched.progress import Progress
from apsched.units import ticks_to_us

_FORMS = "once", "each"


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterReduction:
    """The faster form, and the step times of both."""

    reduce: str
    step_us: dict[str, float | None]
    """Of each form, the step time of all graphs that reduce; ``None`` where no schedule fits."""

    def note(self) -> str:
        """Return the choice in a sentence."""
        said = (
            f"{form} {'does not fit' if us is None else f'takes {us / 1000:.2f} ms'}"
            for form, us in self.step_us.items()
        )
        return f"reduce: {self.reduce} ({', '.join(said)})"


Where = tuple[SourceRequest, CostChoice, str]
"""A source, its costs, and the direction that is wanted."""
Completed = Callable[[SolveRequest, Sequence[LoadedGraph]], SolveRequest]
"""A request with the parts that depend on the graphs, such as buckets of the user's own."""


def with_faster_reduction(
    where: Where,
    request: SolveRequest,
    progress: Progress,
    completed: Completed = lambda request, graphs: request,
) -> tuple[Where, FasterReduction | None]:
    """Return ``where`` with the form of reduction that is faster, where that is left open.

    Each form is captured and solved under ``request``, ``completed`` for its graphs, with no
    parameter kept. Among equals, and where none fits, gradients are reduced once.
    """
    source, costs, direction = where
    if source.reduce != REDUCE_AUTO or (source.num_micro_batches or 1) == 1:
        return where, None
    if direction == "forward":  # which reduces nothing
        return (replace(source, reduce=_FORMS[0]), costs, direction), None
    step_us = {}
    for form in _FORMS:
        with progress.within(f"try --reduce {form}"):
            other = replace(source, reduce=form), costs, direction
            step_us[form] = _step_us(other, request, progress, completed)
    fitting = [form for form in _FORMS if step_us[form] is not None]
    best = min(fitting, key=lambda form: step_us[form] or 0.0, default=_FORMS[0])
    found = FasterReduction(reduce=best, step_us=step_us)
    progress.note(found.note())
    return (replace(source, reduce=best), costs, direction), found


def _step_us(
    where: Where, request: SolveRequest, progress: Progress, completed: Completed
) -> float | None:
    """Return the step time of all graphs that reduce gradients."""
    total_us = 0.0
    with loaded(*where, progress) as opened:
        request = completed(request, opened.graphs)
        for graph in under_plan(opened.graphs, request):
            if graph.problem.name.partition("-")[0] == "forward":
                continue
            best = solve_graph(graph, request, progress).best
            if best is None:
                return None
            total_us += ticks_to_us(best.step_time_ticks)
    return total_us
