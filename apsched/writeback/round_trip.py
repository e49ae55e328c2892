"""Check that the rewritten graph matches the claimed schedule: export it again, simulate it, and
compare.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from apsched.capture.captured import CapturedGraph
from apsched.costs.model import CostModel
from apsched.fx.collectives import is_collective
from apsched.graph.export.export import export_graph
from apsched.kinds import NodeKind
from apsched.problem.build import build_problem
from apsched.problem.contention import Contention
from apsched.problem.problem import Problem, with_contention
from apsched.schedule.schedule import Schedule, as_captured
from apsched.schedule.simulate import Timeline, simulate

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """Figures of a rewritten graph, found from the graph alone."""

    step_time_ticks: int
    peak_memory_bytes: int
    exact: bool
    """They are those that were claimed, to the tick and to the byte."""
    difference: str
    """The difference, in one sentence; empty if there is none."""


def round_trip(
    rewritten: GraphModule,
    captured: CapturedGraph,
    cost_model: CostModel,
    group_ranks: Mapping[str, tuple[int, ...]],
    claimed: Timeline,
    contention: Contention | None = None,
) -> RoundTrip:
    """Return the figures of ``rewritten``, which stands for ``captured.module``, beside those of
    ``claimed``.

    ``cost_model`` and ``group_ranks`` are those that ``captured`` was exported with, ``contention``
    that of its problem.
    """
    dag = export_graph(replace(captured, module=rewritten), cost_model, group_ranks=group_ranks)
    problem = with_contention(build_problem(dag), contention)
    found = simulate(problem, as_captured(problem.num_nodes))
    figures = (
        ("step time", " ticks", claimed.step_time_ticks, found.step_time_ticks),
        ("peak memory", " bytes", claimed.peak_memory_bytes, found.peak_memory_bytes),
        ("launches", "", claimed.num_launches, found.num_launches),
    )
    differences = [
        f"{name}: {now}{unit} found, {then}{unit} claimed"
        for name, unit, then, now in figures
        if then != now
    ]
    return RoundTrip(
        step_time_ticks=found.step_time_ticks,
        peak_memory_bytes=found.peak_memory_bytes,
        exact=not differences,
        difference="; ".join(differences),
    )


def with_names_checked(
    trip: RoundTrip, rewritten: GraphModule, problem: Problem, schedule: Schedule
) -> RoundTrip:
    """Return ``trip``, not exact where a launch of ``rewritten`` cannot be identified by the names
    of the collectives that it stands for.

    Metrics, reports and traces find launches by these names; a node that was renamed, or lost its
    note, would drop out of them silently.
    """
    kinds = dict(zip(problem.node_names, problem.kinds, strict=True))
    found = Counter(
        (node.name,) if node.name in kinds else _members(node)
        for node in rewritten.graph.nodes
        if is_collective(node) and kinds.get(node.name) is not NodeKind.COMPUTE  # not scheduled
    )
    in_bucket = {c for bucket in schedule.buckets for c in bucket.members}
    alone = [(c,) for c in range(len(problem.collectives)) if c not in in_bucket]
    launches = [*(bucket.members for bucket in schedule.buckets), *alone]
    wanted = Counter(
        tuple(problem.node_names[problem.collectives[c].start] for c in members)
        for members in launches
    )
    if found == wanted:
        return trip
    lost = ", ".join("+".join(names) for names in [*(wanted - found)][:_SHOWN]) or "none"
    strange = ", ".join("+".join(names) for names in [*(found - wanted)][:_SHOWN]) or "none"
    difference = f"launches by name: lost {lost}; unknown {strange}"
    return replace(
        trip, exact=False, difference="; ".join(filter(None, (trip.difference, difference)))
    )


def _members(start: Node) -> tuple[str, ...]:
    note = start.meta.get("apsched", {})
    return tuple(note["members"]) if note.get("role") == "start" else (start.name,)
