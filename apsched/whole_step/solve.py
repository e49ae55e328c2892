"""The graphs of a source solved by request: each alone, as one step of one or several
micro-batches, or as one graph of forward and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, solve_each
from apsched.progress import Progress
from apsched.whole_step.accumulation.search import AccumulationAnswer, solve_accumulation
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.choices import NONE
from apsched.whole_step.joint_graph.step import (
    JointAnswer,
    JointStep,
    solve_joint,
    solve_stated,
    with_kept_in_joint,
)
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.pair import Step, may_keep, pair_of, parameters_of, with_kept
from apsched.whole_step.search import StepAnswer, solve_choice, solve_step

AnyStep = Step | Accumulation | JointStep
Answer = StepAnswer | AccumulationAnswer | JointAnswer


@dataclass(frozen=True, kw_only=True)
class SolvedGraphs:
    """The solved graphs of a source; where they are one step also that step and its answer."""

    graphs: tuple[LoadedGraph, ...]
    results: tuple[Result, ...]
    step: AnyStep | None = None
    """``None`` for one graph of forward and backward whose choice is stated, too."""
    answer: Answer | None = None


def solve_graphs(
    graphs: Sequence[LoadedGraph],
    request: SolveRequest,
    keep: KeepRequest,
    progress: Progress,
    num_micro_batches: int = 1,
) -> SolvedGraphs:
    """Return all graphs solved: each alone without a request for kept parameters, else as one step,
    of ``num_micro_batches`` in a row. The default is one step where ``graphs`` have a choice.

    ``graphs`` are under the plan of ``request`` already.
    """
    by_default = keep.is_default and not request.plan.decides_kept
    apart = _apart(graphs)
    if keep.mode == NONE or (by_default and not may_keep(apart or graphs)):
        alone = solve_each(graphs, request, progress)
        return SolvedGraphs(graphs=tuple(graphs), results=alone)
    if apart:
        return _solved_joint(graphs[0], request, keep, progress)
    step = Step.of(graphs, request, progress)
    if num_micro_batches == 1:
        return _solved_step(step, solve_choice(step, keep))
    accumulation = Accumulation.of(step, num_micro_batches)
    return _solved_step(accumulation, solve_accumulation(accumulation, keep))


def _solved_joint(
    graph: LoadedGraph, request: SolveRequest, keep: KeepRequest, progress: Progress
) -> SolvedGraphs:
    """Return ``graph``, one of forward and backward, solved as ``keep`` requests."""
    step = JointStep.of(graph, request, progress) if keep.mode == AUTO else None
    answer = solve_stated(graph, request, keep, progress) if step is None else solve_joint(step)
    return _solved_step(step, answer)


def _solved_step(step: AnyStep | None, answer: Answer) -> SolvedGraphs:
    return SolvedGraphs(
        graphs=answer.best.graphs, results=answer.best.results, step=step, answer=answer
    )


@overload
def best_choice(step: Step) -> StepAnswer: ...
@overload
def best_choice(step: Accumulation) -> AccumulationAnswer: ...
@overload
def best_choice(step: JointStep) -> JointAnswer: ...
@overload
def best_choice(step: AnyStep) -> Answer: ...
def best_choice(step: AnyStep) -> Answer:
    """Return the answer for ``step`` with the fastest choice found."""
    if isinstance(step, Accumulation):
        return solve_accumulation(step, KeepRequest(mode=AUTO))
    if isinstance(step, JointStep):
        return solve_joint(step)
    return solve_step(step)


def graphs_with(graphs: Sequence[LoadedGraph], keep: KeepRequest) -> tuple[LoadedGraph, ...]:
    """Return ``graphs`` with the requested parameters kept; ``auto`` keeps none here."""
    if keep.mode == NONE:
        return tuple(graphs)
    apart = _apart(graphs)
    pair = pair_of(apart or graphs)
    chosen = keep.chosen([entry for p in parameters_of(pair) for entry in p.entries])
    return (with_kept_in_joint(graphs[0], chosen),) if apart else with_kept(pair, chosen)


def _apart(graphs: Sequence[LoadedGraph]) -> tuple[LoadedGraph, ...]:
    """Return forward and backward apart if ``graphs`` are one graph that was made of them, else
    nothing.
    """
    return graphs[0].apart if len(graphs) == 1 else ()
