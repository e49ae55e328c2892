"""Chains of a problem are merged in orders that are schedules of the same problem, and no slower
than one behind the other.
"""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import pytest

import apsched
from apsched.capture.fake_world import world
from apsched.capture.micro_batches import REDUCE_EACH, MicroBatchChoice
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.graph.graph_file import from_bytes, to_bytes
from apsched.kinds import NodeKind
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset
from apsched.problem.build import build_problem
from apsched.problem.problem import check_problem
from apsched.quantities import show_bytes
from apsched.schedule.analysis.moved_compute import furthest_move, moved_compute
from apsched.schedule.result import ALTERNATING, IN_A_ROW
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import AlongCaps, Known, solve, solve_requested
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.best import best_bound
from apsched.solver.interleave.interleave import interleaved
from apsched.solver.interleave.least_memory import (
    MERGES,
    least_known,
    least_memory,
    schedule_of_least_memory,
)
from apsched.solver.interleave.merge import Merge, merged
from apsched.solver.interleave.units import units_of
from tests.helpers.problems.by_hand import ByHand

QUICK = SolveOptions(budget=0.2)


def captured(seq_len: int) -> list:
    mesh = MeshSpec.parse("fsdp=2,tp=2")
    with world(mesh.world_size):
        capture = capture_preset(
            "llama3-debug",
            mesh=mesh,
            seq_len=seq_len,
            num_layers=2,
            micro_batches=MicroBatchChoice(count=2),
        )
        model = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
        return [
            export_graph(graph, model, group_ranks=capture.group_ranks) for graph in capture.graphs
        ]


@pytest.fixture(scope="module")
def dags():
    return captured(4096)


@pytest.fixture(scope="module")
def problems(dags):
    return [build_problem(dag) for dag in dags]


def in_order(order) -> Schedule:
    return Schedule(buckets=(), steps=tuple(Step(StepKind.NODE, node) for node in order))


@pytest.mark.parametrize("merge", [*MERGES, Merge(apart=3), Merge(apart=10_000)], ids=str)
def test_merges_are_orders_that_keep_each_chain_and_each_kernel(problems, merge):
    for problem in problems:
        order = merged(problem, merge)
        caps = Caps(max_compute_move=0)  # in its own chain no node leaves its place
        assert not verify(replace(problem, chains=problem.chains), in_order(order), caps)
        inputs = [node for node in order if problem.kinds[node] is NodeKind.INPUT]
        assert inputs == sorted(inputs) == list(order[: len(inputs)])
        assert problem.kinds[order[-1]] is NodeKind.OUTPUT
        place = {node: k for k, node in enumerate(n for n in order if n in problem.captured_places)}
        for chain in units_of(problem, stretches=False):
            for unit in chain:
                places = [place[node] for node in unit if node in place]
                assert places == list(range(places[0], places[0] + len(places)))


def test_a_merge_answers_where_in_a_row_does_not_fit(problems):
    forward, caps = problems[0], Caps(max_compute_move=200)
    row = replace(forward, chains=())
    none = solve_requested(row, replace(caps, memory_cap_bytes=1000), QUICK)
    assert none.best is None
    found = interleaved(forward, caps, QUICK, none, 0)
    assert found.best is not None
    assert not verify(forward, found.best.schedule, caps)
    assert "chains merged" in found.solved_by
    assert found.baselines[: len(none.baselines)] == none.baselines
    assert [b.name for b in found.baselines[len(none.baselines) :]] == [ALTERNATING]
    assert found.baselines[-1].fits


def test_no_merge_is_tried_where_no_order_fits(problems, monkeypatch):
    def tried(*_):
        raise AssertionError("no merge fits")

    monkeypatch.setattr("apsched.solver.requested.interleaved", tried)
    caps = Caps(max_compute_move=200, memory_cap_bytes=1000)
    assert solve_requested(problems[0], caps, QUICK).infeasibility.proven


@pytest.mark.parametrize("merge", [Merge(by_turns=True), Merge(apart=2)], ids=str)
def test_sums_behind_all_chains_stay_there(merge):
    mesh = MeshSpec.parse("fsdp=2")
    with world(mesh.world_size):
        capture = capture_preset(
            "llama3-debug",
            mesh=mesh,
            seq_len=32,
            micro_batches=MicroBatchChoice(count=2, reduce=REDUCE_EACH),
        )
        model = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
        dag = export_graph(capture.graphs[1], model, group_ranks=capture.group_ranks)
    problem = build_problem(dag)
    sums = [n for n in problem.captured_order if problem.chains[n] < 0][-20:]
    assert all("add" in problem.node_names[node] for node in sums)
    order = [node for node in merged(problem, merge) if problem.kinds[node] is NodeKind.COMPUTE]
    assert order[-20:] == sums


