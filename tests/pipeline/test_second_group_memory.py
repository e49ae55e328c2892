"""The memory of the communicators of second groups: all graphs of a step pay it where one uses
such a group, and none does where none uses one. And the choice of an answer with or without one
under other options.
"""

from dataclasses import replace

import pytest

from apsched.capture.captured import Capture
from apsched.config import Caps, ScenarioOptions, SolveOptions
from apsched.pipeline.device_memory import COMMUNICATOR_BYTES, BesideGraph
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import (
    SolveRequest,
    lowered,
    resolve_caps,
    solve_graph,
    solve_on_one_device,
    solve_problem,
    under_plan,
)
from apsched.problem.problem import Problem
from apsched.problem.second_group import second_groups
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.result import SolveResult, Status
from apsched.solver import solve_requested
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.choices import Choice
from apsched.whole_step.keep_request import KeepRequest
from apsched.whole_step.pair import Step
from apsched.whole_step.solve import solve_graphs
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers


@pytest.fixture(scope="module")
def layers() -> Capture:
    return captured_layers((32, 64, 128))


def backward_of(capture: Capture, room_bytes: int) -> LoadedGraph:
    """Return backward on a device with so much room, where a second group is faster."""
    return step_of(capture, room_bytes)[1]


def step_of(capture: Capture, room_bytes: int) -> tuple[LoadedGraph, LoadedGraph]:
    """Return forward and backward on a device with so much room."""
    beside = BesideGraph(
        device_bytes=room_bytes,
        context_bytes=0,
        num_communicators=0,
        communicator_bytes=0,
        parameter_bytes=0,
        bf16_parameter_bytes=0,
        other_parameter_bytes=0,
    )
    pair = loaded_layers(capture, FlatPrices(bytes_per_us=150.0, latency_us=40.0))
    forward, backward = (
        replace(graph, device_memory_bytes=room_bytes, beside=beside) for graph in pair
    )
    return forward, backward


REQUEST = SolveRequest(
    caps=Caps(), optimizer="none", reserve=0.0, options=SolveOptions(budget=0.0), second_group=True
)
QUIET = Progress(quiet=True)


def solved(graph: LoadedGraph, *, second_group: bool) -> Result:
    request = replace(REQUEST, second_group=second_group)
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


@pytest.mark.parametrize("how", ["each alone", "one step", "micro-batches"])
def test_graphs_of_a_step_have_one_account(layers: Capture, how: str) -> None:
    """Backward uses the second group; its buffers are there while forward runs, too."""
    graphs = step_of(layers, 2**30)
    if how == "each alone":
        results = solve_graphs(graphs, REQUEST, KeepRequest(), QUIET).results
    else:
        step = Step.of(graphs, REQUEST, QUIET)
        several = Accumulation.of(step, 3)
        results = (step if how == "one step" else several).solve(Choice()).results
    assert [bool(second_groups(result.problem)) for result in results] == [False, True]
    for result in results:
        assert result.best is not None
        assert result.account.more_communicators == 1
        gradients = result.account.beside.gradient_bytes
        assert result.caps.memory_cap_bytes == 2**30 - COMMUNICATOR_BYTES - gradients
        assert result.account.left_bytes == result.caps.memory_cap_bytes


def test_no_graph_uses_a_second_group_if_another_one_has_no_room_for_it(layers: Capture) -> None:
    graphs = step_of(layers, 2**30)
    full = [resolve_caps(graph, REQUEST, QUIET) for graph in graphs]

    def solve(graph: LoadedGraph, caps: Caps, request: SolveRequest) -> Result:
        """Return the answer, with so much more outside of forward that it just fits."""
        more = 2**30 - COMMUNICATOR_BYTES if graph is graphs[0] else 0
        return solve_graph(graph, request, QUIET, caps=lowered(caps, more))

    results = solve_on_one_device(graphs, full, REQUEST, solve)
    assert all(result.best for result in results)
    assert not any(second_groups(result.problem) for result in results)
    assert [result.account.more_communicators for result in results] == [0, 0]
    alone = solved(graphs[1], second_group=False)
    assert results[1].step_time_us == alone.step_time_us
    assert results[1].caps == alone.caps


