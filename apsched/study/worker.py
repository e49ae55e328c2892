"""What a worker does: one question about one graph. Knows no torch; gets bytes and plain records,
so that it can run on any machine.
"""

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import networkx as nx

from apsched.artifacts.schedule_file import bind_schedule, dump_schedule, parse_schedule
from apsched.config import Caps, SolveOptions
from apsched.costs.clusters.cluster import Cluster
from apsched.graph.graph_file import from_bytes
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result, result_of
from apsched.pipeline.steps import check_answer, resolve_caps, solve_graph
from apsched.problem.build import build_problem
from apsched.problem.contention_spec import ContentionChoice, contended
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.report.binding import shares
from apsched.report.summary import graph_json
from apsched.schedule.result import Status
from apsched.schedule.schedule import Schedule
from apsched.solver import AlongCaps, Known
from apsched.units import ticks_to_us

SOLVED = "solved"
ALONG = "along caps"
"""Found from the answers under other caps."""
BETTERED = "solved, and bettered by another cap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A graph and all options but the memory cap."""

    graph: bytes
    """Content of the graph file."""
    caps: Caps
    device_memory_bytes: int | None
    options: SolveOptions
    plan: Plan
    bitwise: bool
    contention: ContentionChoice
    cluster: Cluster | None
    """Says how strong the contention is that is asked for; ``None`` where nothing has to be
    known.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to one question, ready to be kept."""

    status: Status
    how: str
    """:data:`SOLVED`, :data:`ALONG` or :data:`BETTERED`."""
    memory_cap_bytes: int | None
    step_ticks: int | None
    bound_ticks: int
    bound_source: str
    peak_memory_bytes: int | None
    num_launches: int | None
    floor_memory_bytes: int
    floor_bound_bytes: int
    report: dict[str, Any]
    """What ``--json`` of ``apsched solve`` says about a graph, and the shares of the critical
    path.
    """
    solved_floor_bytes: int
    """The floor as the solve under this cap had it, whatever is known since: ranges of caps start
    there ...
    """
    solved_peak_bytes: int | None
    """... and end at the peak of the schedule that it found."""
    schedule: bytes | None
    """Content of the schedule file."""
    seconds: float
    """That this took, reading and checking included."""

    @property
    def value(self) -> tuple[bool, int, int, int, int]:
        """The lower the better: feasible, step time, peak, launches, and the higher the bound."""
        return (
            self.step_ticks is None,
            self.step_ticks or 0,
            self.peak_memory_bytes or 0,
            self.num_launches or 0,
            -self.bound_ticks,
        )


def solve_point(asked: Question, memory_cap: MemoryCap | None) -> Outcome:
    """Return the answer of the solver; ``None`` is the device's memory."""
    began = time.perf_counter()
    graph = _graph(asked)
    progress = Progress(quiet=True)
    caps = resolve_caps(graph, asked.caps, memory_cap, progress, asked.options)
    return _outcome(solve_graph(graph, caps, asked.options, progress), SOLVED, began)


def point_along_caps(
    asked: Question, memory_cap_bytes: int | None, starts: tuple[bytes, ...], known: Known
) -> Outcome:
    """Return the answer under a cap that at least one of ``starts``, contents of schedule files,
    keeps.
    """
    began = time.perf_counter()
    graph, along = _graph(asked), _along(asked)
    schedules = tuple(_schedule(asked, start) for start in starts)
    answer = along.at(memory_cap_bytes, schedules, known)
    caps = replace(asked.caps, memory_cap_bytes=memory_cap_bytes)
    result = result_of(graph.problem, caps, answer, cluster=graph.dag.graph["cluster"], seconds={})
    check_answer(result)
    return _outcome(result, ALONG, began)


def _outcome(result: Result, how: str, began: float) -> Outcome:
    report = {key: value for key, value in graph_json(result).items() if key != "seconds"}
    if result.path is not None:
        report["shares"] = [
            {
                "label": share.label,
                "us": ticks_to_us(share.ticks),
                "exposed_us": ticks_to_us(share.exposed_ticks),
            }
            for share in shares(result)
        ]
    best, answer = result.best, result.answer
    return Outcome(
        status=answer.status,
        how=how,
        memory_cap_bytes=result.caps.memory_cap_bytes,
        step_ticks=best.step_time_ticks if best else None,
        bound_ticks=answer.bound_ticks,
        bound_source=answer.bound_source,
        peak_memory_bytes=best.peak_memory_bytes if best else None,
        num_launches=best.num_launches if best else None,
        floor_memory_bytes=answer.floor_memory_bytes,
        floor_bound_bytes=answer.floor_bound_bytes,
        report=report,
        solved_floor_bytes=answer.floor_memory_bytes,
        solved_peak_bytes=best.peak_memory_bytes if best else None,
        schedule=dump_schedule(result) if best else None,
        seconds=time.perf_counter() - began,
    )


@lru_cache(maxsize=4)
def _loaded(
    content: bytes, plan: Plan, bitwise: bool, contention: ContentionChoice, cluster: Cluster | None
) -> tuple[nx.DiGraph, Problem]:
    dag = from_bytes(content)
    problem = contended(build_problem(dag), contention, cluster, dag.graph["group_ranks"])
    return dag, restricted(problem, plan, bitwise=bitwise)


def _graph(asked: Question) -> LoadedGraph:
    dag, problem = _loaded(asked.graph, asked.plan, asked.bitwise, asked.contention, asked.cluster)
    return LoadedGraph(dag=dag, problem=problem, device_memory_bytes=asked.device_memory_bytes)


@lru_cache(maxsize=2)
def _along(asked: Question) -> AlongCaps:
    problem = _graph(asked).problem
    return AlongCaps(problem, asked.caps, asked.options)


@lru_cache(maxsize=64)
def _schedule(asked: Question, content: bytes) -> Schedule:
    return bind_schedule(parse_schedule(content, "a schedule of this study"), _graph(asked).problem)
