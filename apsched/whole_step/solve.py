"""The graphs of a source solved by request: each alone, or forward and backward as one step."""

from collections.abc import Sequence
from dataclasses import replace

from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import JOINT, LoadedGraph, loaded
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, solve_graph, under_plan
from apsched.pipeline.sources import SourceRequest
from apsched.progress import Progress
from apsched.whole_step.accumulation import Accumulation
from apsched.whole_step.accumulation_search import AccumulationAnswer, solve_accumulation
from apsched.whole_step.choices import NONE
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.pair import Step, pair_of, parameters_of, with_kept
from apsched.whole_step.search import StepAnswer, solve_choice


def solve_graphs(
    graphs: Sequence[LoadedGraph], request: SolveRequest, keep: KeepRequest, progress: Progress
) -> tuple[tuple[LoadedGraph, ...], list[Result], StepAnswer | None]:
    """Return graphs, answers and the answer for the step; without a request for kept parameters
    each graph is solved alone, and there is none.

    ``graphs`` are under the plan of ``request`` already.
    """
    if keep.mode == NONE:
        return tuple(graphs), [solve_graph(graph, request, progress) for graph in graphs], None
    answer = solve_choice(Step.of(graphs, request, progress), keep)
    return answer.best.graphs, list(answer.best.results), answer


def solve_micro_batches(
    graphs: Sequence[LoadedGraph],
    num_micro_batches: int,
    request: SolveRequest,
    keep: KeepRequest,
    progress: Progress,
) -> tuple[tuple[LoadedGraph, ...], list[Result], AccumulationAnswer]:
    """Return graphs, answers and the answer for a step of several micro-batches in a row.

    ``graphs`` are under the plan of ``request`` already.
    """
    accumulation = Accumulation.of(Step.of(graphs, request, progress), num_micro_batches)
    answer = solve_accumulation(accumulation, keep)
    made = {graph.problem.name: graph for pair in answer.best.pairs for graph in pair.graphs}
    return tuple(made.values()), list(answer.best.results), answer


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
