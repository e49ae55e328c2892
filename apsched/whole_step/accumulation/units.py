"""The units of a step of several micro-batches in a row: parameters that are decided on alike."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from apsched.names import IN_NODE, NEXT, SUM, SUM_SHARDS, block_of, marked
from apsched.problem.problem import Problem
from apsched.solver.bounds.accumulation import HELD, KEPT, SHARDS, SUMMED, Unit, least_bytes_of
from apsched.solver.bounds.accumulation import IN_NODE as SHARED
from apsched.units import allocated_bytes
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.choices import Parameter
from apsched.whole_step.rules import together_by_plan

if TYPE_CHECKING:
    from apsched.fx.accumulate import Reduction  # needs torch


def units_of(
    accumulation: Accumulation,
) -> tuple[list[Unit], list[dict[str, tuple[str, ...]]]]:
    """Return the units, in the order in which forward gathers them, and the entries of each by
    kind.
    """
    step, held = accumulation.step, accumulation.held
    sums, of_shards = accumulation.sums, accumulation.shard_sums
    forward, backward = (graph.problem for graph in step.least)
    starts = [
        {problem.node_names[one.start]: c for c, one in enumerate(problem.collectives)}
        for problem in (forward, backward)
    ]
    undecided = {p.name: p for p in step.undecided}
    by_need = {p.name: k for k, p in enumerate(sorted(undecided.values(), key=lambda p: p.need))}
    names = list(dict.fromkeys((*held, *sums, *undecided)))
    found, entries = [], []
    for place, members in enumerate(_alike(names, accumulation.unit_of, (forward, backward))):
        keepable = [undecided[name] for name in members if name in undecided]
        values = [value for name in members for value in held.get(name, ())]
        reductions = [one for name in members for one in sums.get(name, ())]
        shards = [one for n in members for one in of_shards.get(n, sums.get(n, ()))]
        shared = any(p.node_bytes for p in keepable)
        sizes = {
            KEPT: [p.size_bytes for p in keepable],
            SHARED: [p.node_bytes or p.size_bytes for p in keepable] if shared else [],
            HELD: [allocated_bytes(value.size_bytes) for value in values],
            SUMMED: [allocated_bytes(one.size_bytes) for one in reductions],
            SHARDS: [allocated_bytes(one.size_bytes) for one in shards]
            if any(name in of_shards for name in members)
            else [],
        }
        needs = [by_need[p.name] for p in keepable]
        found.append(
            Unit(
                gathers=tuple(starts[0][n] for v in values for n in v.gathers if n in starts[0]),
                again=tuple(c for p in keepable for c in p.gathers),
                reductions=_collectives(reductions, starts[1]),
                reductions_of_shards=_collectives(shards, starts[1]),
                least_bytes={kind: least_bytes_of(some) for kind, some in sizes.items() if some},
                reduced_bytes=sum(allocated_bytes(one.reduced_bytes) for one in reductions),
                sums={
                    SUMMED: {one.sum_name: one.chain for one in reductions},
                    SHARDS: {one.sum_name: one.chain for one in shards},
                },
                order={
                    kind: min(needs, default=0) if kind in (KEPT, SHARED) else place
                    for kind in sizes
                },
            )
        )
        entries.append(_entries_of(members, keepable, accumulation))
    return found, entries


def _entries_of(
    members: Sequence[str], keepable: Iterable[Parameter], accumulation: Accumulation
) -> dict[str, tuple[str, ...]]:
    """Return the entries of a unit with parameters ``members``, by kind."""
    summed = [name for name in members if name in accumulation.sums]
    of_shards = accumulation.shard_sums
    return {
        KEPT: tuple(p.name for p in keepable),
        SHARED: tuple(marked(p.name, IN_NODE) if p.node_bytes else p.name for p in keepable),
        HELD: tuple(marked(name, NEXT) for name in members if name in accumulation.held),
        SUMMED: tuple(marked(name, SUM) for name in summed),
        SHARDS: tuple(marked(n, SUM_SHARDS if n in of_shards else SUM) for n in summed),
    }


def _collectives(reductions: "Iterable[Reduction]", starts: Mapping[str, int]) -> tuple[int, ...]:
    """Return all collectives of ``reductions``; ``starts`` has the collective of a start node."""
    return tuple(starts[name] for one in reductions for name in one.starts if name in starts)


def _alike(
    names: list[str], unit_of: Mapping[str, str], problems: Iterable[Problem]
) -> list[list[str]]:
    """Return the parameters in groups: those of one unit of ``unit_of``, or of one transformer
    block, and those that the plan puts into one bucket.
    """
    own = {name: unit_of.get(name) or block_of(name) or name for name in names}
    group = together_by_plan(own, problems)
    found: dict[str, list[str]] = {}
    for name, of in group.items():
        found.setdefault(of, []).append(name)
    return list(found.values())
