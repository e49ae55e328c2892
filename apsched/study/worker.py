"""The work of a worker: one question about one graph. Knows no torch; gets bytes and plain records,
so that it can run on any machine.
"""

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import networkx as nx

from apsched.artifacts.schedule_file import bind_schedule, dump_schedule, parse_schedule
from apsched.costs.clusters.cluster import Cluster
from apsched.graph.graph_file import from_bytes
from apsched.pipeline.device_memory import BesideGraph
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, resolve_caps, solve_graph
from apsched.problem.build import build_problem
from apsched.problem.contention_spec import ContentionChoice, contended
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
    request: SolveRequest
    device_memory_bytes: int | None
    beside: BesideGraph | None
    """The memory of the device outside of the graph; ``None`` if it is not known."""
    beside_bytes: int
    """Alive beside the graph all the time, and counted in its caps and peaks: shards of kept
    parameters, gradients of the micro-batches before.
    """
    contention: ContentionChoice
    cluster: Cluster | None
    """Determines the strength of the stated contention; ``None`` if there is none."""
    apart: tuple[tuple[bytes, tuple[int, ...]], ...] = ()
    """Of one graph of forward and backward: contents of the graph files of both, each with its
    places (:attr:`apsched.pipeline.load.LoadedGraph.places`).
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
    """The graph as ``apsched solve --json`` has it, and the shares of the critical path."""
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


def solve_point(question: Question, memory_cap: MemoryCap | None) -> Outcome:
    """Return the answer of the solver; ``None`` is the device's memory."""
    began = time.perf_counter()
    if memory_cap is not None and not memory_cap.above_floor:
        memory_cap = MemoryCap(size_bytes=_inside(memory_cap.size_bytes, question))
    request = replace(question.request, memory_cap=memory_cap)
    result = solve_graph(_graph(question), request, Progress(quiet=True))
    return _outcome(result, SOLVED, began, question.beside_bytes)


def _inside(cap_bytes: int | None, question: Question) -> int | None:
    """Return the part of a memory cap for the graph itself."""
    return None if cap_bytes is None else max(cap_bytes - question.beside_bytes, 0)


def point_along_caps(
    question: Question, memory_cap_bytes: int | None, starts: tuple[bytes, ...], known: Known
) -> Outcome:
    """Return the answer under a cap that at least one of ``starts``, contents of schedule files,
    keeps.
    """
    began = time.perf_counter()
    along = _along(question)
    schedules = tuple(_schedule(question, start) for start in starts)
    cap_bytes = _inside(memory_cap_bytes, question)
    known = replace(
        known,
        floor_memory_bytes=known.floor_memory_bytes - question.beside_bytes,
        floor_bound_bytes=max(known.floor_bound_bytes - question.beside_bytes, 0),
    )
    request = replace(question.request, memory_cap=MemoryCap(size_bytes=cap_bytes))
    result = solve_graph(
        _graph(question),
        request,
        Progress(quiet=True),
        search=lambda _, caps, __: along.at(caps.memory_cap_bytes, schedules, known),
    )
    return _outcome(result, ALONG, began, question.beside_bytes)


def _outcome(result: Result, how: str, began: float, beside_bytes: int) -> Outcome:
    """Return the saved part of ``result``; the graph's bytes with the ``beside_bytes`` that are
    alive all the time.
    """
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
    best, answer, cap_bytes = result.best, result.answer, result.caps.memory_cap_bytes
    peak_bytes = best.peak_memory_bytes + beside_bytes if best else None
    floor_bytes = answer.floor_memory_bytes + beside_bytes
    return Outcome(
        status=answer.status,
        how=how,
        memory_cap_bytes=None if cap_bytes is None else cap_bytes + beside_bytes,
        step_ticks=best.step_time_ticks if best else None,
        bound_ticks=answer.bound_ticks,
        bound_source=answer.bound_source,
        peak_memory_bytes=peak_bytes,
        num_launches=best.num_launches if best else None,
        floor_memory_bytes=floor_bytes,
        floor_bound_bytes=answer.floor_bound_bytes + beside_bytes,
        report=report,
        solved_floor_bytes=floor_bytes,
        solved_peak_bytes=peak_bytes,
        schedule=dump_schedule(result) if best else None,
        seconds=time.perf_counter() - began,
    )


def better_of(known: Outcome, new: Outcome) -> Outcome:
    """Return the better of both; ``known`` itself where ``new`` adds nothing. A bound from either
    holds for both.
    """
    best = known if known.value[:4] <= new.value[:4] else new
    if best.status == Status.INFEASIBLE:
        return best
    assert best.step_ticks is not None
    higher = max(known, new, key=lambda outcome: outcome.bound_ticks)
    if higher.bound_ticks > best.bound_ticks:
        bound_ticks = min(higher.bound_ticks, best.step_ticks)
        status = Status.OPTIMAL if bound_ticks == best.step_ticks else best.status
        gap = (best.step_ticks - bound_ticks) / best.step_ticks if best.step_ticks else 0.0
        report = {**best.report, "bound_us": ticks_to_us(bound_ticks), "gap": gap, "status": status}
        best = replace(
            best,
            bound_ticks=bound_ticks,
            bound_source=higher.bound_source,
            status=status,
            report=report,
        )
    solve = next((outcome for outcome in (known, new) if outcome.how != ALONG), None)
    if solve is None or best.how != ALONG:
        return best
    return replace(
        best,
        how=BETTERED,
        solved_floor_bytes=solve.solved_floor_bytes,
        solved_peak_bytes=solve.solved_peak_bytes,
    )


@lru_cache(maxsize=6)
def _loaded(
    content: bytes, request: SolveRequest, contention: ContentionChoice, cluster: Cluster | None
) -> tuple[nx.DiGraph, Problem]:
    dag = from_bytes(content)
    problem = contended(build_problem(dag), contention, cluster, dag.graph["group_ranks"])
    return dag, request.posed(problem)[0]


def _graph(question: Question) -> LoadedGraph:
    q = question
    (dag, problem), *apart = (
        _loaded(content, q.request, q.contention, q.cluster)
        for content in (q.graph, *(content for content, _ in q.apart))
    )
    graph = LoadedGraph(
        dag=dag, problem=problem, device_memory_bytes=q.device_memory_bytes, beside=q.beside
    )
    halves = zip(apart, q.apart, strict=True)
    return replace(
        graph,
        apart=tuple(
            replace(graph, dag=dag, problem=problem, places=places)
            for (dag, problem), (_, places) in halves
        ),
    )


@lru_cache(maxsize=2)
def _along(question: Question) -> AlongCaps:
    graph = _graph(question)
    unlimited = replace(question.request, memory_cap=MemoryCap())
    caps = resolve_caps(graph, unlimited, Progress(quiet=True))
    return AlongCaps(graph.problem, caps, question.request.options)


@lru_cache(maxsize=64)
def _schedule(question: Question, content: bytes) -> Schedule:
    return bind_schedule(
        parse_schedule(content, "a schedule of this study"), _graph(question).problem
    )