def test_the_bound_holds_for_every_way_to_place_gathers(layers: Capture) -> None:
    """With less memory forward may have a higher bound, which no step on one group has to keep."""
    graphs = step_of(layers, 2**30)
    full = [resolve_caps(graph, REQUEST, QUIET) for graph in graphs]

    def solve(graph: LoadedGraph, caps: Caps, request: SolveRequest) -> Result:
        """Return the answer, proven to be the fastest where the cap is lower."""
        result = solve_graph(graph, request, QUIET, caps=caps)
        if caps in full:
            return result
        answer = replace(
            result.answer, bound_ticks=result.best.step_time_ticks, status=Status.OPTIMAL
        )
        return replace(result, answer=answer)

    forward, backward = solve_on_one_device(graphs, full, REQUEST, solve)
    assert second_groups(backward.problem)
    known = solved(graphs[0], second_group=False)
    assert forward.bound_us == known.bound_us < forward.step_time_us
    assert forward.status == "feasible"
    assert backward.bound_us <= solved(graphs[1], second_group=False).bound_us


def test_a_stated_cap_is_a_number_of_bytes_for_each_graph(layers: Capture) -> None:
    request = replace(REQUEST, memory_cap=MemoryCap(size_bytes=2**29))
    results = solve_graphs(step_of(layers, 2**30), request, KeepRequest(), QUIET).results
    assert second_groups(results[1].problem)
    assert {result.caps.memory_cap_bytes for result in results} == {2**29}


def in_both_ways(graph: LoadedGraph, request: SolveRequest) -> tuple[Result, Result]:
    """Return the answers without and with second groups allowed, without a memory cap."""
    free = replace(request, memory_cap=MemoryCap(size_bytes=None))
    (posed,) = under_plan([graph], free)
    alone, either = (
        solve_graph(posed, replace(free, second_group=second), QUIET) for second in (False, True)
    )
    return alone, either


def test_bitwise_mode_has_its_price_on_a_second_group(layers: Capture) -> None:
    graph = backward_of(layers, 2**30)
    free_us = in_both_ways(graph, REQUEST)[1].step_time_us
    _, either = in_both_ways(graph, replace(REQUEST, bitwise=True))
    assert second_groups(either.problem)
    assert either.bitwise is not None
    assert either.bitwise.step_time_us == pytest.approx(free_us)
    assert either.bitwise.cost_us == pytest.approx(either.step_time_us - free_us)


@pytest.mark.parametrize("measure", ["worst", "mean"])
def test_scenarios_decide_on_a_second_group(layers: Capture, measure: str) -> None:
    """On the second group the step is shorter for the costs as they are, and longer for those of
    the scenario.
    """
    scenarios = ScenarioOptions(count=1, noise=1.0, measure=measure)
    request = replace(REQUEST, scenarios=scenarios, options=SolveOptions(budget=0.0, seed=7))
    alone, either = in_both_ways(backward_of(layers, 2**30), request)
    assert not second_groups(either.problem)
    assert either.robustness.chosen == alone.robustness.chosen


def test_the_bound_holds_on_second_groups_where_the_answer_has_none(layers: Capture) -> None:
    """The bound without second groups lies above steps that are known on one."""
    graph = backward_of(layers, 2**30)
    faster = in_both_ways(graph, REQUEST)[1]
    scenarios = ScenarioOptions(count=1, noise=1.0)
    request = replace(REQUEST, scenarios=scenarios, options=SolveOptions(budget=0.0, seed=7))
    alone, either = in_both_ways(graph, request)
    assert not second_groups(either.problem)
    assert alone.bound_us > faster.step_time_us
    assert either.bound_us <= faster.step_time_us


def test_the_bound_counts_second_groups_without_a_known_schedule(layers: Capture) -> None:
    """For which the search may have found none."""
    (posed,) = under_plan([backward_of(layers, 2**30)], REQUEST)

    def search(problem: Problem, caps: Caps, options: SolveOptions) -> SolveResult:
        answer = solve_requested(problem, caps, options)
        if not second_groups(problem):
            return answer
        nothing = solve_requested(problem, replace(caps, memory_cap_bytes=0), options)
        assert nothing.best is None
        return replace(nothing, bound_ticks=answer.bound_ticks)

    alone, both = (
        solve_problem(
            posed.problem, Caps(), replace(REQUEST, second_group=second), QUIET, search=search
        )
        for second in (False, True)
    )
    assert not second_groups(both.problem)
    assert both.step_time_us == alone.step_time_us
    assert both.bound_us < alone.bound_us
