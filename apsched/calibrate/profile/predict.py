"""Times of the graphs as captured at measured costs, for comparison with the measured times. No
torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from apsched.costs.clusters.cluster import Cluster
from apsched.costs.measured import MeasuredCosts
from apsched.graph.reprice import repriced
from apsched.kinds import NodeKind
from apsched.problem.build import build_problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.units import ticks_to_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of the graphs as captured, graphs added up."""

    step_us: float
    compute_us: float
    """On the compute stream, launches included."""
    transfer_us: Mapping[str, float]
    """By group, on its stream."""
    unpriced_us: float
    """Of the compute, nodes whose price is not a measured one."""


def predicted(dags: Sequence[nx.DiGraph], costs: MeasuredCosts, cluster: Cluster) -> Prediction:
    """Return the times of ``dags`` at ``costs``, in their captured order."""
    step_us = compute_us = unpriced_us = 0.0
    transfer_us: dict[str, float] = {}
    for dag in dags:
        priced = repriced(dag, costs, cluster)
        problem = build_problem(priced)
        timeline = simulate(problem, as_captured(problem.num_nodes))
        step_us += ticks_to_us(timeline.step_time_ticks)
        compute_us += ticks_to_us(timeline.compute_ticks)
        for transfer in timeline.transfers:
            group = problem.streams[transfer.stream]
            transfer_us[group] = transfer_us.get(group, 0.0) + ticks_to_us(
                transfer.end_ticks - transfer.begin_ticks
            )
        records = (priced.nodes[rank]["record"] for rank in range(priced.number_of_nodes()))
        unpriced_us += sum(
            r.duration_us
            for r in records
            if r.kind is NodeKind.COMPUTE and r.operation not in costs.compute
        )
    return Prediction(
        step_us=step_us, compute_us=compute_us, transfer_us=transfer_us, unpriced_us=unpriced_us
    )
