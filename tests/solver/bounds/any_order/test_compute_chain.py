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
from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.chain import longest_way
from apsched.solver.bounds.any_order.compute_chain import (
    _steps,
    _with_ways,
    _work,
    compute_chain_bound,
)
from apsched.solver.bounds.best import any_order_bound, fixed_order_bound
from apsched.solver.bounds.paths.path_work import PathWork
from tests.helpers.loosened import loosened
from tests.helpers.oracle import best_schedule, orders_within
from tests.helpers.problems.by_hand import ByHand, line


def bound_of(problem: Problem, max_move: int | None = None) -> int:
    instance, loose = loosened(problem, Caps(max_compute_move=max_move))
    return compute_chain_bound(instance, loose, longest_way(loose)).ticks


def work_of(problem: Problem, max_move: int | None = None) -> PathWork:
    """Return the work along the chain; of all reductions the own one counts."""
    instance, loose = loosened(problem, Caps(max_compute_move=max_move))
    steps = _steps(loose.items, longest_way(loose), max_move)
    return _with_ways(_work(loose, steps, instance.arrays.reductions), loose, steps)


def backward(rng: random.Random) -> Problem:
    """Two or three layers of a backward graph, at most four collectives: a gather, an activation
    gradient on the chain, weight gradients beside it and their reduction, in any mix; some weight
    gradients need the next layer, too. The last reduction may be larger.
    """
    price = line(rng.randint(0, 12), rng.randint(4, 40))
    b = ByHand(
        prices={"all_gather": price, "reduce_scatter": price},
        copy_price=line(0, rng.randint(0, 2)),
        bucket_launch_ticks=rng.randint(0, 3),
    )
    x, outputs = b.input("x", 512), []
    waiting: int | None = None

    def reduce(name: str, grad: int, size: int) -> None:
        ticks = rng.randint(0, 3)
        start = b.start("reduce_scatter", name, grad, size, size // 2, launch_ticks=ticks)
        outputs.append(b.wait(f"{name} waited", start))

    for i in range(rng.randint(2, 3)):
        needed = [x]
        if rng.random() < 0.4 and len(b.collectives) < 2:
            shard, ticks = b.input(f"s{i}", 512, kept=True), rng.randint(0, 3)
            gather = b.start("all_gather", f"ag{i}", shard, 512, 1024, launch_ticks=ticks)
            needed.append(b.wait(f"w{i}", gather))
        if waiting is not None:
            reduce(f"late{i}", b.compute(f"h{i}", rng.randint(1, 20), waiting, x, size=1024), 1024)
            waiting = None
        elif i == 0 or (rng.random() < 0.7 and len(b.collectives) < 3):
            grad = b.compute(f"g{i}", rng.randint(1, 60), x, size=1024)
            if rng.random() < 0.25:
                waiting = grad
            else:
                reduce(f"rs{i}", grad, 1024)
        x = b.compute(f"c{i}", rng.randint(1, 30), *needed, size=4096)
    if rng.random() < 0.6:
        reduce("last", x, 1024 * rng.choice((1, 2, 4)))
    return b.output(x, *outputs, *(() if waiting is None else (waiting,)))


@pytest.mark.parametrize("chunk", range(4))
def test_it_is_never_above_the_best_of_all_orders(chunk: int) -> None:
    """160 problems against exhaustive search over orders, buckets and places; a few it meets."""
    met = 0
    for seed in range(chunk * 40, (chunk + 1) * 40):
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


def test_they_wait_no_longer_than_their_transfer_takes() -> None:
    """Weight gradients of 40 ticks run during the last transfer of 100, and their transfers of 25
    follow it: that is the optimum, and the mean of the paths is near it.
    """
    b = ByHand(prices={"reduce_scatter": line(0, 25)})
    x, outputs = b.input("x", 512), []
    for i in range(2):
        grad = b.compute(f"g{i}", 40, x, size=1024)
        outputs.append(b.wait(f"v{i}", b.start("reduce_scatter", f"rs{i}", grad, 1024, 512)))
        x = b.compute(f"c{i}", 30, x, size=4096)
    outputs.append(b.wait("v", b.start("reduce_scatter", "rs", x, 4096, 2048)))
    optimum = 2 * 30 + 100 + 2 * 25
    assert 0.98 * optimum < bound_of(b.output(*outputs)) <= optimum


def far_apart(loose_ticks: int) -> Problem:
    """Return a chain of four compute nodes of 15 ticks, and one before it with a reduction of 25
    ticks for itself.
    """
    b = ByHand(prices={"reduce_scatter": line(0, 25)})
    x = b.input("x", 512)
    loose = b.compute("loose", loose_ticks, x, size=1024)
    first = b.start("reduce_scatter", "first", loose, 1024, 512)
    for i in range(4):
        x = b.compute(f"c{i}", 15, x, size=1024)
    last = b.start("reduce_scatter", "last", x, 1024, 512)
    return b.output(b.wait("v", first), b.wait("w", last))


@pytest.mark.parametrize(
    ("max_move", "loose_ticks", "own", "before"),
    [
        (None, 30, 30, 4 * 15),  # it may be the last
        (2, 30, 30, 4 * 15),  # four places: it may stand behind the last one
        (1, 30, 0, 4 * 15 + 30),  # more than two places before the last one: it may not
        (1, 20, 20, 4 * 15),  # that takes less time than its transfer
    ],
)
def test_far_apart_compute_keeps_its_order(
    max_move: int | None, loose_ticks: int, own: int, before: int
) -> None:
    work = work_of(far_apart(loose_ticks), max_move)
    assert work.own.tolist() == [own, 0]
    assert work.before[-1] == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "least", "source"),
    [(0, 0.999, BoundSource.LAUNCH_SEQUENCE), (1, 0.975, BoundSource.WEIGHED_ALONG_CHAIN)],
)
def test_of_layers_it_is_near_the_bound_of_the_captured_order(
    direction: int, least: float, source: BoundSource
) -> None:
    """Forward is a chain, on which launches are one sequence; in backward weight gradients may run
    later, each with its reduction.
    """
    mesh = MeshSpec(fsdp=256)
    with world(mesh.world_size):
        capture = capture_preset("llama3-8b", mesh=mesh, seq_len=2048, num_layers=4)
        model = ClusterCostModel(load_cluster(), capture.group_ranks)
        graph = export_graph(capture.graphs[direction], model, group_ranks=capture.group_ranks)
    problem = build_problem(graph)
    caps = Caps(max_compute_move=200)
    bound = any_order_bound(Instance.of(problem, caps), Orders(Instance.of(problem)))
    assert bound.source == source
    assert bound.ticks >= least * fixed_order_bound(Instance.of(problem)).ticks
