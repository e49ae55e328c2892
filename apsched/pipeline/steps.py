"""Steps after an answer (:mod:`apsched.pipeline.solve_graph`): torch's own schedulers as baselines,
the best schedule that moves no compute, and the FX graph in its order, with the round trip.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from apsched.config import SolveOptions
from apsched.errors import RoundTripError
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, solve_graph
from apsched.progress import Progress
from apsched.schedule.analysis.moved_compute import moved_compute
from apsched.schedule.result import Score, Scored
from apsched.schedule.simulate import simulate

if TYPE_CHECKING:
    import torch

    from apsched.writeback.round_trip import RoundTrip

COMPUTE_AS_CAPTURED = "compute as captured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """An FX graph in the order of a schedule."""

    module: "torch.fx.GraphModule"
    round_trip: "RoundTrip"
    seconds: float


def with_torch_schedulers(graph: LoadedGraph, result: Result, progress: Progress) -> Result:
    """Return ``result`` with torch's own schedulers among the baselines; without an FX graph a note
    says that it has none.
    """
    name = graph.problem.name
    if graph.captured is None:
        return replace(
            result,
            notes=(
                (
                    f"{name}: no inductor, which needs the FX graph; a graph file has none (compare"
                    " the source itself)"
                ),
            ),
        )
    from apsched.pipeline.inductor_baseline import torch_scores

    assert graph.cost_model is not None
    with progress.stage(f"inductor {name}"):
        found = torch_scores(
            graph.captured,
            graph.problem,
            graph.cost_model,
            result.caps,
            group_ranks=graph.group_ranks,
        )
    if graph.problem.rules:
        unplanned = ("it knows nothing of the plan",)
        found = replace(
            found,
            scores=tuple(
                replace(score, violations=(*score.violations, *unplanned)) for score in found.scores
            ),
        )
    return replace(
        result, others=found.scores, notes=found.notes, seconds={**result.seconds, **found.seconds}
    )


def with_compute_as_captured(
    graph: LoadedGraph, result: Result, options: SolveOptions, progress: Progress
) -> Result:
    """Return ``result`` with the best schedule that moves no compute beside it, where the solution
    does move some.
    """
    if result.schedule is None or not moved_compute(result.problem, result.schedule):
        return result
    other = solve_graph(
        replace(graph, without_bitwise=None),
        SolveRequest(options=options),
        progress,
        caps=replace(result.caps, max_compute_move=0),
    )
    if other.best is None:
        note = f"{graph.problem.name}: no schedule with {COMPUTE_AS_CAPTURED} keeps the caps"
        return replace(result, notes=(*result.notes, note))
    figures = {field.name: getattr(other.best, field.name) for field in fields(Score)}
    return replace(
        result, others=(*result.others, Score(**figures | {"name": COMPUTE_AS_CAPTURED}))
    )


def rewrite(graph: LoadedGraph, scored: Scored, progress: Progress) -> Rewritten:
    """Return the FX graph in the order of ``scored``, and whether it has the claimed figures."""
    from apsched.writeback.round_trip import round_trip, with_names_checked
    from apsched.writeback.write_back import write_back

    assert graph.captured is not None
    assert graph.cost_model is not None
    with progress.stage(f"write back {graph.problem.name}") as took:
        module = write_back(graph.captured.module, graph.problem, scored.schedule)
        claimed = simulate(graph.problem, scored.schedule)
        trip = round_trip(
            module,
            graph.captured,
            graph.cost_model,
            graph.group_ranks,
            claimed,
            graph.problem.contention,
        )
        trip = with_names_checked(trip, module, graph.problem, scored.schedule)
    return Rewritten(module=module, round_trip=trip, seconds=took["seconds"])


def with_round_trip(result: Result, rewritten: Rewritten) -> Result:
    """Return ``result`` with the round trip of its graph."""
    seconds = {**result.seconds, "write_back": rewritten.seconds}
    return replace(result, round_trip_exact=rewritten.round_trip.exact, seconds=seconds)


def check_round_trip(name: str, rewritten: Rewritten) -> None:
    """Raise RoundTripError if the rewritten graph ``name`` differs from the claim."""
    if not rewritten.round_trip.exact:
        raise RoundTripError(
            f"{name}: expected the rewritten graph, exported and simulated again, to have the"
            f" claimed figures; {rewritten.round_trip.difference}: it is not returned (a bug of"
            " apsched, unless the cost model prices the same node differently; report it with the"
            " graph file)"
        )
