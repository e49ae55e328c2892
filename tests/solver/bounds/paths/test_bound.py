"""The bound along paths: lines below prices, the cheapest buckets, and no schedule below what they
give.
"""

import random
from itertools import combinations

import numpy as np
import pytest

from apsched.config import Caps
from apsched.costs.price_curve import PriceCurve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.bounds.linear_program import lp_bound
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.paths.cheapest_buckets import cheapest_buckets
from apsched.solver.bounds.paths.price_lines import lines_below
from apsched.solver.bounds.step_time import step_time_bound
from apsched.solver.bounds.tighten import tighten
from tests.helpers.oracle import best_schedule
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.strategies import random_caps, random_problem


def random_curve(rng: random.Random) -> PriceCurve:
    sizes, prices = [0], [rng.choice((0, 0, 5, 60))]
    for _ in range(rng.randint(1, 6)):
        sizes.append(sizes[-1] + rng.randint(1, 4000))
        prices.append(prices[-1] + rng.choice((0, 1, 7, 90, 400)))
    return PriceCurve(size_bytes=tuple(sizes), price_ticks=tuple(prices))


@pytest.mark.parametrize("seed", range(30))
def test_lines_are_below_the_curve(seed: int) -> None:
    """Concave, convex and neither: at every size in question one of the lines is below the
    price.
    """
    rng = random.Random(seed)
    for _ in range(10):
        price, smallest = random_curve(rng), rng.choice((0, 1, 40, 3000))
        largest = smallest + rng.randint(0, 20_000)
        lines = lines_below(price, smallest, largest)
        assert (lines >= 0).all()
        for size in (smallest, largest, *(rng.randint(smallest, largest) for _ in range(40))):
            assert (lines[:, 0] + lines[:, 1] * size).min() <= price(size) + 1e-6


def test_a_straight_price_is_its_own_line() -> None:
    """Nothing is lost but the rounding at the two ends."""
    price = PriceCurve(size_bytes=(0, 10**6), price_ticks=(50_000, 350_000))
    lines = lines_below(price, 1000, 10**7)
    for size in (1000, 2000, 10**5, 10**6, 10**7):
        assert (lines[:, 0] + lines[:, 1] * size).min() == pytest.approx(price(size), abs=3)


def cheapest_by_trying(
    rate: np.ndarray,
    fee: np.ndarray,
    size: np.ndarray,
    ride: np.ndarray,
    alone: np.ndarray,
    free: np.ndarray,
) -> float:
    """All sets of heads with their lines; each other one rides with the least rate before it, or is
    alone.
    """
    n, num_lines = rate.shape
    best = float(alone.sum())
    for count in range(1, n + 1):
        for heads in combinations([h for h in range(n) if free[h]], count):
            for lines in np.ndindex(*(num_lines,) * count):
                cost = sum(
                    fee[h, p] + rate[h, p] * size[h] + ride[h]
                    for h, p in zip(heads, lines, strict=True)
                )
                for c in sorted(set(range(n)) - set(heads)):
                    rides = [
                        rate[h, p] * size[c] + ride[c]
                        for h, p in zip(heads, lines, strict=True)
                        if h < c and free[c]
                    ]
                    cost += min([alone[c], *rides])
                best = min(best, float(cost))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_cheapest_buckets_are_those_of_all_sets_of_heads(seed: int) -> None:
    """And what it says each one does costs what it says."""
    rng = np.random.default_rng(seed)
    n, num_lines = int(rng.integers(1, 7)), int(rng.integers(1, 3))
    rate, fee = rng.random((n, num_lines)), rng.random((n, num_lines)) * 4
    size, ride, alone, free = (
        rng.random(n) * 5,
        rng.random(n) - 0.3,
        rng.random(n) * 4,
        rng.random(n) < 0.8,
    )
    cost, head, line_of = cheapest_buckets(rate, fee, size, ride, alone, free)
    assert cost == pytest.approx(cheapest_by_trying(rate, fee, size, ride, alone, free))
    said = sum(
        alone[c]
        if h < 0
        else rate[h, line_of[h]] * size[c] + ride[c] + (fee[c, line_of[c]] if h == c else 0.0)
        for c, h in enumerate(head)
    )
    assert cost == pytest.approx(said)


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_is_below_it(seed: int) -> None:
    """Ten random problems a seed, with caps and without, against exhaustive search."""
    rng = random.Random(seed)
    for _ in range(10):
        problem = random_problem(
            rng, max_collectives=rng.choice((2, 3, 4)), max_compute=rng.choice((3, 5))
        )
        for caps in (Caps(), random_caps(rng, problem)):
            optimum = best_schedule(problem, caps)
            if optimum is not None:
                small = problem_arrays(problem)
                for forced in (
                    small,
                    tighten(Instance(problem=problem, arrays=small, caps=caps)).arrays,
                ):
                    assert (
                        path_bound(Instance(problem=problem, arrays=forced, caps=caps)).ticks
                        <= optimum.step_time_ticks
                    )


def test_what_rides_with_earlier_gathers_delays_them() -> None:
    """Bytes cost little alone or together, launches much: bounds that take the cheaper of both for
    each row stay below.
    """
    b = ByHand(prices={"all_gather": line(1000, 1)}, copy_price=line(10, 1), bucket_launch_ticks=5)
    shards = [b.input(f"s{i}", 64 * 1024, kept=True) for i in range(4)]
    x = b.input("x", 512)
    for i, shard in enumerate(shards):
        gathered = b.wait(
            f"w{i}", b.start("all_gather", f"ag{i}", shard, 64 * 1024, 512 * 1024, launch_ticks=5)
        )
        x = b.compute(f"f{i}", 300, x, gathered, size=512)
    problem = b.output(x)
    small, caps = problem_arrays(problem), Caps()
    before = max(
        step_time_bound(Instance(problem=problem, arrays=small, caps=caps)).ticks,
        lp_bound(Instance(problem=problem, arrays=small, caps=caps)).ticks,
    )
    optimum = best_schedule(problem, caps)
    assert optimum is not None
    assert (
        before
        < path_bound(Instance(problem=problem, arrays=small, caps=caps)).ticks
        <= optimum.step_time_ticks
    )


def test_work_before_an_on_path_collective_may_hide_behind_it() -> None:
    """A reduction ready before it may be launched, and finished, while the compute stream waits."""
    b = ByHand(prices={"reduce_scatter": line(15), "all_reduce": line(110)}, bucket_launch_ticks=4)
    x = b.input("x", 512)
    g = b.compute("g", 18, x, size=5120)
    h = b.compute("h", 27, g, size=512)
    path = b.wait("wp", b.start("all_reduce", "ar", h, 512, 512, launch_ticks=4, on_path=True))
    done = b.wait("w", b.start("reduce_scatter", "rs", g, 5120, 2560, launch_ticks=3))
    problem = b.output(done, b.compute("last", 22, path, size=512))
    assert path_bound(Instance.of(problem)).ticks <= 18 + 27 + 4 + 110 + 22
