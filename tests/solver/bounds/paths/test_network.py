"""The arcs of the network of paths, worked out by hand, and their sums."""

import random
from dataclasses import replace

import numpy as np
import pytest

from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.paths.bucket_costs import bucket_costs
from apsched.solver.bounds.paths.network import BEGINNING, END, network
from apsched.solver.bounds.paths.path_work import PathWork
from apsched.solver.bounds.paths.pricing import pricings
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.strategies import random_problem


@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_buckets_cost_what_they_add_to_the_arcs(seed: int) -> None:
    """Whatever the weights of the arcs; ten problems a seed."""
    rng, weights = random.Random(seed), np.random.default_rng(seed)
    for _ in range(10):
        problem = random_problem(rng, max_collectives=6, max_compute=5, chained=0.3)
        instance = Instance.of(problem)
        parts = bucket_costs(instance)
        if not parts:
            continue
        work = PathWork.in_order(instance.arrays)
        net = network(instance, parts, work)
        for priced in pricings(net, work, parts):
            flow = weights.random(net.num_arcs)
            answer = priced.price(flow)
            assert answer.ticks == pytest.approx(answer.added @ flow)


@pytest.mark.parametrize("seed", range(3))
def test_own_compute_is_never_priced_above_what_it_adds(seed: int) -> None:
    """One rate per byte stands for compute of any length; ten problems a seed."""
    rng, weights = random.Random(seed), np.random.default_rng(seed)
    for _ in range(10):
        instance = Instance.of(random_problem(rng, max_collectives=8, max_compute=5, chained=0.3))
        parts = bucket_costs(instance)
        if not parts:
            continue
        own = weights.integers(0, 60, len(instance.arrays.kind))
        work = replace(PathWork.in_order(instance.arrays), own=own)
        net = network(instance, parts, work)
        for priced in pricings(net, work, parts):
            flow = weights.random(net.num_arcs)
            answer = priced.price(flow)
            assert answer.ticks <= answer.added @ flow * (1 + 1e-9)


def test_own_compute_and_launch_count_at_most_as_the_transfer() -> None:
    """Reductions of 1024 bytes at 10 + 15 ticks, with launches of 2."""
    b = ByHand(prices={"reduce_scatter": line(10, 15)})
    x, outputs = b.input("x", 512), []
    for i in range(3):
        x = b.compute(f"c{i}", 30, x, size=1024)
        start = b.start("reduce_scatter", f"rs{i}", x, 1024, 512, launch_ticks=2)
        outputs.append(b.wait(f"w{i}", start))
    instance = Instance.of(b.output(*outputs))
    work = replace(PathWork.in_order(instance.arrays), own=np.array([9, 20, 40]))
    parts = bucket_costs(instance)
    (priced,) = pricings(network(instance, parts, work), work, parts)
    shared, alone = priced._work_before_suffix()
    assert shared.tolist() == pytest.approx([15, 15, 9])  # the latest first
    assert alone.tolist() == [25, 22, 11]


def one_on_the_path() -> Problem:
    """Return two compute nodes of 10 and 20 ticks with a collective on the path between them
    (launch 2, transfer 7), a gather for the second one (prologue 6, launch 3) and a reduction
    behind the first one (launch 1).
    """
    b = ByHand(
        prices={
            "all_reduce": line(7),
            "all_gather": line(30, 4),
            "reduce_scatter": line(30),
        },
        copy_price=line(0, 2),
        bucket_launch_ticks=50,
    )
    x, shard = b.input("x", 1024), b.input("s", 1024, kept=True)
    cast = b.compute("cast", 6, shard, size=1024)
    gather = b.start("all_gather", "ag", cast, 1024, 2048, launch_ticks=3, prologue=(cast,))
    first = b.compute("first", 10, x, size=1024)
    reduction = b.start("reduce_scatter", "rs", first, 1024, 512, launch_ticks=1)
    path = b.start(
        "all_reduce", "ar", first, 1024, 1024, launch_ticks=2, on_path=True, bucketable=False
    )
    gathered = b.wait("w", gather)
    last = b.compute("last", 20, b.wait("wp", path), gathered, size=512)
    return b.output(last, b.wait("v", reduction))


def test_constants_of_arcs_are_what_no_decision_changes() -> None:
    instance = Instance.of(one_on_the_path())
    net = network(instance, bucket_costs(instance), PathWork.in_order(instance.arrays))
    assert net.slots.tolist() == [0, 1, 2]
    # the launch on the path is work of the compute stream; what enters behind it has not paid it
    assert net.constant[net.block("flow", BEGINNING, END)].tolist() == [10, 22, 0]
    (stream,) = net.prefix_streams
    # the least before a transfer: prologue and launch of the gather, not those of the reduction
    assert net.constant[net.block("enter", stream, END)].tolist() == [0, 9 - 2, 9]
    assert net.constant[net.block("path")].tolist() == [10, 20, 0]
    assert net.constant[net.block("stall")].tolist() == [0, 9, 0]


def test_a_byte_of_a_gather_costs_its_copy_out_at_least() -> None:
    b = ByHand(prices={"all_gather": line(30, 4)}, copy_price=line(0, 2))
    x = b.input("x", 1024)
    for i in range(3):
        shard = b.input(f"s{i}", 1024, kept=True)
        x = b.compute(
            f"k{i}",
            10,
            x,
            b.wait(f"w{i}", b.start("all_gather", f"ag{i}", shard, 1024, 2048)),
            size=512,
        )
    (part,) = bucket_costs(Instance.of(b.output(x)))
    assert part.copy_rate == pytest.approx(2 / 1024)


def test_collectives_on_the_path_that_reach_across_compute_follow_each_other() -> None:
    """Two of 50 ticks each, the second made from what the first one brings, two compute nodes of
    10 ticks beside each; the gather at the end is free.
    """
    b = ByHand(prices={"all_reduce": line(50)})
    x, shard = b.input("x", 512), b.input("s", 512, kept=True)
    for i in range(2):
        start = b.start("all_reduce", f"ar{i}", x, 512, 512, on_path=True, bucketable=False)
        beside = [b.compute(f"beside{i}{k}", 10, size=512) for k in range(2)]
        x = b.compute(f"behind{i}", 10, b.wait(f"w{i}", start), *beside, size=512)
    gathered = b.wait("w", b.start("all_gather", "ag", shard, 512, 1024, group="other"))
    problem = b.output(b.compute("last", 10, x, gathered, size=512))
    assert path_bound(Instance.of(problem)).ticks == pytest.approx(50 + 10 + 50 + 10 + 10, abs=1)
