"""What was promised is what runs: export the rewritten graph again, simulate it, and compare with the claim."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from apsched.build_problem import build_problem
from apsched.capture.captured import CapturedGraph
from apsched.costs.model import CostModel
from apsched.graph.export import export
from apsched.schedule import as_captured
from apsched.simulate import Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """Figures of a rewritten graph, found from the graph alone."""

    step_time_ticks: int
    peak_memory_bytes: int
    exact: bool
    """They are those that were claimed, to the tick and to the byte."""
    difference: str
    """What differs, in one sentence; empty where nothing does."""


def round_trip(
    rewritten: GraphModule,
    captured: CapturedGraph,
    cost_model: CostModel,
    group_ranks: Mapping[str, tuple[int, ...]],
    claimed: Timeline,
) -> RoundTrip:
    """Return the figures of ``rewritten``, which stands for ``captured.module``, beside those of ``claimed``.

    ``cost_model`` and ``group_ranks`` are those that ``captured`` was exported with.
    """
    dag = export(replace(captured, module=rewritten), cost_model, group_ranks=group_ranks)
    problem = build_problem(dag)
    found = simulate(problem, as_captured(problem.num_nodes))
    figures = (
        ("step time", " ticks", claimed.step_time_ticks, found.step_time_ticks),
        ("peak memory", " bytes", claimed.peak_memory_bytes, found.peak_memory_bytes),
        ("launches", "", claimed.num_launches, found.num_launches),
    )
    differences = [f"{name}: {now}{unit} found, {then}{unit} claimed" for name, unit, then, now in figures if then != now]
    return RoundTrip(
        step_time_ticks=found.step_time_ticks,
        peak_memory_bytes=found.peak_memory_bytes,
        exact=not differences,
        difference="; ".join(differences),
    )
