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
from apsched.report.plots import plot_memory, plot_timeline
from apsched.schedule.result import Scored
from apsched.solver import solve
from apsched.units import ticks_to_us
from benchmarks.common.grid import COMPUTE_MOVE

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
            f"{title}: {_ms(scored):.2f} ms, {scored.exposed_ticks / 1e6:.2f} ms exposed, peak"
            f" {scored.peak_memory_bytes / 2**30:.3f} GiB"
        )
    whole, detail = folder / "moving-compute-step.png", folder / "moving-compute-layer.png"
    _draw(problem, pair, (0.0, 1.0), whole)
    _draw(problem, pair, _WINDOW, detail)
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


def _draw(
    problem: Problem, pair: dict[str, Scored], window: tuple[float, float], file: Path
) -> None:
    """Draw the same share of the longest step of both, one over the other, on one scale."""
    figure, axes = pyplot.subplots(
        len(pair), figsize=(12.0, 4.6), sharex=True, layout="constrained"
    )
    longest = max(map(_ms, pair.values()))
    for ax, (title, scored) in zip(axes, pair.items(), strict=True):
        plot_timeline(problem, scored.schedule, ax)
        ax.set_title(
            f"{title}: {_ms(scored):.2f} ms, of it {scored.exposed_ticks / 1e6:.2f} ms exposed",
            fontsize=9,
        )
        ax.set_xlabel("")
    for ax in axes:
        ax.set_xlim(window[0] * longest, window[1] * longest)
        for text in ax.texts:
            text.set_clip_on(True)
    axes[-1].set_xlabel("time (ms)")
    figure.savefig(file, dpi=110)


def _ms(scored: Scored) -> float:
    return ticks_to_us(scored.step_time_ticks) / 1000


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