def test_far_apart_is_one_behind_the_other(problems):
    forward = problems[0]
    order = [
        forward.chains[node]
        for node in merged(forward, Merge(apart=10_000))
        if forward.chains[node] >= 0 and node in forward.captured_places
    ]
    assert order == sorted(order)
    turns = [
        forward.chains[node]
        for node in merged(forward, Merge(by_turns=True))
        if forward.chains[node] >= 0 and node in forward.captured_places
    ]
    assert sum(a != b for a, b in pairwise(turns)) > 10


def test_the_answer_is_no_slower_than_in_a_row_and_beats_it_in_forward(problems):
    caps = Caps(max_compute_move=200)
    for problem in problems:
        answer = solve_requested(problem, caps, QUICK)
        assert not verify(problem, answer.best.schedule, caps)
        assert furthest_move(problem, answer.best.schedule) <= 200
        timeline = simulate(problem, answer.best.schedule)
        assert timeline.step_time_ticks == answer.best.step_time_ticks
        assert timeline.peak_memory_bytes == answer.best.peak_memory_bytes
        known = {b.name: b for b in answer.baselines}
        row = known[IN_A_ROW].step_time_ticks
        assert answer.bound_ticks <= answer.best.step_time_ticks <= row
        assert known[ALTERNATING].fits
        if problem.name == "forward":
            assert answer.best.step_time_ticks < 0.97 * row
            assert "chains merged" in answer.solved_by
            captured = replace(problem, chains=())
            assert furthest_move(captured, answer.best.schedule) > furthest_move(
                problem, answer.best.schedule
            )
            assert moved_compute(problem, answer.best.schedule) < moved_compute(
                captured, answer.best.schedule
            )


def test_the_cap_on_moves_raises_no_bound(problems):
    """It counts within a chain: in the whole order a node moves further."""
    for problem in problems:
        anywhere, near = (
            best_bound(instance, Orders(instance)).ticks
            for moves in (None, 1)
            for instance in (Instance.of(problem, Caps(max_compute_move=moves)),)
        )
        assert near == anywhere


def test_compute_as_captured_and_plans_that_name_places_are_not_interleaved(problems):
    answer = solve_requested(problems[0], Caps(max_compute_move=0), QUICK)
    assert IN_A_ROW not in {b.name for b in answer.baselines}


def test_a_memory_cap_holds_and_interleaving_gives_way_step_by_step(problems):
    backward = problems[1]
    free = solve_requested(backward, Caps(max_compute_move=200), QUICK)
    caps = Caps(max_compute_move=200, memory_cap_bytes=free.floor_memory_bytes)
    tight = solve_requested(backward, caps, QUICK)
    assert tight.best.peak_memory_bytes <= caps.memory_cap_bytes
    assert tight.best.step_time_ticks >= free.bound_ticks
    none = solve_requested(backward, replace(caps, memory_cap_bytes=1), QUICK)
    assert none.best is None


def test_the_least_memory_is_at_most_that_of_every_schedule_and_merges_are_tried():
    backward, caps = build_problem(captured(64)[1]), Caps(max_compute_move=200)
    options = SolveOptions(budget=0.0)
    least, bound = least_memory(backward, caps, options)
    assert bound <= least < least_memory(replace(backward, chains=()), caps, options)[0]
    schedule = schedule_of_least_memory(backward, caps, options)
    assert not verify(backward, schedule, replace(caps, memory_cap_bytes=least))
    found = solve_requested(backward, caps, options)
    peaks = [b.peak_memory_bytes for b in (*found.baselines, *found.trade_offs)]
    assert bound <= found.floor_memory_bytes <= min(peaks)
    short = solve_requested(backward, replace(caps, memory_cap_bytes=bound - 1), options)
    ((_, advised),) = short.infeasibility.least
    assert advised == least == short.floor_memory_bytes
    assert f"is {show_bytes(least)}, more than the cap" in short.infeasibility.message


def test_a_start_that_is_interleaved_is_a_start(problems):
    caps = Caps(max_compute_move=200)
    known = solve_requested(problems[0], caps, QUICK)
    again = solve_requested(problems[0], caps, SolveOptions(budget=0.0), start=known.best.schedule)
    assert again.best.step_time_ticks <= known.best.step_time_ticks


