"""The bound along a chain of compute nodes: never above the best of all orders, and the sums of its
parts by hand.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from apsched.capture.fake_world import world
from apsched.config import Caps
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.bound import loose_program
from apsched.solver.bounds.any_order.chain import longest_way
from apsched.solver.bounds.any_order.compute_chain import (
    _steps,
    _with_ways,
    _work,
    compute_chain_bound,
)
from apsched.solver.bounds.any_order.jobs import Loose
from apsched.solver.bounds.best import any_order_bound, fixed_order_bound
from apsched.solver.bounds.linear_program import costs_of
from apsched.solver.bounds.paths.path_work import PathWork
from tests.helpers.oracle import best_schedule, orders_within
from tests.helpers.problems.by_hand import ByHand, line


def loosened(problem: Problem, max_move: int | None) -> tuple[Instance, Loose]:
    instance = Instance.of(problem, Caps(max_compute_move=max_move))
    return instance, loose_program(instance, Orders(Instance.of(problem)), costs_of(instance))


def bound_of(problem: Problem, max_move: int | None = None) -> int:
    return compute_chain_bound(*loosened(problem, max_move)).ticks


def work_of(problem: Problem, max_move: int | None = None) -> PathWork:
    """Return the work along the chain; of all reductions the own one counts."""
    instance, loose = loosened(problem, max_move)
    steps = _steps(loose.items, longest_way(loose), max_move)
    return _with_ways(_work(loose, steps, instance.arrays.reductions), loose, steps)


def backward(rng: random.Random) -> Problem:
    """Two or three layers of a backward graph, at most four collectives: a gather, an activation
    gradient on the chain, one or two weight gradients beside it and their reduction, in any mix.
    """
    price = line(rng.randint(0, 12), rng.randint(4, 40))
    b = ByHand(
        prices={"all_gather": price, "reduce_scatter": price},
        copy_price=line(0, rng.randint(0, 2)),
        bucket_launch_ticks=rng.randint(0, 3),
    )
    x, outputs = b.input("x", 512), []
    for i in range(rng.randint(2, 3)):
        needed = [x]
        if rng.random() < 0.6 and len(b.collectives) < 3:
            shard, ticks = b.input(f"s{i}", 512, kept=True), rng.randint(0, 3)
            gather = b.start("all_gather", f"ag{i}", shard, 512, 1024, launch_ticks=ticks)
            needed.append(b.wait(f"w{i}", gather))
        if i == 0 or (rng.random() < 0.7 and len(b.collectives) < 4):
            grad = b.compute(f"g{i}", rng.randint(1, 40), x, size=1024)
            if rng.random() < 0.2:
                grad = b.compute(f"h{i}", rng.randint(1, 20), grad, size=1024)
            ticks = rng.randint(0, 3)
            start = b.start("reduce_scatter", f"rs{i}", grad, 1024, 512, launch_ticks=ticks)
            outputs.append(b.wait(f"v{i}", start))
            if rng.random() < 0.1:
                outputs.append(b.compute(f"n{i}", rng.randint(1, 20), grad, size=512))
        x = b.compute(f"c{i}", rng.randint(1, 30), *needed, size=512)
    return b.output(x, *outputs)


@pytest.mark.parametrize("chunk", range(4))
def test_it_is_never_above_the_best_of_all_orders(chunk: int) -> None:
    """100 problems against exhaustive search over orders, buckets and places; a few it meets."""
    met = 0
    for seed in range(chunk * 25, (chunk + 1) * 25):
        rng = random.Random(seed)
        problem, move = backward(rng), rng.choice((None, 1, 2))
        orders = orders_within(problem, move)
        caps = Caps(max_compute_move=move)
        schedules = [best_schedule(replace(problem, reordered=o), caps) for o in orders]
        best = min(s.step_time_ticks for s in schedules if s is not None)
        bound = bound_of(problem, move)
        assert bound <= best, seed
        met += bound >= best - 1  # rounding
    assert met >= 2


def two_layers() -> Problem:
    """Two activation gradients of 30 ticks, each with a weight gradient of 20 and its reduction
    beside it.
    """
    b = ByHand(prices={"reduce_scatter": line(0, 25)})
    x, outputs = b.input("x", 512), []
    for i in range(2):
        grad = b.compute(f"g{i}", 20, x, size=1024)
        outputs.append(b.wait(f"v{i}", b.start("reduce_scatter", f"rs{i}", grad, 1024, 512)))
        x = b.compute(f"c{i}", 30, x, size=1024)
    return b.output(*outputs, b.wait("v", b.start("reduce_scatter", "rs", x, 1024, 512)))


def test_compute_of_one_reduction_is_its_own() -> None:
    """It runs somewhere before its launch, so no path to another reduction has it."""
    work = work_of(two_layers())
    assert work.own.tolist() == [20, 20, 0]
    assert work.before.tolist() == [0, 20, 50, 60]  # the longest way to a reduction from there on
    assert work.after.tolist() == [100, 100, 100, 0]  # without gathers all work is behind them
    assert work.between(np.array([0, 3])).tolist() == [60]


def test_compute_that_two_reductions_need_is_the_own_of_neither() -> None:
    b = ByHand(prices={"reduce_scatter": line(0, 25)})
    x = b.input("x", 512)
    grad = b.compute("g", 20, x, size=1024)
    starts = [b.start("reduce_scatter", f"rs{i}", grad, 1024, 512) for i in range(2)]
    chain = b.compute("d", 30, b.compute("c", 30, x, size=512), size=512)
    problem = b.output(chain, *(b.wait(f"v{i}", start) for i, start in enumerate(starts)))
    assert work_of(problem).own.tolist() == [0, 0]


def test_the_earlier_reduction_waits_for_its_compute_or_comes_late() -> None:
    """The last reduction ends the step: behind 60 ticks of the chain, and for each of the others
    the 20 ticks of its compute, which are less than its transfer of 25.
    """
    assert bound_of(two_layers()) == 2 * 30 + 2 * 20 + 25 - 1  # rounding


@pytest.mark.parametrize(("max_move", "between"), [(None, 30 + 30), (1, 30 + 30 + 5)])
def test_far_apart_compute_keeps_its_order(max_move: int | None, between: int) -> None:
    """A node that no other needs is more than two places from the last one, so it cannot pass it
    where each moves by one.
    """
    b = ByHand(prices={"reduce_scatter": line(0, 25)})
    x = b.input("x", 512)
    loose = b.compute("loose", 5, x, size=512)
    for i in range(4):
        x = b.compute(f"c{i}", 15, x, size=512)
    start = b.start("reduce_scatter", "rs", x, 512, 256)
    work = work_of(b.output(loose, b.wait("v", start)), max_move)
    assert work.before[-1] == between


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "least"), [(0, 0.999), (1, 0.975)])
def test_of_layers_it_is_near_the_bound_of_the_captured_order(direction: int, least: float) -> None:
    """Forward is a chain; in backward weight gradients may run later, each with its reduction."""
    mesh = MeshSpec(fsdp=256)
    with world(mesh.world_size):
        capture = capture_preset("llama3-8b", mesh=mesh, seq_len=2048, num_layers=4)
        model = ClusterCostModel(load_cluster(), capture.group_ranks)
        graph = export_graph(capture.graphs[direction], model, group_ranks=capture.group_ranks)
    problem = build_problem(graph)
    caps = Caps(max_compute_move=200)
    bound = any_order_bound(Instance.of(problem, caps), Orders(Instance.of(problem)))
    assert bound.source == "buckets weighed along a chain"
    assert bound.ticks >= least * fixed_order_bound(Instance.of(problem)).ticks
