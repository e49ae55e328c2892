"""The graphs of a source solved by request: each alone, or as one step of one or several
micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import JOINT, LoadedGraph, loaded
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, solve_graph, under_plan
from apsched.pipeline.sources import SourceRequest
from apsched.progress import Progress
from apsched.whole_step.accumulation.search import AccumulationAnswer, solve_accumulation
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.choices import NONE
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.pair import Step, may_keep, pair_of, parameters_of, with_kept
from apsched.whole_step.search import StepAnswer, solve_choice, solve_step

Answer = StepAnswer | AccumulationAnswer


@dataclass(frozen=True, kw_only=True)
class SolvedGraphs:
    """The solved graphs of a source; where they are one step also that step and its answer."""

    graphs: tuple[LoadedGraph, ...]
    results: tuple[Result, ...]
    step: Step | Accumulation | None = None
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
    if keep.mode == NONE or (by_default and not may_keep(graphs)):
        alone = tuple(solve_graph(graph, request, progress) for graph in graphs)
        return SolvedGraphs(graphs=tuple(graphs), results=alone)
    step = Step.of(graphs, request, progress)
    if num_micro_batches == 1:
        answer = solve_choice(step, keep)
        return SolvedGraphs(
            graphs=answer.best.graphs, results=answer.best.results, step=step, answer=answer
        )
    accumulation = Accumulation.of(step, num_micro_batches)
    several = solve_accumulation(accumulation, keep)
    return SolvedGraphs(
        graphs=several.best.graphs,
        results=several.best.results,
        step=accumulation,
        answer=several,
    )


@overload
def best_choice(step: Step) -> StepAnswer: ...
@overload
def best_choice(step: Accumulation) -> AccumulationAnswer: ...
def best_choice(step: Step | Accumulation) -> Answer:
    """Return the answer for ``step`` with the fastest choice found."""
    if isinstance(step, Accumulation):
        return solve_accumulation(step, KeepRequest(mode=AUTO))
    return solve_step(step)


def step_apart(
    source: SourceRequest,
    costs: CostChoice,
    direction: str,
    request: SolveRequest,
    keep: KeepRequest,
    progress: Progress,
) -> StepAnswer | None:
    """Return the answer for forward and backward apart where one graph of both is wanted with
    parameters kept that are not chosen yet, else ``None``. It reshards no parameter in its node,
    which one graph of both cannot.
    """
    if direction != JOINT or keep.mode != AUTO:
        return None
    with loaded(source, costs, "both", progress) as opened:
        graphs = [replace(g, nodes={}) for g in under_plan(opened.graphs, request)]
        return solve_choice(Step.of(graphs, request, progress), keep)


def graphs_with(graphs: Sequence[LoadedGraph], keep: KeepRequest) -> tuple[LoadedGraph, ...]:
    """Return ``graphs`` with the requested parameters kept; ``auto`` keeps none here."""
    if keep.mode == NONE:
        return tuple(graphs)
    pair = pair_of(graphs)
    return with_kept(pair, keep.chosen([entry for p in parameters_of(pair) for entry in p.entries]))