def test_a_merged_order_that_parts_kernels_is_a_start_under_other_caps(problems):
    """The sum of two losses, or of two gradients, is captured as one kernel with a node of the
    second chain, and may come before it.
    """
    backward, caps = problems[1], Caps(max_compute_move=200)
    order = merged(backward, Merge(by_turns=True))
    block = Orders(Instance.of(backward, caps)).precedence.block_of
    place = {node: k for k, node in enumerate(backward.captured_order)}
    blocks = [block[place[node]] for node in order if node in place]
    assert sum(a != b for a, b in pairwise(blocks)) >= len({*blocks})
    start = in_order(order)
    along = AlongCaps(backward, caps, SolveOptions(budget=0.5))
    around = along._around(start).problem.reordered
    assert around == tuple(node for node in order if node in place)
    known = Known(bound_ticks=1, bound_source="", floor_memory_bytes=1, floor_bound_bytes=1)
    peak = simulate(backward, start).peak_memory_bytes
    found = along.at(peak, (start,), known).best
    assert not verify(backward, found.schedule, replace(caps, memory_cap_bytes=peak))
    assert found.step_time_ticks <= simulate(backward, start).step_time_ticks


def test_graph_files_hold_chains(dags, problems):
    for dag, problem in zip(dags, problems, strict=True):
        again = build_problem(from_bytes(to_bytes(dag)))
        assert again == problem
        assert {*again.chains} == {-1, 0, 1}


def test_chains_of_another_length_are_refused(problems):
    with pytest.raises(apsched.InputError, match="chains has 1 entries for"):
        check_problem(replace(problems[0], chains=(0,)))


def test_places_count_in_the_own_chain_of_a_node():
    by_hand = ByHand()
    x = by_hand.input("x", 512)
    nodes = [by_hand.compute(name, 1, x, size=512) for name in ("a0", "b0", "a1", "b1")]
    problem = by_hand.output(*nodes)
    chained = replace(problem, chains=(-1, 0, 1, 0, 1, -1))
    order = in_order([0, 3, 4, 1, 2, 5])
    assert verify(problem, order, Caps(max_compute_move=1))
    assert not verify(chained, order, Caps(max_compute_move=1))
    assert verify(chained, order, Caps(max_compute_move=0)) == (
        "a0 moved by 1 compute nodes, more than 0",
        "a1 moved by 1 compute nodes, more than 0",
        "b0 moved by 1 compute nodes, more than 0",
        "b1 moved by 1 compute nodes, more than 0",
    )
    assert (furthest_move(problem, order), furthest_move(chained, order)) == (2, 1)
    assert len(moved_compute(chained, order)) == 2


def test_an_order_of_two_merges_is_solved_once(monkeypatch):
    """Chains without collectives on the path alternate in the same order, whether apart or not.
    None of them is explained.
    """
    by_hand = ByHand()
    x = by_hand.input("x", 512)
    nodes = [by_hand.compute(name, 1, x, size=512) for name in ("a0", "a1", "b0", "b1")]
    problem = replace(by_hand.output(*nodes), chains=(-1, 0, 0, 1, 1, -1))
    assert len({merged(problem, merge) for merge in MERGES}) < len(MERGES)
    caps, options = Caps(max_compute_move=1), SolveOptions(budget=0.0)
    in_a_row = solve_requested(replace(problem, chains=()), caps, options)
    orders = []

    def counted(reordered, *args, **kwargs):
        assert kwargs["explained"] is False
        orders.append(reordered.node_names)
        return solve(reordered, *args, **kwargs)

    monkeypatch.setattr("apsched.solver.interleave.interleave.solve", counted)
    found = interleaved(problem, caps, options, in_a_row, 0)
    assert orders
    assert len(orders) == len(set(orders))
    assert ALTERNATING in {row.name for row in found.baselines}

    around = Mock(return_value=None)
    monkeypatch.setattr("apsched.solver.interleave.least_memory._least_around", around)
    assert least_known(problem, caps, options) is None
    tried = [call.args[3] for call in around.call_args_list]
    assert len(tried) == len(set(tried)) > 1


def test_nodes_of_no_chain_keep_no_place_among_each_other():
    """Sums over two micro-batches stand where these leave them, as long as anything may move."""
    by_hand = ByHand()
    x = by_hand.input("x", 512)
    sums = [by_hand.compute(f"sum{k}", 1, x, size=512) for k in range(4)]
    chained = replace(by_hand.output(*sums), chains=(-1,) * 6)
    order = in_order([0, 4, 2, 3, 1, 5])
    assert not verify(chained, order, Caps(max_compute_move=1))
    assert "sum3 moved by 3 compute nodes, more than 0" in verify(chained, order, Caps())
    assert (furthest_move(chained, order), len(moved_compute(chained, order))) == (0, 0)
