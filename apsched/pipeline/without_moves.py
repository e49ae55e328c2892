"""What moving compute gains: the same graph under the same caps, solved again with its compute as
captured.
"""

from dataclasses import fields, replace

from apsched.config import SolveOptions
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, solve_graph
from apsched.progress import Progress
from apsched.schedule.analysis.moved_compute import moved_compute
from apsched.schedule.result import Score

NAME = "compute as captured"


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
        note = f"{graph.problem.name}: no schedule with {NAME} keeps the caps"
        return replace(result, notes=(*result.notes, note))
    figures = {field.name: getattr(other.best, field.name) for field in fields(Score)}
    return replace(result, others=(*result.others, Score(**figures | {"name": NAME})))
