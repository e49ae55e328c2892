"""Data of the pictures of a report: columns of whole numbers, and one table of the strings that
they name.

Numbers are ticks and bytes, exact as simulated. ``page_data`` gives plain lists; ``packed`` gives
the text in the page: JSON, gzip, base64.
"""

import base64
import gzip
from collections.abc import Collection, Iterable
from typing import Any

import orjson

from apsched.artifacts.solved_run import SolvedGraph, SolvedRun
from apsched.config import Caps
from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.problem.storage_origins import BUFFERS, KEPT, KEPT_ACROSS, origin, storages_of
from apsched.report.binding import step_name
from apsched.report.stall_text import stalls, transfer_name
from apsched.schedule.analysis.moved_compute import moved_compute
from apsched.schedule.memory import lifetimes
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.simulate import Timeline, simulate
from apsched.units import TICKS_PER_US

_MEMBERS_NAMED = 8


class Strings:
    """Strings by number, each kept once; 0 is the empty one."""

    def __init__(self) -> None:
        self._places = {"": 0}

    def __call__(self, text: str) -> int:
        return self._places.setdefault(text, len(self._places))

    def all(self) -> list[str]:
        """Return the strings, each at its number."""
        return list(self._places)


def page_data(run: SolvedRun) -> dict[str, Any]:
    """Return the data of the pictures."""
    strings = Strings()
    graphs = [_graph(graph, strings) for graph in run.graphs]
    return {"ticks_per_us": TICKS_PER_US, "graphs": graphs, "strings": strings.all()}


def packed(data: dict[str, Any]) -> str:
    """Return ``data`` as it stands in the page; the same data gives the same text."""
    return base64.b64encode(gzip.compress(orjson.dumps(data), compresslevel=9, mtime=0)).decode()


def _graph(graph: SolvedGraph, strings: Strings) -> dict[str, Any]:
    result = graph.result
    problem = result.problem
    orders = ("as captured", graph.captured, graph.before), ("solved", problem, graph.after)
    return {
        "name": problem.name,
        "streams": [f"group {name} ({size})" for name, size in _groups(problem)],
        "cap": result.caps.memory_cap_bytes,
        "kept": problem.kept_bytes,
        "kept_count": sum(s.kept for s in problem.storages),
        "kept_label": KEPT,
        "kept_across": strings(KEPT_ACROSS) if graph.kept_tensors else 0,
        "orders": [
            _order(*order, result.caps, storages_of(order[1], graph.kept_tensors), strings)
            for order in orders
        ],
    }


def _groups(problem: Problem) -> Iterable[tuple[str, int]]:
    sizes = {key.group: key.group_size for key in problem.keys}
    return ((name, sizes.get(name, 0)) for name in problem.streams)


def _order(
    label: str,
    problem: Problem,
    schedule: Schedule,
    caps: Caps,
    kept_across: Collection[int],
    strings: Strings,
) -> dict[str, Any]:
    timeline = simulate(problem, schedule)
    why = stalls(problem, schedule, timeline, caps)
    moved = moved_compute(problem, schedule)
    steps = range(len(schedule.steps))
    return {
        "label": label,
        "step_time": timeline.step_time_ticks,
        "tail_why": strings(why.get(-1, "")),
        "steps": {
            "name": [strings(step_name(problem, step)) for step in schedule.steps],
            "module": [strings(module_of_step(problem, schedule, step)) for step in schedule.steps],
            "kind": [strings(kind_of_step(problem, step, moved)) for step in schedule.steps],
            "length": [timeline.end_ticks[k] - timeline.begin_ticks[k] for k in steps],
            "live": _differences(timeline.live_bytes),
            "why": [[k, strings(why[k])] for k in sorted(why) if k >= 0],
        },
        "transfers": _transfers(problem, timeline, strings),
        "lives": _lives(problem, schedule, kept_across, strings),
    }


def kind_of_step(problem: Problem, step: Step, moved: frozenset[int]) -> str:
    """Return the kind of bar that a step is drawn as."""
    if step.kind in (StepKind.COPY_IN, StepKind.COPY_OUT):
        return "copy"
    if step.kind is StepKind.START or (
        step.kind is StepKind.NODE and problem.kinds[step.index] is NodeKind.START
    ):
        return "launch"
    if step.kind is StepKind.WAIT or problem.kinds[step.index] is NodeKind.WAIT:
        return "exposed"
    return "moved compute" if step.index in moved else "compute"


def module_of_step(problem: Problem, schedule: Schedule, step: Step) -> str:
    """Return the module that a step comes from, or the parameters that it serves."""
    if step.kind is StepKind.NODE:
        c = problem.collective_of_node.get(step.index)
        return (problem.collectives[c].module if c is not None else "") or problem.modules[
            step.index
        ]
    if step.kind is StepKind.COPY_OUT:
        return problem.collectives[step.index].module
    return modules_of(problem, schedule.buckets[step.index].members)


def modules_of(problem: Problem, members: tuple[int, ...]) -> str:
    """Return the parameters that ``members`` serve, the first few by name."""
    names = [
        problem.collectives[c].module or problem.node_names[problem.collectives[c].start]
        for c in members[:_MEMBERS_NAMED]
    ]
    return ", ".join(names) + (
        f" and {len(members) - _MEMBERS_NAMED} more" if len(members) > _MEMBERS_NAMED else ""
    )


def _transfers(problem: Problem, timeline: Timeline, strings: Strings) -> dict[str, list[int]]:
    """Return the bars of the groups' streams."""
    transfers = timeline.transfers
    keys = [problem.keys[problem.collectives[t.members[0]].key] for t in transfers]
    return {
        "name": [strings(transfer_name(problem, t)) for t in transfers],
        "module": [strings(modules_of(problem, t.members)) for t in transfers],
        "kind": [strings(key.kind) for key in keys],
        "form": [strings(_form(t.members, coalesced=t.coalesced)) for t in transfers],
        "stream": [t.stream for t in transfers],
        "begin": [t.begin_ticks for t in transfers],
        "length": [t.end_ticks - t.begin_ticks for t in transfers],
        "launched": [timeline.end_ticks[t.start_step] for t in transfers],
        "waited": [timeline.begin_ticks[t.wait_step] for t in transfers],
        "bytes": [t.size_bytes for t in transfers],
    }


def _form(members: tuple[int, ...], *, coalesced: bool) -> str:
    if len(members) == 1:
        return "alone"
    return f"bucket of {len(members)}, {'coalesced' if coalesced else 'flat'}"


def _lives(
    problem: Problem, schedule: Schedule, kept_across: Collection[int], strings: Strings
) -> dict[str, list[int]]:
    """Return from which step to which each storage that the caller does not keep is alive; those of
    ``kept_across`` have one label.
    """
    lives = lifetimes(problem, schedule)

    def label(storage: int) -> str:
        if storage in kept_across:
            return KEPT_ACROSS
        return BUFFERS if storage < 0 else origin(problem, storage)

    labels = [label(life.storage) for life in lives]
    return {
        "label": [strings(label) for label in labels],
        "first": [life.first for life in lives],
        "last": [life.last for life in lives],
        "bytes": [life.size_bytes for life in lives],
    }


def _differences(values: tuple[int, ...]) -> list[int]:
    """Return the first of ``values`` and the difference of each from the one before: few digits."""
    return [value - (values[k - 1] if k else 0) for k, value in enumerate(values)]
