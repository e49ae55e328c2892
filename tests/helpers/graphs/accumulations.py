"""Steps of several micro-batches of a few sharded layers, and their answers."""

from apsched.capture.captured import Capture
from apsched.config import Caps, SolveOptions
from apsched.costs.model import CostModel
from apsched.pipeline.solve_graph import SolveRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.whole_step.accumulation.search import AccumulationAnswer, solve_accumulation
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.choices import Choice
from apsched.whole_step.keep_request import keep_request
from apsched.whole_step.pair import Step
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers

CAPTURE = captured_layers((32, 64, 128))
HSDP = captured_layers((64, 128), replicas=2)
SLOW = FlatPrices(bytes_per_us=150.0)


def accumulation_of(
    num_micro_batches: int,
    prices: CostModel = SLOW,
    cap_bytes: int | None = None,
    *,
    ranks_per_node: int = 4,
    max_compute_move: int | None = 0,
    capture: Capture = CAPTURE,
) -> Accumulation:
    request = SolveRequest(
        caps=Caps(max_compute_move=max_compute_move),
        memory_cap=MemoryCap(size_bytes=cap_bytes),
        options=SolveOptions(time_slack=0.0, budget=0.0),
    )
    graphs = loaded_layers(capture, prices, ranks_per_node=ranks_per_node)
    return Accumulation.of(Step.of(graphs, request, Progress(quiet=True)), num_micro_batches)


def answer_of(accumulation: Accumulation) -> AccumulationAnswer:
    return solve_accumulation(accumulation, keep_request("auto"))


def floor_bytes(accumulation: Accumulation) -> int:
    """Return the least cap under which each micro-batch by itself fits."""
    reduced = sum(accumulation.reduced_bytes.values())
    results = accumulation.solve(Choice()).results
    return reduced + max(result.answer.floor_memory_bytes for result in results)
