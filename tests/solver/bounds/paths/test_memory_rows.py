"""Rows of memory in the bound along paths: gathers that do not fit at a full compute node are
transferred behind it, and no schedule is below what that gives.
"""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.solver.answer import near_enough
from apsched.solver.arrays.instance import Instance
from apsched.solver.bounds.best import fixed_order_bound
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.paths.bucket_costs import bucket_costs
from apsched.solver.bounds.paths.launches import add_launches
from apsched.solver.bounds.paths.network import network
from apsched.solver.bounds.paths.path_work import PathWork
from apsched.solver.bounds.paths.pricing import pricings
from apsched.solver.bounds.step_time import memory_bound
from apsched.solver.bounds.tighten import free_bytes, tighten
from tests.helpers.oracle import best_schedule
from tests.helpers.problems.by_hand import ByHand, line

_KIB = 1024


def full_at_the_beginning(rng: random.Random) -> Problem:
    """A step that begins with a full compute node, and has others; collectives behind."""
    b = ByHand(
        prices={
            "all_gather": line(rng.choice((0, 20, 60)), rng.choice((20, 50, 100))),
            "reduce_scatter": line(rng.choice((0, 20)), rng.choice((10, 50))),
        },
        copy_price=line(rng.choice((0, 10)), rng.choice((0, 1, 5))),
        bucket_launch_ticks=rng.choice((0, 5)),
    )
    count = rng.choice((2, 2, 3))
    shards = [b.input(f"s{i}", _KIB, kept=True) for i in range(count)]
    gathers = [
        b.start("all_gather", f"ag{i}", shard, _KIB, 8 * _KIB, launch_ticks=rng.choice((0, 5)))
        for i, shard in enumerate(shards)
    ]
    x = b.input("x", _KIB)
    if rng.random() < 0.5:
        x = b.compute("before", rng.choice((50, 400)), x, size=_KIB)
    large = b.compute("large", rng.choice((100, 500)), x, size=rng.choice((16, 32)) * _KIB)
    x = b.compute("full", rng.choice((100, 800)), x, large, size=_KIB)
    reduced = []
    for i, start in enumerate(gathers):
        x = b.compute(f"f{i}", rng.choice((50, 100, 300)), x, b.wait(f"w{i}", start), size=_KIB)
        if rng.random() < 0.5:
            large = b.compute(f"large{i}", 10, x, size=rng.choice((8, 16, 24)) * _KIB)
            x = b.compute(f"full{i}", rng.choice((10, 200)), x, large, size=_KIB)
        if i + 1 == count or (len(gathers) + len(reduced) < 3 and rng.random() < 0.5):
            gradient = b.compute(f"g{i}", 10, x, size=8 * _KIB)
            reduced.append(
                b.wait(f"wr{i}", b.start("reduce_scatter", f"rs{i}", gradient, 8 * _KIB, 4 * _KIB))
            )
    return b.output(x, *reduced)


def both_bounds(instance: Instance) -> tuple[int, int]:
    """The bound along paths without rows of memory and with them."""
    forced = tighten(instance)
    need = instance.arrays.need_slot
    forced = replace(forced, arrays=replace(forced.arrays, need_slot=need))
    room = free_bytes(forced)
    return path_bound(forced).ticks, path_bound(forced, room=room).ticks


def test_no_schedule_is_below_it() -> None:
    """Tight and loose caps; the rows raise the bound in many of the problems, and they are met."""
    raised = met = tried = 0
    for seed in range(120):
        rng = random.Random(seed)
        problem = full_at_the_beginning(rng)
        instance = Instance.of(problem)
        floor = memory_bound(instance.arrays)
        caps = Caps(memory_cap_bytes=floor + rng.choice((0, 0, 8, 12, 16)) * _KIB)
        optimum = best_schedule(problem, caps)
        if optimum is None:
            continue
        without, with_rows = both_bounds(instance.within(caps))
        assert with_rows <= optimum.step_time_ticks, seed
        tried += 1
        raised += with_rows > without * 1.001
        met += with_rows >= optimum.step_time_ticks * 0.999
    assert tried > 100
    assert raised > 12
    assert met > 12


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_launches_cost_what_they_add_and_no_other_costs_less(seed: int) -> None:
    """Whatever the weights of arcs and rows; the others are gathers alone, launched anywhere."""
    rng, weights = random.Random(seed), np.random.default_rng(seed)
    instance = Instance.of(full_at_the_beginning(rng))
    instance = instance.within(Caps(memory_cap_bytes=memory_bound(instance.arrays)))
    parts, work = bucket_costs(instance), PathWork.in_order(instance.arrays)
    net = network(instance, parts, work, free_bytes(instance))
    for priced in pricings(net, work, parts):
        flow = weights.random(net.num_arcs)
        answer = priced.price(flow)
        assert answer.ticks == pytest.approx(answer.added @ flow)
        if not priced.part.gathers:
            continue
        need = priced.places.before
        alone = np.full(len(need), -1)
        for place in product(*(range(at + 1) for at in need.tolist())):
            added = priced.added(alone, alone)
            add_launches(net, priced.part, need, np.array(place), priced.part.transfer, added)
            assert answer.ticks <= added @ flow * (1 + 1e-9)


def gathers_behind_a_full_node() -> Problem:
    """One of three gathers fits at the first compute node. Each collective takes 80 ticks."""
    b = ByHand(prices={"all_gather": line(0, 10), "reduce_scatter": line(0, 10)})
    shards = [b.input(f"s{i}", _KIB, kept=True) for i in range(3)]
    gathers = [b.start("all_gather", f"ag{i}", s, _KIB, 8 * _KIB) for i, s in enumerate(shards)]
    x = b.compute("full", 100, b.input("x", _KIB), size=12 * _KIB)
    for i, start in enumerate(gathers):
        x = b.compute(f"f{i}", 5, x, b.wait(f"w{i}", start), size=(8 if i == 2 else 1) * _KIB)
    return b.output(b.wait("wr", b.start("reduce_scatter", "rs", x, 8 * _KIB, 4 * _KIB)))


def test_gathers_that_do_not_fit_are_transferred_behind_the_full_node() -> None:
    """Two gathers and the reduction behind 100 ticks of compute; without the rows, all four and the
    last compute node, less the rounding of prices.
    """
    problem = gathers_behind_a_full_node()
    instance = Instance.of(problem)
    caps = Caps(memory_cap_bytes=memory_bound(instance.arrays))
    optimum = best_schedule(problem, caps)
    assert optimum is not None
    without, with_rows = both_bounds(instance.within(caps))
    assert 320 <= without <= 325
    assert 340 <= with_rows <= optimum.step_time_ticks == 350


def test_more_room_never_raises_the_ticks_that_stop_a_search() -> None:
    """The rows are weighed as well as the LP goes, so the search stops near the other bounds."""
    problem = gathers_behind_a_full_node()
    instance = Instance.of(problem)
    floor = memory_bound(instance.arrays)
    bounds = [
        fixed_order_bound(instance.within(Caps(memory_cap_bytes=cap)))
        for cap in (floor, floor + 4 * _KIB, floor + 64 * _KIB, None)
    ]
    assert bounds[0].source == "buckets and memory weighed along paths"
    assert bounds[0].ticks > bounds[-1].ticks
    stops = [near_enough(bound, SolveOptions()) for bound in bounds]
    assert stops == sorted(stops, reverse=True)
    assert stops[0] < bounds[0].ticks
