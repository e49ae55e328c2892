"""Memory that is alive in every order of the compute, against orders that ``verify`` accepts."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.memory import (
    _chains,
    certainly_alive,
    memory_bound_of_any_order,
)
from apsched.solver.reorder.lower_peak import lower_peak
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.search.just_in_time import just_in_time
from apsched.units import ALLOCATION_BYTES
from tests.helpers.claims import random_case
from tests.helpers.oracle import orders_within
from tests.helpers.problems.by_hand import ByHand, a_view_of_a_size
from tests.helpers.verify_oracle import find_schedule

NUM_COMPUTE = 7


def few_dependences(seed: int) -> Problem:
    """Seven compute nodes, most of which may stand anywhere, and no collective."""
    rng, hand = random.Random(seed), ByHand()
    values = [hand.input(f"x{i}", 512 * rng.randint(1, 9)) for i in range(3)]
    for i in range(NUM_COMPUTE):
        read = rng.sample(values, rng.randint(1, 2))
        values.append(hand.compute(f"c{i}", 1, *read, size=512 * rng.randint(1, 9)))
    return hand.output(rng.choice(values[3:]))


def schedules(problem: Problem, max_move: int | None) -> list[Schedule]:
    inputs = [node for node in range(problem.num_nodes) if node not in problem.captured_order]
    found = [
        Schedule(
            buckets=(),
            steps=tuple(Step(StepKind.NODE, i) for i in (*inputs[:-1], *order, inputs[-1])),
        )
        for order in orders_within(problem, max_move)
    ]
    caps = Caps(max_compute_move=max_move)
    assert all(not verify(problem, schedule, caps) for schedule in found)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_no_order_within_the_cap_needs_less(seed: int) -> None:
    problem = few_dependences(seed)
    orders = Orders(Instance.of(problem))
    bounds = []
    for max_move in (0, 1, 2, 3, None):
        least = min(simulate(problem, s).peak_memory_bytes for s in schedules(problem, max_move))
        bounds.append(memory_bound_of_any_order(orders, max_move))
        assert bounds[-1] <= least
        if max_move == 0:
            assert bounds[-1] == least
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_alive_at_a_node_is_alive_there_in_each_order(seed: int) -> None:
    """Also where some storages are set apart: these are alive where they are said to be, and the
    others count.
    """
    problem, rng = few_dependences(seed), random.Random(seed)
    apart = rng.sample(range(len(problem.storages)), 2)
    orders = Orders(Instance.of(problem))
    apart_bytes = sum(problem.storages[s].size_bytes for s in apart)
    for max_move in (0, 1, 2, None):
        alive = certainly_alive(orders, max_move, apart)
        for schedule in schedules(problem, max_move):
            timeline = simulate(problem, schedule)
            for step, live_bytes in zip(schedule.steps, timeline.live_bytes, strict=True):
                if step.index in problem.captured_order:
                    k = problem.captured_order.index(step.index)
                    assert alive.live_bytes[k] + alive.all_apart[k] * apart_bytes <= live_bytes
    at = certainly_alive(orders, 0, apart)
    place = dict.fromkeys(range(problem.num_nodes), -1)  # of inputs
    place |= {node: k for k, node in enumerate(problem.captured_order)}
    place[problem.num_nodes - 1] = NUM_COMPUTE
    uses = [[place[node] for node in problem.storages[s].uses] for s in apart]
    for k in range(NUM_COMPUTE):
        assert at.all_apart[k] == all(min(of_one) <= k <= max(of_one) for of_one in uses)


def test_a_node_captured_far_behind_stays_behind() -> None:
    """The last of five independent nodes frees its input. Where nodes move by one place, it stays
    behind the first two, so that both of these have the input next to them; at the others its input
    or its result is alive.
    """
    hand = ByHand()
    large = hand.input("large", 4096)
    results = [hand.compute(f"c{i}", 1, size=512) for i in range(4)]
    results.append(hand.compute("last", 1, large, size=512))
    orders = Orders(Instance.of(hand.output(*results)))
    alive = {move: certainly_alive(orders, move).live_bytes.tolist() for move in (1, 2, None)}
    assert alive[1] == [4096 + 512, 4096 + 512, 2 * 512, 3 * 512, 4096 + 3 * 512]
    assert alive[2] == [2 * 512] * 4 + [4096 + 512]
    assert alive[None] == alive[2]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_one_of_a_chain_is_alive_at_a_node_in_any_place(length: int) -> None:
    """Two tensors are replaced by others, as copies do, and the peak may stand anywhere among these
    nodes: the least size of each chain counts, of up to three storages.
    """
    hand, sizes = ByHand(), [2048, 1024, 4096, 8192]
    tensors = [[hand.input(f"x{i}", sizes[0])] for i in range(2)]
    peak = hand.compute("peak", 1, size=65536)
    for size in sizes[1:length]:
        for values in tensors:
            values.append(hand.compute(f"c{len(hand.names)}", 1, values[-1], size=size))
    problem = hand.output(peak, *(values[-1] for values in tensors))
    orders = Orders(Instance.of(problem))
    at_peak = int(certainly_alive(orders, None).live_bytes[0])
    least = min(
        live_bytes
        for schedule in schedules(problem, None)
        for step, live_bytes in zip(
            schedule.steps, simulate(problem, schedule).live_bytes, strict=True
        )
        if step.index == peak
    )
    assert least == 65536 + 2 * min(sizes[:length])
    assert at_peak == (least if length <= 3 else 65536)


def test_a_storage_counts_in_one_chain_at_a_node() -> None:
    """Two nodes read one tensor: it is alive at the peak, or both of their results are."""
    hand = ByHand()
    shared = hand.input("shared", 4096)
    peak = hand.compute("peak", 1, size=8192)
    results = [hand.compute(f"c{i}", 1, shared, size=4096) for i in range(2)]
    problem = hand.output(peak, *results)
    orders = Orders(Instance.of(problem))
    assert certainly_alive(orders, None).live_bytes[0] == 8192 + 4096


def test_a_node_with_many_tensors_makes_few_chains() -> None:
    """Two nodes in a row read and allocate 60 tensors each, as ``aten._foreach_add`` does; the last
    tensor is an output.
    """
    hand, num_tensors = ByHand(), 60
    tensors = [hand.input(f"x{i}", 512 * (i + 1)) for i in range(num_tensors)]
    peak = hand.compute("peak", 1, size=65536)
    first = hand.compute("first", 1, *tensors)
    second = hand.compute("second", 1, first)
    storages = []
    for node in (first, second):
        for i in range(num_tensors):
            storages.append(len(hand.storages))
            hand.allocate(node, 512 * (i + 1), birth=node)
    for s in storages[:num_tensors]:
        hand.storages[s]["uses"].add(second)
    problem = hand.output(peak, second)
    orders = Orders(Instance.of(problem))
    lives = list(orders.lives())
    lengths = Counter(len(chain) for _, chain in _chains(problem, lives, ()))
    assert lengths == {1: 3 * num_tensors + 1, 2: 2 * 8 * num_tensors, 3: 8 * 8 * num_tensors}
    assert certainly_alive(orders, None).live_bytes[0] == 65536 + 512 * num_tensors


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_the_input_or_the_result_of_a_collective_is_alive(kind: str) -> None:
    """Wherever it is launched, alone or in a bucket; the peak is compute that needs neither."""
    hand = ByHand()
    input_bytes, output_bytes = {
        "all_gather": (2048, 8192),
        "reduce_scatter": (8192, 2048),
        "all_reduce": (2048, 2048),
    }[kind]
    inputs = [hand.input(f"x{i}", input_bytes) for i in range(2)]
    peak = hand.compute("peak", 1, size=65536)
    starts = [hand.start(kind, f"c{i}", x, input_bytes, output_bytes) for i, x in enumerate(inputs)]
    results = [hand.wait(f"w{i}", start) for i, start in enumerate(starts)]
    problem = hand.output(hand.compute("last", 1, peak, *results, size=512))
    orders = Orders(Instance.of(problem))
    assert certainly_alive(orders, None).live_bytes[0] >= 65536 + 2 * 2048 - 2 * 511
    bound = memory_bound_of_any_order(orders, None)
    assert find_schedule(problem, Caps(max_compute_move=None, memory_cap_bytes=bound - 1)) is None
    assert find_schedule(problem, Caps(max_compute_move=None, memory_cap_bytes=bound + 2 * 511))


def test_a_view_of_a_size_that_data_decide_is_no_birth() -> None:
    """The view of ``large`` follows ``item``, which has its size and stands first."""
    problem = a_view_of_a_size()
    for move in (0, 1, None):
        caps = Caps(max_compute_move=move)
        instance = Instance.of(problem, caps)
        orders = Orders(instance)
        bound = memory_bound_of_any_order(orders, move)
        assert find_schedule(problem, replace(caps, memory_cap_bytes=bound - 1)) is None
        assert certainly_alive(orders, move).live_bytes[1] == 512 + 512 + 8192
        as_captured = orders.arrays_of(np.arange(5)).base_compute_bytes
        assert np.array_equal(as_captured, instance.arrays.base_compute_bytes)


@pytest.mark.parametrize("seeds", [range(k, k + 500) for k in range(0, 1500, 500)])
def test_views_of_sizes_that_data_decide(seeds: Iterable[int]) -> None:
    for seed in seeds:
        problem, caps = random_case(seed, sized=0.6, chained=0.5)
        caps = Caps(max_compute_move=caps.max_compute_move)
        bound = memory_bound_of_any_order(Orders(Instance.of(problem, caps)), caps.max_compute_move)
        assert find_schedule(problem, replace(caps, memory_cap_bytes=bound - 1)) is None, seed


ROUNDED = (15976, 16102)
"""Cases where results in a buffer take less than on their own."""


@pytest.mark.parametrize("seeds", [range(k, k + 500) for k in range(0, 4000, 500)] + [ROUNDED])
def test_no_schedule_that_verify_accepts_needs_less(seeds: Iterable[int]) -> None:
    for seed in seeds:
        problem, caps = random_case(seed)
        caps = Caps(max_compute_move=caps.max_compute_move)
        bound = memory_bound_of_any_order(Orders(Instance.of(problem, caps)), caps.max_compute_move)
        assert find_schedule(problem, replace(caps, memory_cap_bytes=bound - 1)) is None, seed


@pytest.mark.parametrize("move", [10, 200, None])
def test_the_bound_is_the_floor_of_captured_graphs(
    layered_presets: dict[str, Problem], move: int | None
) -> None:
    """The least memory that the search finds is proven where compute moves, too, to the rounding of
    results that share a buffer.
    """
    for name, problem in layered_presets.items():
        instance = Instance.of(problem, Caps(max_compute_move=move))
        bound = memory_bound_of_any_order(Orders(instance), move)
        found = just_in_time(instance)
        assert found is not None
        peaks = [found.peak_memory_bytes]
        peaks += [one.peak_bytes for one in lower_peak(ComputeMover(instance), instance.caps, 0)]
        assert 0 <= min(peaks) - bound < ALLOCATION_BYTES * len(problem.collectives), name
