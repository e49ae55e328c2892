"""``python -m benchmarks.moves.pictures DIR``: the pictures of docs/moving-compute.md, from a graph
that is captured and solved here.

LLaMA-3 8B with 4 of its layers, backward, sharded over 8 process ranks by FSDP and 8 by tensor
parallelism, 2 sequences of 8192 tokens: solved with compute as captured and no memory cap, then
with compute that may move and the peak of the first schedule as the cap.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib import pyplot

from apsched.config import Caps
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import DEFAULT_CLUSTER, load_cluster
from apsched.pipeline.load import loaded_graph, opening
from apsched.pipeline.sources import SourceRequest
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.report.plots import plot_memory
from apsched.schedule.result import Scored
from apsched.solver import solve
from benchmarks.common.grid import COMPUTE_MOVE
from benchmarks.common.pictures import draw_timelines, milliseconds

REQUEST = SourceRequest(source="llama3-8b", mesh="fsdp=8,tp=8", seq_len=8192, batch=2, num_layers=4)
_WINDOW = (0.35, 0.65)
"""The part of the step in the detail: about one layer."""


def main(arguments: Sequence[str]) -> int:
    """Draw the pictures into the directory that is named."""
    folder = Path(arguments[0])
    problem = _problem()
    captured = _solved(problem, Caps(max_compute_move=0))
    moved = _solved(
        problem, Caps(max_compute_move=COMPUTE_MOVE, memory_cap_bytes=captured.peak_memory_bytes)
    )
    pair = {"compute as captured": captured, f"moved by at most {COMPUTE_MOVE} places": moved}
    for title, scored in pair.items():
        print(
            f"{title}: {milliseconds(scored):.2f} ms, {scored.exposed_ticks / 1e6:.2f} ms exposed,"
            f" peak {scored.peak_memory_bytes / 2**30:.3f} GiB"
        )
    whole, detail = folder / "moving-compute-step.png", folder / "moving-compute-layer.png"
    draw_timelines(problem, pair, (0.0, 1.0), whole)
    draw_timelines(problem, pair, _WINDOW, detail)
    figure, axes = pyplot.subplots(2, figsize=(10.0, 4.6), sharey=True, layout="constrained")
    for ax, (title, scored) in zip(axes, pair.items(), strict=True):
        plot_memory(problem, scored.schedule, captured.peak_memory_bytes, ax)
        ax.set_title(title, fontsize=9)
    figure.savefig(folder / "moving-compute-memory.png", dpi=110)
    return 0


def _problem() -> Problem:
    progress = Progress(quiet=True)
    with opening(REQUEST, progress) as (source, _):
        capture = source.capture
        assert capture is not None
        model = ClusterCostModel(load_cluster(DEFAULT_CLUSTER), capture.group_ranks)
        export = partial(
            loaded_graph,
            cost_model=model,
            cluster=DEFAULT_CLUSTER,
            group_ranks=capture.group_ranks,
            progress=progress,
        )
        (backward,) = (graph for graph in capture.graphs if graph.name == "backward")
        return export(backward).problem


def _solved(problem: Problem, caps: Caps) -> Scored:
    best = solve(problem, caps).best
    assert best is not None
    return best


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
