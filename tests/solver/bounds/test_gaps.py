"""Bounds stay as near to the optimum as they have been: what they leave, over many small problems
with exhaustive search beside them, does not grow.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.simulate import simulate
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.bound import loose_program
from apsched.solver.bounds.any_order.chain import chain_bound, longest_way
from apsched.solver.bounds.any_order.compute_chain import compute_chain_bound
from apsched.solver.bounds.any_order.jobs import ends_of
from apsched.solver.bounds.any_order.last_reduction import tail_bound
from apsched.solver.bounds.any_order.memory import memory_bound_of_any_order
from apsched.solver.bounds.best import any_order_bound
from apsched.solver.bounds.contention import shared_bound
from apsched.solver.bounds.linear_program import costs_of, lp_bound
from apsched.solver.bounds.memory_and_launches import launches_bound, peak_bound
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.step_time import memory_bound, step_time_bound
from apsched.solver.bounds.tighten import tighten
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.search.local_search import Search
from tests.helpers.oracle import best_schedule, least_memory, orders_within
from tests.helpers.problems.contended import contended
from tests.helpers.problems.strategies import layered_problem, random_caps, random_problem


def case(seed: int, most: int) -> tuple[Problem, Caps]:
    rng = random.Random(seed)
    problem = random_problem(
        rng,
        max_collectives=rng.randint(2, most + 1),
        max_compute=most,
        chained=rng.choice((0.3, 0.8)),
    )
    return problem, random_caps(rng, problem)


def gaps_as_captured(seed: int) -> Counter[str]:
    """Return what the bounds leave to the optimum of the compute as captured; empty where nothing
    fits.
    """
    problem, caps = case(seed, 5)
    best, least = best_schedule(problem, caps), least_memory(problem, caps)
    if best is None or least is None:
        return Counter()
    instance = Instance.of(problem, caps)
    forced = tighten(instance)
    within = replace(instance, caps=replace(caps, memory_cap_bytes=best.peak_memory_bytes))
    bounds = {
        "step time": step_time_bound(instance).ticks,
        "step time, forced": step_time_bound(forced).ticks,
        "linear program": lp_bound(forced).ticks,
        "paths": path_bound(forced).ticks,
    }
    gaps = {name: best.step_time_ticks - ticks for name, ticks in bounds.items()}
    gaps["least memory"] = least - memory_bound(instance.arrays)
    gaps["peak"] = best.peak_memory_bytes - peak_bound(instance, best.step_time_ticks)
    gaps["launches"] = best.num_launches - launches_bound(within, best.step_time_ticks)
    return Counter(gaps)


def gaps_in_any_order(seed: int) -> Counter[str]:
    """Return what the bounds leave to the optimum over all orders of the compute."""
    problem, caps = case(seed, 4)
    moves = random.Random(seed).choice((None, 1, 2))
    caps = replace(caps, memory_cap_bytes=None, max_prefetch=None, max_compute_move=moves)
    there = [replace(problem, reordered=order) for order in orders_within(problem, moves)]
    optimum = min(
        best.step_time_ticks for p in there if (best := best_schedule(p, caps)) is not None
    )
    least = min(peak for p in there if (peak := least_memory(p, caps)) is not None)
    instance, orders = Instance.of(problem, caps), Orders(Instance.of(problem))
    costs = costs_of(instance)
    loose = loose_program(instance, orders, costs)
    ends, way = ends_of(loose, moves), longest_way(loose)
    return Counter(
        {
            "any order": optimum - any_order_bound(instance, orders).ticks,
            "chain": optimum
            - max(
                chain_bound(instance, loose, ends, way).ticks,
                compute_chain_bound(instance, loose, way).ticks,
            ),
            "tail": optimum
            - tail_bound(instance.arrays, loose, ends, costs, moves, way).bound.ticks,
            "memory, any order": least - memory_bound_of_any_order(orders, moves),
        }
    )


def gaps_under_contention(seed: int) -> Counter[str]:
    """Return what the bounds leave to what is best without contention, on a machine with it."""
    problem, caps = case(seed, 5)
    best = best_schedule(problem, caps)
    if best is None:
        return Counter()
    problem = contended(problem, seed)
    ticks = simulate(problem, best.schedule).step_time_ticks
    instance = Instance.of(problem, caps)
    return Counter(
        {
            "contention": ticks - shared_bound(instance, in_order=True).ticks,
            "contention, any order": ticks - shared_bound(instance, in_order=False).ticks,
        }
    )


def gaps_of_layers(seed: int) -> Counter[str]:
    """Return what the bounds leave to what a short search finds, where layers repeat."""
    rng = random.Random(seed)
    problem = layered_problem(rng, num_layers=rng.randint(3, 5))
    instance = Instance.of(problem)
    floor = just_in_time(instance)
    assert floor is not None
    cap = floor.peak_memory_bytes * rng.choice((4, 5, 6)) // 4
    instance = instance.within(Caps(memory_cap_bytes=cap))
    search = Search(instance=instance, report=lambda *_: None, max_evaluations=20, floor_bytes=cap)
    search.portfolio()
    assert search.best is not None
    found, forced = search.best.figures, tighten(instance)
    ticks = int(found.step_time_ticks)
    within = instance.within(Caps(memory_cap_bytes=int(found.peak_memory_bytes)))
    return Counter(
        {
            "step time": ticks - step_time_bound(forced).ticks,
            "linear program": ticks - lp_bound(forced).ticks,
            "paths": ticks - path_bound(forced).ticks,
            "any order": ticks - any_order_bound(instance, Orders(Instance.of(problem))).ticks,
            "least memory": floor.peak_memory_bytes - memory_bound(instance.arrays),
            "peak": found.peak_memory_bytes - peak_bound(instance, ticks),
            "launches": found.num_launches - launches_bound(within, ticks),
        }
    )


AS_CAPTURED = (
    (
        "step time",
        "step time, forced",
        "linear program",
        "paths",
        "least memory",
        "peak",
        "launches",
    ),
    (178, 178, 403, 304, 76800, 121564, 4),
    (276, 276, 460, 453, 48128, 75942, 6),
    (240, 204, 440, 388, 84479, 130167, 2),
    (234, 234, 449, 306, 52223, 90071, 6),
)
IN_ANY_ORDER = (
    ("any order", "chain", "tail", "memory, any order"),
    (51, 252, 1271, 18936),
    (142, 317, 1349, 66039),
    (86, 474, 1418, 42489),
    (96, 232, 1182, 52721),
)
UNDER_CONTENTION = (
    ("contention", "contention, any order"),
    (613, 834),
    (573, 689),
    (558, 967),
    (523, 744),
)
OF_LAYERS = (
    ("step time", "linear program", "paths", "any order", "least memory", "peak", "launches"),
    (142, 182, 137, 141, 23040, 66560, 18),
    (153, 190, 125, 124, 45056, 59392, 24),
    (82, 102, 66, 75, 4096, 9728, 12),
    (465, 517, 86, 108, 28672, 62464, 18),
)
"""Names, then for each chunk of problems what the bounds leave in all (ticks, bytes, launches)."""
_ROUNDING = {"linear program": 4, "paths": 4}
"""Ticks by which solvers of linear programs may differ."""


@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.parametrize(
    ("gaps_of", "known", "size"),
    [
        (gaps_as_captured, AS_CAPTURED, 40),
        (gaps_in_any_order, IN_ANY_ORDER, 40),
        (gaps_under_contention, UNDER_CONTENTION, 40),
        (gaps_of_layers, OF_LAYERS, 2),
    ],
)
def test_no_bound_is_above_the_optimum_or_further_below_than_it_has_been(
    gaps_of: Callable[[int], Counter[str]], known: tuple, size: int, chunk: int
) -> None:
    left: Counter[str] = Counter()
    for seed in range(chunk * size, (chunk + 1) * size):
        gaps = gaps_of(seed)
        assert min(gaps.values(), default=0) >= 0, (seed, gaps)
        left += gaps
    allowed = Counter(dict(zip(known[0], known[1 + chunk], strict=True)))
    assert left <= allowed + Counter({name: _ROUNDING.get(name, 0) for name in known[0]})
