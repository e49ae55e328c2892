"""Several micro-batches in a row: the choice found and its bound, against every choice of small
steps.
"""

from itertools import product

import pytest

from apsched.config import Caps, SolveOptions
from apsched.names import NEXT, SUM, in_node, marked
from apsched.pipeline.solve_graph import SolveRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.verify import verify
from apsched.whole_step.accumulation import Accumulation
from apsched.whole_step.accumulation_search import AccumulationAnswer, solve_accumulation
from apsched.whole_step.choices import Choice
from apsched.whole_step.keep_request import keep_request
from apsched.whole_step.pair import Step
from tests.helpers.graphs.sharded_layers import (
    FlatPrices,
    captured_layers,
    loaded_layers,
)

CAPTURE = captured_layers((32, 64, 128))
NAMES = ("weights.0", "weights.1")
WHOLE_BYTES = {"weights.0": 4 * 32 * 64, "weights.1": 4 * 64 * 128}
SLOW, FAST = FlatPrices(bytes_per_us=150.0), FlatPrices(bytes_per_us=4000.0)
LATE = FlatPrices(bytes_per_us=2000.0, latency_us=40.0)


def accumulation_of(
    num_micro_batches: int,
    prices: FlatPrices = SLOW,
    cap_bytes: int | None = None,
    *,
    ranks_per_node: int = 4,
    max_compute_move: int | None = 0,
) -> Accumulation:
    request = SolveRequest(
        caps=Caps(max_compute_move=max_compute_move),
        memory_cap=MemoryCap(size_bytes=cap_bytes),
        options=SolveOptions(time_slack=0.0, budget=0.0),
    )
    graphs = loaded_layers(CAPTURE, prices, ranks_per_node=ranks_per_node)
    return Accumulation.of(Step.of(graphs, request, Progress(quiet=True)), num_micro_batches)


def every_choice(accumulation: Accumulation, *, nodes: bool = False) -> list[Choice]:
    options = []
    for name in NAMES:
        keeps = ["", name, *([in_node(name)] if nodes else [])]
        both = product(keeps, ("", marked(name, NEXT)), ("", marked(name, SUM)))
        options.append([tuple(filter(None, entries)) for entries in both])
    return [Choice(e for entries in chosen for e in entries) for chosen in product(*options)]


def answer_of(accumulation: Accumulation) -> AccumulationAnswer:
    return solve_accumulation(accumulation, keep_request("auto"))


def floor_bytes(accumulation: Accumulation) -> int:
    """Return the least cap under which each micro-batch by itself fits."""
    reduced = sum(accumulation.reduced_bytes.values())
    results = accumulation.solve(Choice()).results
    return reduced + max(result.answer.floor_memory_bytes for result in results)


@pytest.mark.parametrize(
    ("num_micro_batches", "prices", "room_bytes"),
    [(3, SLOW, sum(WHOLE_BYTES.values())), (2, LATE, WHOLE_BYTES["weights.1"]), (2, FAST, 2**20)],
    ids=["network binds", "latency binds", "compute binds"],
)
def test_no_choice_is_faster_than_the_bound_or_the_answer(
    num_micro_batches, prices, room_bytes
) -> None:
    cap_bytes = floor_bytes(accumulation_of(num_micro_batches, prices)) + room_bytes
    accumulation = accumulation_of(num_micro_batches, prices, cap_bytes)
    answer = answer_of(accumulation)
    solved = [accumulation.solve(choice) for choice in every_choice(accumulation)]
    least = min(one.step_ticks for one in solved if one.fits)
    assert answer.bound.ticks <= least == answer.best.step_ticks
    assert answer.best.peak_bytes <= cap_bytes
    for result in (result for one in solved if one.fits for result in one.results):
        assert not list(verify(result.problem, result.best.schedule, result.caps))
