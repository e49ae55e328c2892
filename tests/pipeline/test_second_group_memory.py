"""The memory of the communicators of second groups: an answer that uses none does not pay it."""

from dataclasses import replace

import pytest

from apsched.capture.captured import Capture
from apsched.config import Caps, SolveOptions
from apsched.pipeline.device_memory import COMMUNICATOR_BYTES, BesideGraph
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, resolve_caps, solve_graph
from apsched.problem.second_group import second_groups
from apsched.progress import Progress
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers


@pytest.fixture(scope="module")
def layers() -> Capture:
    return captured_layers((32, 64, 128))


def backward_of(capture: Capture, room_bytes: int) -> LoadedGraph:
    """Return backward on a device with so much room, where a second group is faster."""
    _, backward = loaded_layers(capture, FlatPrices(bytes_per_us=150.0, latency_us=40.0))
    beside = BesideGraph(
        device_bytes=room_bytes,
        context_bytes=0,
        num_communicators=0,
        communicator_bytes=0,
        parameter_bytes=0,
        bf16_parameter_bytes=0,
        other_parameter_bytes=0,
    )
    return replace(backward, device_memory_bytes=room_bytes, beside=beside)


def solved(graph: LoadedGraph, *, second_group: bool) -> Result:
    request = SolveRequest(
        caps=Caps(),
        optimizer="none",
        reserve=0.0,
        options=SolveOptions(budget=0.0),
        second_group=second_group,
    )
    caps = resolve_caps(graph, request, Progress(quiet=True))
    assert caps.memory_cap_bytes == graph.beside.device_bytes
    return solve_graph(graph, request, Progress(quiet=True))


def test_a_step_that_fits_without_a_second_group_fits_where_one_may_be_used(
    layers: Capture,
) -> None:
    """The room holds the graph, and not another communicator beside it."""
    graph = backward_of(layers, 2**20)
    alone, either = (solved(graph, second_group=second) for second in (False, True))
    assert either.step_time_us == alone.step_time_us
    assert either.caps == alone.caps
    assert either.account.left_bytes == either.caps.memory_cap_bytes


def test_the_account_has_the_communicator_of_the_answer(layers: Capture) -> None:
    graph = backward_of(layers, 2**30)
    alone, either = (solved(graph, second_group=second) for second in (False, True))
    assert second_groups(either.problem)
    assert either.step_time_us < alone.step_time_us
    assert either.caps.memory_cap_bytes == 2**30 - COMMUNICATOR_BYTES
    assert either.account.left_bytes == either.caps.memory_cap_bytes
