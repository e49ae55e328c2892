"""The files of solved graphs: graph, schedule and rewritten module, and schedules that are applied
again.
"""

from dataclasses import replace
from typing import Any

from apsched.artifacts.replay import replay
from apsched.artifacts.schedule_file import ScheduleFile, dump_schedule
from apsched.errors import ApschedError, RoundTripError
from apsched.graph.graph_file import to_bytes
from apsched.pipeline.load import LoadedGraph, LoadedSource
from apsched.pipeline.result import Result
from apsched.pipeline.steps import check_round_trip, rewrite, with_round_trip
from apsched.progress import Progress
from apsched.units import ticks_to_us


def add_files(
    graph: LoadedGraph,
    result: Result,
    files: dict[str, bytes],
    lost: list[ApschedError],
    progress: Progress,
) -> Result:
    """Write the schedule back where there is an FX graph, check the round trip, and add the graph's
    files to ``files``.

    If the rewritten module cannot be made, or differs from the claim, the error is added to
    ``lost``; graph and schedule are written nevertheless.
    """
    name = graph.problem.name
    files[f"{name}.graph"] = to_bytes(graph.dag)
    files[f"{name}.schedule.json"] = dump_schedule(result)
    if graph.captured is None:
        return result
    from apsched.artifacts.module_file import dump_module

    assert result.best is not None
    try:
        rewritten = rewrite(replace(graph, problem=result.problem), result.best, progress)
        result = with_round_trip(result, rewritten)
        check_round_trip(name, rewritten)
        files[f"{name}.py"] = dump_module(rewritten.module, name)
    except RoundTripError as error:
        lost.append(error)
    except Exception as error:  # whatever it is, the answer is found, and its schedule is a file
        lost.append(_lost_module(name, error))
    return result


def _lost_module(name: str, error: Exception) -> ApschedError:
    """Return the error of a rewritten module that cannot be made."""
    cause = (
        str(error)
        if isinstance(error, ApschedError)
        else f"unexpected {type(error).__name__}: {error} (a bug of apsched)"
    )
    lost = ApschedError(
        f"{name}.py: the rewritten module cannot be written: {cause}; the schedule is in"
        f" {name}.schedule.json"
    )
    lost.__cause__ = error
    return lost


def apply_one(
    graph: LoadedGraph, file: ScheduleFile, files: dict[str, bytes], progress: Progress
) -> dict[str, Any]:
    """Replay ``file`` on ``graph``; adds the rewritten module to ``files`` and returns the figures.

    ``RoundTripError`` if the rewritten module differs from the claim.
    """
    graph = replace(graph, problem=file.problem_of(graph.problem))
    scored = replay(graph.problem, file)
    exact = None
    if graph.captured is not None:
        from apsched.artifacts.module_file import dump_module

        rewritten = rewrite(graph, scored, progress)
        check_round_trip(graph.problem.name, rewritten)
        exact = True
        files[f"{graph.problem.name}.py"] = dump_module(rewritten.module, graph.problem.name)
    return {
        "name": graph.problem.name,
        "graph_hash": graph.problem.graph_hash,
        "schedule": file.path,
        "step_time_us": ticks_to_us(scored.step_time_ticks),
        "exposed_us": ticks_to_us(scored.exposed_ticks),
        "peak_memory_bytes": scored.peak_memory_bytes,
        "num_launches": scored.num_launches,
        "round_trip_exact": exact,
    }


def graph_of(file: ScheduleFile, source: LoadedSource) -> LoadedGraph:
    """Return the graph of ``file``: by its hash, else by its name (the replay then reports the
    difference).
    """
    by_hash = [graph for graph in source.graphs if graph.problem.graph_hash == file.graph["hash"]]
    by_name = [graph for graph in source.graphs if graph.problem.name == file.graph["name"]]
    return (by_hash or by_name or list(source.graphs))[0]
