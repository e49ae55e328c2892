"""Assumptions of an answer about sizes that depend on data: their numbers, and the shares of time
and peak that follow from these.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

from apsched.errors import InputError
from apsched.graph.cost_shares import share_of_nodes
from apsched.graph.records import Assumed
from apsched.kinds import AssumedSize
from apsched.problem.problem import Problem
from apsched.schedule.memory import lifetimes
from apsched.schedule.schedule import Schedule
from apsched.schedule.simulate import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Assumed sizes, and the shares of time and memory that rest on them."""

    sizes: tuple[AssumedSize, ...]
    time_share: float
    """Of the time of all nodes and transfers as captured."""
    peak_share: float | None
    """Of the bytes alive at the peak of the best schedule; ``None`` where there is none."""


def assumptions_of(
    dag: nx.DiGraph, problem: Problem, schedule: Schedule | None, timeline: Timeline | None
) -> Assumptions | None:
    """Return the assumptions of the best ``schedule`` of ``problem``, which ``dag`` states;
    ``None`` if no size is assumed.
    """
    assumed: Assumed = dag.graph.get("assumed", Assumed())
    if not assumed.sizes:
        return None
    return Assumptions(
        sizes=assumed.sizes,
        time_share=share_of_nodes(dag, assumed.nodes),
        peak_share=None
        if schedule is None or timeline is None
        else _peak_share(frozenset(assumed.storages), problem, schedule, timeline),
    )


def check_hints(
    stated: Iterable[str], sizes: Iterable[AssumedSize], label: str, where: str
) -> None:
    """Raise InputError, which names ``label`` and ``where``, for a hint about a symbol that is not
    among ``sizes``.
    """
    known = {size.symbol for size in sizes}
    for symbol in stated:
        if symbol not in known:
            raise InputError(f"{label}: {_unknown(symbol, known, where)}")


def unused_hints(stated: Iterable[str], sizes: Sequence[AssumedSize], where: str) -> str:
    """Return why ``stated`` hints have no effect on a graph with ``sizes``; empty where one of them
    has, where the graph has no sizes that depend on data, and where nothing is stated.
    """
    known, symbols = {size.symbol for size in sizes}, list(stated)
    if not known or not symbols or known.intersection(symbols):
        return ""
    return _unknown(symbols[0], known, where)


def _unknown(symbol: str, known: Iterable[str], where: str) -> str:
    symbols = sorted(known, key=lambda symbol: (len(symbol), symbol))
    return (
        f"expected a symbol whose size depends on data, found {symbol!r}; {where}"
        f" {', '.join(symbols) or 'none'}"
    )


def assumed_json(assumptions: Assumptions) -> Mapping[str, Any]:
    """Return the assumptions, for files and programs."""
    return {
        "sizes": {
            size.symbol: {"value": size.value, "source": size.source} for size in assumptions.sizes
        },
        "time_share": round(assumptions.time_share, 9),
        "peak_share": None if assumptions.peak_share is None else round(assumptions.peak_share, 9),
    }


def _peak_share(
    assumed: frozenset[int], problem: Problem, schedule: Schedule, timeline: Timeline
) -> float:
    peak = timeline.peak_memory_bytes
    step = timeline.live_bytes.index(peak) if peak else 0
    kept = sum(problem.storages[s].size_bytes for s in assumed if problem.storages[s].kept)
    alive = sum(
        life.size_bytes
        for life in lifetimes(problem, schedule)
        if life.storage in assumed and life.first <= step <= life.last
    )
    return (kept + alive) / peak if peak else 0.0
