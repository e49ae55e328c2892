"""One case: its graphs go to torch and to apsched; the returned graphs are run and compared."""

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from apsched.capture.captured import CapturedGraph
from apsched.compiler.schedule_captured import RESULT
from apsched.compiler.schedule_graph import schedule_graph
from apsched.compiler.settings import Settings
from apsched.errors import RoundTripError
from apsched.fx.collectives import is_collective
from apsched.fx.graph_copies import copied
from apsched.torch_compat.graphs import schedule_overlap
from benchmarks.intake import execution, fake_collectives
from benchmarks.intake.case import (
    EXACT,
    TAKEN,
    Case,
    CaseOutcome,
    GraphOutcome,
    NotTracedError,
    UnreadError,
)

_BUDGET_S = 0.05
_PATH = re.compile(r" \(/[^)]*\)")
_TOO_LARGE = "not run: the sizes of a real model"


def examine(case: Case) -> CaseOutcome:
    """Return the outcome of ``case``, with the time that it took; never raises."""
    began = time.perf_counter()
    found = _examined(case)
    return replace(found, seconds=time.perf_counter() - began)


def _examined(case: Case) -> CaseOutcome:
    if case.processes == 1:
        fake_collectives.install()
    try:
        graphs = case.build()
    except UnreadError as error:
        unread = _unread(error)
        return CaseOutcome(name=case.name, group=case.group, graphs=(unread,))
    except NotTracedError as error:
        return CaseOutcome(name=case.name, group=case.group, not_traced=str(error))
    except Exception as error:
        return CaseOutcome(name=case.name, group=case.group, not_traced=reason(error))
    found: list[GraphOutcome] = []
    known: dict[str, Any] = {}
    for graph in graphs:
        values = execution.values_for(graph.module, known) if case.runs else None
        if any(is_collective(node) for node in graph.module.graph.nodes):
            found.append(_examine_graph(graph, values))
        if values is not None and graph is not graphs[-1]:
            known = _handed_on(graph.module, values)
    return CaseOutcome(
        name=case.name,
        group=case.group,
        graphs=tuple(found),
        not_traced="" if found else "no collective in any graph",
    )


def reason(error: BaseException) -> str:
    """Return an exception in one line, without the place of a file."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {_PATH.sub('', line)}"[:300]


def _unread(error: UnreadError) -> GraphOutcome:
    module = error.graph.module
    return GraphOutcome(
        name=error.graph.name,
        num_nodes=len(module.graph.nodes),
        launches=_launches(module),
        torch=_taken_by_torch(module),
        apsched=reason(error.error),
    )


def _handed_on(module: GraphModule, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the graph leaves for the next one; nothing where it does not run."""
    try:
        outputs, _ = execution.run(module, values)
    except Exception:
        return {}
    return {**execution.outputs_by_name(module, outputs), **values}


def _examine_graph(graph: CapturedGraph, values: Mapping[str, Any] | None) -> GraphOutcome:
    """Return the outcome of one graph, which runs on ``values`` where there are some."""
    module = graph.module
    launches = _launches(module)
    by_torch = _taken_by_torch(module)
    about: dict[str, Any] = {
        "name": graph.name,
        "num_nodes": len(module.graph.nodes),
        "launches": launches,
        "torch": by_torch,
    }
    settings = Settings(budget=_BUDGET_S, on_error="raise", cluster="h100", deadline_s=None)
    before = copied(module)
    try:
        after = schedule_graph(
            module,
            settings,
            name=graph.name,
            kept_inputs=graph.kept_inputs,
            parameter_names=graph.parameter_names,
        )
    except RoundTripError as error:
        return GraphOutcome(**about, apsched=TAKEN, round_trip=reason(error))
    except Exception as error:
        return GraphOutcome(**about, apsched=reason(error))
    result = after.meta[RESULT]
    return GraphOutcome(
        **about,
        apsched=TAKEN,
        launches_after=_launches(after),
        bits=_TOO_LARGE if values is None else execution.compared(before, after, values),
        round_trip=EXACT if result.round_trip_exact else "differs",
    )


def _launches(module: GraphModule) -> int:
    return sum(is_collective(node) for node in module.graph.nodes)


def _taken_by_torch(module: GraphModule) -> str:
    """Return whether torch's pass takes a copy; collectives are a hundred times as long as compute,
    so that it has something to hide.
    """
    copy = copied(module)

    def estimate_ms(node: Any, size_bytes: int | None) -> float:
        return 1.0 if is_collective(node) else 0.01

    try:
        schedule_overlap(copy, estimate_ms)
        copy.graph.lint()
    except Exception as error:
        return reason(error)
    return TAKEN
