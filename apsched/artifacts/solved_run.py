"""The directory that ``apsched solve -o DIR`` wrote, read back without torch: graphs, schedules,
and the answers as they were given.

Figures are not taken on trust: each schedule is replayed on its graph, and has to have the step
time, the peak and the launches claimed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from apsched.artifacts.replay import replay
from apsched.artifacts.schedule_file import ScheduleFile, load_schedule
from apsched.atomic_files import digest, one_component
from apsched.errors import InputError
from apsched.graph.graph_file import load_graph
from apsched.pipeline.assumptions import assumptions_of
from apsched.pipeline.device_memory import account_of_json
from apsched.pipeline.result import BitwisePrice, Result, result_of
from apsched.problem.build import build_problem
from apsched.problem.contention import Contention
from apsched.problem.problem import Problem, with_contention
from apsched.schedule.result import AS_CAPTURED, Score, Scored, SolveResult, TradeOff
from apsched.schedule.schedule import Schedule, as_captured
from apsched.schedule.simulate import simulate
from apsched.units import us_to_ticks

RESULT_FILE = "result.json"
MODEL = "model "
"""Before the class of a model that was solved in Python, in place of the SOURCE of a command."""
_SCHEMA = 1
_FINEST = 10_000
OTHER_SHAPE = (LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors of reading a result file whose content is not that of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedGraph:
    """One graph of a run: the answer, and the order that it had before."""

    result: Result
    captured: Problem
    """The problem as captured; that of the answer has more groups where gathers run on groups of
    their own.
    """
    before: Schedule
    """As captured."""
    versions: Mapping[str, str]
    """Of the packages that solved it."""
    graph_id: str
    """Digest of the graph file, costs included, as studies name graphs."""
    schedule_path: Path
    source: str = ""
    """The SOURCE as stated."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Flag -> value as stated when it was solved (:mod:`apsched.artifacts.stated_options`); empty
    where that is not known.
    """
    kept_tensors: tuple[str, ...] = ()
    """Nodes whose values are kept gathered: outputs of a graph, inputs of the next."""
    title: str = ""
    """Label that distinguishes it from other answers about a graph of the same name; empty for the
    graph's name.
    """
    of_study: bool = False
    """No file beside its schedule has the choice of kept parameters."""
    is_made_again: bool = True
    """Whether ``apsched solve`` with these options finds the same schedule."""

    @property
    def after(self) -> Schedule:
        """The schedule found."""
        assert self.result.schedule is not None
        return self.result.schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedRun:
    """The content of a directory."""

    path: Path
    source: str
    cluster: str
    graphs: tuple[SolvedGraph, ...]
    keep: Mapping[str, Any] | None = None
    """The parameters kept from forward to backward, as in ``--json``; ``None`` if each graph was
    solved alone.
    """
    accumulate: Mapping[str, Any] | None = None
    """The step of several micro-batches in a row, as in ``--json``."""
    joint: Mapping[str, Any] | None = None
    """The parameters kept in one graph of forward and backward, as in ``--json``."""
    apart: Mapping[str, Any] | None = None
    """Beside ``joint``: the step of forward and backward apart, as ``keep``; ``None`` where the
    choice was stated.
    """


def load_run(path: str | Path) -> SolvedRun:
    """Return the run that ``apsched solve`` wrote to the directory ``path``; ``InputError`` names a
    missing file, or files that do not fit together.
    """
    path = Path(path)
    if path.name == RESULT_FILE:
        path = path.parent
    file = path / RESULT_FILE
    try:
        report = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(
            f"{path}: expected a directory that `apsched solve -o DIR` wrote, found no readable"
            f" {RESULT_FILE} ({error.strerror or error})"
        ) from None
    except ValueError as error:
        raise InputError(f"{file}: expected JSON, found {error}; solve again") from None
    if (
        not isinstance(report, dict)
        or report.get("schema") != _SCHEMA
        or not isinstance(report.get("graphs"), list)
    ):
        raise InputError(
            f"{file}: expected a file of `apsched solve` (schema {_SCHEMA}), found something"
            " else; solve again"
        )
    try:
        options = dict(report.get("options", {}).items())
        source = str(report["source"])
        keep, joint = report.get("keep"), report.get("keep_joint")
        tensors = (keep or joint or report.get("accumulate") or {}).get("tensors", {})
        graphs = tuple(
            replace(
                _load_graph(path, entry),
                source=source,
                options=options,
                kept_tensors=tuple(tensors.get(entry["name"], ())),
            )
            for entry in report["graphs"]
        )
        cluster = str(report["cluster"])
        return SolvedRun(
            path=path,
            source=source,
            cluster=cluster,
            graphs=graphs,
            keep=keep,
            accumulate=report.get("accumulate"),
            joint=joint,
            apart=report.get("keep_apart"),
        )
    except OTHER_SHAPE as error:
        raise other_answers(path, error) from None


def other_answers(path: Path, error: Exception) -> InputError:
    """Return the error for a result file in ``path`` that has other content than this version
    writes, where ``error`` came of reading it.
    """
    missing = f"no {error}" if isinstance(error, KeyError) else str(error)
    return InputError(
        f"{path / RESULT_FILE}: expected the answers of this version of apsched, found {missing};"
        " solve again"
    )


def _load_graph(path: Path, entry: Mapping[str, Any]) -> SolvedGraph:
    name = one_component(str(entry["name"]), f"{path / RESULT_FILE}: name of a graph")
    if entry["step_time_us"] is None:
        raise InputError(
            f"{path}: no schedule fits {name}, so there is nothing to show; `apsched explain` gives"
            " the reason"
        )
    return solved_graph(path, f"{name}.graph", f"{name}.schedule.json", entry)


def solved_graph(
    path: Path, graph_file: str, schedule_file: str, entry: Mapping[str, Any]
) -> SolvedGraph:
    """Return a graph and its answer from files in ``path``; ``entry`` is its part of ``--json``.
    Everything is checked.
    """
    dag = load_graph(path / graph_file)
    file = load_schedule(path / schedule_file)
    captured = build_problem(dag)
    problem = file.problem_of(captured)
    if entry.get("contention"):
        problem, captured = (
            with_contention(p, _contention(entry["contention"], p.streams))
            for p in (problem, captured)
        )
    best = replace(replay(problem, file), name="apsched")
    _check_figures(path, graph_file, schedule_file, best, entry)
    problem = replace(problem, rules=tuple(entry.get("plan", {}).get("rules", ())))
    before = as_captured(problem.num_nodes)
    answer = _answer(captured, best, before, file, entry)
    result = result_of(
        problem,
        file.caps,
        answer,
        cluster=str(file.costs.get("cluster", "")),
        seconds=entry.get("seconds", {}),
    )
    others = tuple(
        _score(other, says) for other, says in entry["baselines"].items() if other != AS_CAPTURED
    )
    price = entry.get("bitwise")
    account = entry.get("device_memory")
    return SolvedGraph(
        result=replace(
            result,
            others=others,
            round_trip_exact=entry["round_trip_exact"],
            cost_shares=dict(entry["costs"]),
            account=account_of_json(account) if account else None,
            assumptions=assumptions_of(dag, problem, result.schedule, result.timeline),
            bitwise=(
                BitwisePrice(step_time_us=price["step_time_us"], cost_us=price["cost_us"])
                if price
                else None
            ),
        ),
        captured=captured,
        before=before,
        versions=file.versions,
        graph_id=digest((path / graph_file).read_bytes()),
        schedule_path=path / schedule_file,
    )


def _check_figures(
    path: Path, graph_file: str, schedule_file: str, best: Scored, entry: Mapping[str, Any]
) -> None:
    found = (best.step_time_ticks, best.peak_memory_bytes, best.num_launches)
    claimed = (
        us_to_ticks(entry["step_time_us"]),
        entry["peak_memory_bytes"],
        entry["num_launches"],
    )
    if found != claimed:
        raise InputError(
            f"{path}: expected files of one run, found a {schedule_file} that gives {found} (step"
            f" ticks, peak bytes, launches) on {graph_file} where the saved answer has {claimed};"
            " solve again"
        )


def _answer(
    problem: Problem, best: Scored, before: Schedule, file: ScheduleFile, entry: Mapping[str, Any]
) -> SolveResult:
    """Return the answer as ``entry`` states it; of the baselines only the order as captured is a
    schedule in these files.
    """
    timeline = simulate(problem, before)
    captured = entry["baselines"].get(AS_CAPTURED, {})
    first = Scored(
        name=AS_CAPTURED,
        schedule=before,
        step_time_ticks=timeline.step_time_ticks,
        exposed_ticks=timeline.exposed_ticks,
        peak_memory_bytes=timeline.peak_memory_bytes,
        num_launches=timeline.num_launches,
        violations=tuple(captured.get("violations", ())),
    )
    return SolveResult.found(
        best,
        bound_ticks=us_to_ticks(entry["bound_us"]),
        bound_source=entry["bound_source"],
        baselines=(first,),
        floor_memory_bytes=entry["floor_memory_bytes"],
        floor_bound_bytes=entry["floor_bound_bytes"],
        fastest_ticks=us_to_ticks(entry["fastest_us"]),
        time_limit_ticks=us_to_ticks(entry["time_limit_us"]),
        peak_bound_bytes=entry["peak_bound_bytes"],
        launches_bound=entry["launches_bound"],
        solved_by=str(file.claimed.get("solved_by", "")),
        search_ticks=us_to_ticks(entry.get("search_us") or 0.0),  # older runs have none
        trade_offs=tuple(
            TradeOff(
                peak_memory_bytes=point["peak_memory_bytes"],
                step_time_ticks=us_to_ticks(point["step_time_us"]),
            )
            for point in entry.get("trade_offs", ())  # older runs have none
        ),
    )


def _score(name: str, says: Mapping[str, Any]) -> Score:
    return Score(
        name=name,
        step_time_ticks=us_to_ticks(says["step_time_us"]),
        exposed_ticks=us_to_ticks(says["exposed_us"]),
        peak_memory_bytes=says["peak_memory_bytes"],
        num_launches=says["num_launches"],
        violations=tuple(says["violations"]),
    )


def _contention(says: Mapping[str, Any], groups: Sequence[str]) -> Contention:
    """Return the contention that :func:`apsched.problem.contention.contention_json` wrote, for
    ``groups``.
    """
    names = tuple(dict.fromkeys(link for links in says["links"].values() for link in links))
    slowdowns = {
        name: Fraction(says.get(name, 1)).limit_denominator(_FINEST).as_integer_ratio()
        for name in Contention().slowdowns
    }
    return Contention(
        links=names,
        links_of_group=tuple(
            (group, tuple(sorted(names.index(link) for link in links)))
            for group, links in says["links"].items()
            if group in groups
        ),
        **slowdowns,
    )
