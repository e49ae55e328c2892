"""Kept parameters where forward and backward are one graph: the choice for both apart is made in
that graph, and compared there with none kept and with all kept.
"""

from dataclasses import dataclass, replace

from apsched.config import Caps
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, resolve_caps, solve_graph, under_plan
from apsched.progress import Progress
from apsched.schedule.schedule import Schedule
from apsched.solver.bounds.whole_step import graph_bound
from apsched.whole_step.choices import ALL, NONE, Choice
from apsched.whole_step.improve import NEVER
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.pair import (
    Step,
    beside_each_other,
    exceeds,
    pair_of,
    parameters_of,
    priced_as,
    with_kept,
)
from apsched.whole_step.search import StepAnswer, grouped, solve_step

AS_APART = "as apart"
"""Name of the choice that is best for forward and backward apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointChoice:
    """One graph of forward and backward under one choice."""

    kept: Choice
    kept_bytes: int
    graph: LoadedGraph
    bound_ticks: int
    """No schedule of this graph is faster."""
    result: Result | None
    """``None`` where it is not solved, since the bound is no lower than the step time of another
    choice.
    """

    @property
    def fits(self) -> bool:
        """Whether a schedule within the caps is known."""
        return self.result is not None and self.result.best is not None

    @property
    def step_ticks(self) -> float:
        """The step time; infinite where no schedule is known."""
        best = self.result.best if self.result is not None else None
        return NEVER if best is None else best.step_time_ticks

    @property
    def peak_bytes(self) -> int:
        """The peak of the schedule; 0 where none is known."""
        best = self.result.best if self.result is not None else None
        return 0 if best is None else best.peak_memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JointAnswer:
    """The kept parameters of one graph of forward and backward, and its schedule."""

    best: JointChoice
    num_parameters: int
    """Gathered in both directions: kept or gathered again."""
    compared: dict[str, JointChoice]
    """The choices that were made in the graph, by name; empty where the choice is stated."""
    apart: StepAnswer | None = None
    """The answer for forward and backward apart; ``None`` where the choice is stated."""

    @property
    def result(self) -> Result:
        """The answer for the graph."""
        assert self.best.result is not None
        return self.best.result


def with_kept_in_joint(graph: LoadedGraph, kept: Choice) -> LoadedGraph:
    """Return ``graph``, one of forward and backward, with the parameters ``kept`` gathered once."""
    if not kept:
        return graph
    from apsched.capture.one_graph import joined  # torch, which graph files do without

    apart = with_kept(pair_of(graph.apart), kept)
    forward, backward = (half.captured for half in apart)
    assert forward is not None
    assert backward is not None
    (joint,) = beside_each_other(priced_as(graph, joined(forward, backward)))
    return replace(joint, apart=apart)


def solve_joint(
    graph: LoadedGraph, request: SolveRequest, keep: KeepRequest, progress: Progress
) -> JointAnswer:
    """Return ``graph``, one of forward and backward under the plan, solved with the parameters that
    ``keep`` requests. For ``auto`` forward and backward are solved apart first. The answer is never
    slower than with none kept, nor than with all kept if that fits.
    """
    if keep.mode == AUTO:
        return _best_choice(graph, request, progress)
    parameters = parameters_of(pair_of(graph.apart))
    chosen = keep.chosen([p.name for p in parameters])
    size = {p.name: p.size_bytes for p in parameters}
    made = _made(graph, chosen, request)
    result = solve_graph(made, request, progress)
    best = JointChoice(
        kept=chosen,
        kept_bytes=sum(size[name] for name in chosen),
        graph=made,
        bound_ticks=result.answer.bound_ticks,
        result=result,
    )
    return JointAnswer(best=best, num_parameters=len(parameters), compared={})


def _best_choice(graph: LoadedGraph, request: SolveRequest, progress: Progress) -> JointAnswer:
    # a gather in the node would depend on compute in one graph, and share no launch
    halves = under_plan([replace(half, nodes={}) for half in graph.apart], request)
    step = Step.of(halves, request, progress)
    apart = solve_step(step)
    floor = request.memory_cap is not None and request.memory_cap.above_floor
    capped = resolve_caps(_made(graph, step.always, request), request, progress) if floor else None
    compared: dict[str, JointChoice] = {}
    for name, kept in _choices(step, apart.best.kept).items():
        fastest = min((choice.step_ticks for choice in compared.values()), default=NEVER)
        made = _made(graph, kept, request)
        caps = capped or resolve_caps(made, request, progress)
        if name != ALL or not exceeds(made, caps):
            compared[name] = _solved(step, made, kept, caps, fastest)
    best = min(compared.values(), key=lambda choice: (choice.step_ticks, choice.peak_bytes))
    if not best.fits:
        best = compared[NONE] if NONE in compared else compared[AS_APART]
    return JointAnswer(
        best=best, num_parameters=len(step.parameters), compared=compared, apart=apart
    )


def _choices(step: Step, apart: Choice) -> dict[str, Choice]:
    """Return ``apart``, the best choice for forward and backward apart, and those of none and of
    all, by name; equal ones once.
    """
    others = {NONE: step.always, ALL: step.most}
    return {AS_APART: apart} | {name: kept for name, kept in others.items() if kept != apart}


def _made(graph: LoadedGraph, kept: Choice, request: SolveRequest) -> LoadedGraph:
    """Return ``graph`` with ``kept``, under the plan of ``request``."""
    made = with_kept_in_joint(graph, kept)
    if made is graph:
        return graph
    problem, without = request.posed(made.problem)
    return replace(made, problem=problem, without_bitwise=without)


def _solved(
    step: Step, graph: LoadedGraph, kept: Choice, caps: Caps, fastest_ticks: float
) -> JointChoice:
    """Return the choice ``kept`` in its ``graph``, solved unless its bound is no lower than
    ``fastest_ticks``.
    """
    size = sum(step.entry_bytes[name] for name in kept)
    bound_ticks, result = 0, None
    if fastest_ticks != NEVER:
        ways = {False, step.request.second_group}
        bound_ticks = min(graph_bound(grouped(graph.problem, way), caps) for way in ways)
    if bound_ticks < fastest_ticks:
        apart = _schedules_apart(step, kept)
        step.progress.note(f"one graph of both with {len(kept)} parameters kept")
        result = solve_graph(graph, step.request, step.progress, caps=caps, apart=apart)
        bound_ticks = result.answer.bound_ticks
    return JointChoice(
        kept=kept, kept_bytes=size, graph=graph, bound_ticks=bound_ticks, result=result
    )


def _schedules_apart(step: Step, kept: Choice) -> tuple[Schedule, ...]:
    """Return the schedules of forward and of backward alone with the choice ``kept``, if they were
    solved and use no second process group.
    """
    solved = step.solved.get(kept)
    if solved is None or step.request.second_group:
        return ()
    found = [result.best for result in solved.results]
    schedules = tuple(best.schedule for best in found if best is not None)
    return schedules if len(schedules) == len(found) else ()
