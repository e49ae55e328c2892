"""``python -m benchmarks.micro_batches.pictures DIR``: the picture of docs/micro-batches.md, from a
graph that is captured and solved here.

LLaMA-3 8B with 4 of its layers, forward, sharded over 8 process ranks by FSDP and 8 by tensor
parallelism, two micro-batches of 8192 tokens: one after the other, and interleaved.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from apsched.config import Caps, SolveOptions
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import loaded
from apsched.pipeline.solve_graph import SolveRequest, solve_graph
from apsched.pipeline.sources import SourceRequest
from apsched.progress import Progress
from apsched.schedule.result import IN_A_ROW, Scored
from benchmarks.common.pictures import draw_timelines, milliseconds
from benchmarks.micro_batches.__main__ import CLUSTER, MAX_COMPUTE_MOVE

SOURCE = SourceRequest(
    source="llama3-8b", mesh="fsdp=8,tp=8", seq_len=8192, num_layers=4, num_micro_batches=2
)


def main(arguments: Sequence[str]) -> int:
    """Draw the picture into the directory that is named."""
    progress = Progress(quiet=True)
    request = SolveRequest(
        caps=Caps(max_compute_move=MAX_COMPUTE_MOVE), options=SolveOptions(budget=3.0)
    )
    with loaded(SOURCE, CostChoice(cluster=CLUSTER), "forward", progress) as source:
        (graph,) = source.graphs
        result = solve_graph(graph, request, progress)
    assert result.best is not None
    row = next(one for one in result.answer.baselines if one.name == IN_A_ROW)
    pair: dict[str, Scored] = {"in a row": row, "interleaved": result.best}
    for title, scored in pair.items():
        print(f"{title}: {milliseconds(scored):.2f} ms")
    file = Path(arguments[0]) / "micro-batches.png"
    draw_timelines(graph.problem, pair, (0.0, 1.0), file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
