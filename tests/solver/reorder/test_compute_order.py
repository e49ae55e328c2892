"""The order of the compute on small problems, against all orders that there are: the whole
formulation, and the rule by itself.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.kernel_cuts import cuts_made, extra_ticks, with_cut
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.reorder.min_memory import least_memory
from apsched.solver.reorder.reorder import ComputeMover, Moved
from apsched.solver.search.local_search import Search
from apsched.units import ticks_to_us
from tests.helpers.oracle import best_schedule, orders_within
from tests.helpers.oracle import least_memory as least_of_captured
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.strategies import (
    random_caps,
    random_problem,
    with_coalesced_price,
    with_cuts,
    with_kernels,
)

STRICT = SolveOptions(time_slack=0.0)
Value = tuple[int, int, int]


def case(seed: int) -> tuple[Problem, Caps]:
    rng = random.Random(seed)
    problem = random_problem(
        rng, max_collectives=rng.randint(2, 4), max_compute=5, chained=rng.choice((0.2, 0.5, 0.8))
    )
    if seed % 4 == 3:
        problem = with_coalesced_price(problem, rng)
    return problem, replace(
        random_caps(rng, problem), max_compute_move=rng.choice((None, None, 1, 2))
    )


def best_of(problem: Problem, caps: Caps, orders: Iterator[tuple[int, ...]]) -> Value | None:
    found = [best_schedule(replace(problem, reordered=order), caps) for order in orders]
    return min((best.value for best in found if best is not None), default=None)


def whole_kernels(problem: Problem, max_move: int | None) -> Iterator[tuple[int, ...]]:
    """Yield the orders in which the neighbours that are one kernel stay neighbours."""
    mover = ComputeMover(Instance.of(problem))
    place = {node: k for k, node in enumerate(problem.captured_order)}
    first = mover.orders.precedence.first
    for order in orders_within(problem, max_move):
        at = {place[node]: k for k, node in enumerate(order)}
        if all(at[k] == at[k - 1] + 1 for a, b in pairwise(first) for k in range(a + 1, b)):
            yield order


@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.slow
def test_the_optimum_is_that_of_all_orders(chunk: int) -> None:
    """Step time, then peak, then launches, with a bound that meets it; infeasible exactly where no
    order keeps the caps.
    """
    moved = infeasible = 0
    for seed in range(chunk * 20, (chunk + 1) * 20):
        problem, caps = case(seed)
        best = best_of(problem, caps, orders_within(problem, caps.max_compute_move))
        answer = solve(problem, caps, STRICT)
        if best is None:
            assert answer.status == "infeasible", seed
            assert answer.best is None
            infeasible += 1
            continue
        assert answer.best is not None, seed
        assert verify(problem, answer.best.schedule, caps) == ()
        assert (
            answer.best.step_time_ticks,
            answer.best.peak_memory_bytes,
            answer.best.num_launches,
        ) == best, seed
        assert answer.status == "optimal" or problem.travels, seed  # `best` is in normal form
        assert (answer.status == "optimal") == (answer.bound_ticks == best[0]), seed
        assert answer.bound_ticks <= best[0], seed
        captured = best_schedule(problem, caps)
        moved += captured is None or best < captured.value
    assert moved >= 2
    assert infeasible >= 1


@pytest.mark.slow
def test_kernels_stay_whole_and_the_bound_is_not_theirs_alone() -> None:
    """The best of the orders that keep kernels whole; the bound holds for those that take them
    apart, too.
    """
    apart = 0
    for seed in range(30):
        problem, caps = case(seed)
        problem = with_kernels(problem, seed)
        best = best_of(problem, caps, whole_kernels(problem, caps.max_compute_move))
        if best is None:
            continue
        answer = solve(problem, caps, STRICT)
        assert answer.best is not None, seed
        assert (
            answer.best.step_time_ticks,
            answer.best.peak_memory_bytes,
            answer.best.num_launches,
        ) == best, seed
        any_order = best_of(problem, caps, orders_within(problem, caps.max_compute_move))
        assert any_order is not None
        assert answer.bound_ticks <= any_order[0], seed
        apart += any_order[0] < best[0]
    assert apart


def with_some_cut(problem: Problem) -> Iterator[Problem]:
    """Yield ``problem`` with every set of its cuts, one of a kernel at most."""
    yield problem
    for k, cut in enumerate(problem.cuts):
        later = replace(problem, cuts=problem.cuts[k:])
        yield from with_some_cut(with_cut(later, cut))


@pytest.mark.slow
def test_a_kernel_is_cut_where_the_memory_cap_asks_for_it() -> None:
    """Below the floor of whole kernels a schedule is found wherever a set of cuts has one, at the
    price of its cuts; the bound holds.
    """
    needed = best_found = cut_apart = 0
    for seed in range(100):
        problem, caps = case(seed)
        caps = Caps(max_compute_move=caps.max_compute_move)
        problem = with_cuts(with_kernels(problem, seed), seed)
        mover = ComputeMover(Instance.of(problem))
        if len(mover.captured) + len(problem.cuts) != len(problem.captured_order):
            continue  # a collective between two nodes of a kernel, which no compiler makes one of
        least_whole = least_memory(problem, caps)[0]
        least = {
            there: min(
                peak
                for order in whole_kernels(there, caps.max_compute_move)
                if (peak := least_of_captured(replace(there, reordered=order), caps)) is not None
            )
            for there in with_some_cut(problem)
        }
        assert least[problem] == least_whole, seed
        if min(least.values()) == least_whole:
            continue
        needed += 1
        tight = replace(caps, memory_cap_bytes=min(least.values()))
        answer = solve(problem, tight, STRICT)
        assert answer.best is not None, seed
        assert verify(problem, answer.best.schedule, tight) == ()
        made = cuts_made(problem, answer.best.schedule)
        cut_apart += bool(made)  # else the kernel stands together, in another order
        free = simulate(replace(problem, cuts=()), answer.best.schedule)
        assert (
            free.compute_ticks + sum(extra_ticks(made).values())
            == simulate(problem, answer.best.schedule).compute_ticks
        )
        best = min(
            v
            for there in least
            if (v := best_of(there, tight, whole_kernels(there, caps.max_compute_move))) is not None
        )
        assert answer.bound_ticks <= min(best[0], answer.best.step_time_ticks), seed
        best_found += answer.best.step_time_ticks <= best[0]
        assert answer.peak_bound_bytes <= answer.best.peak_memory_bytes
    assert cut_apart >= 2
    assert best_found >= needed * 0.5


def test_the_least_memory_is_that_of_all_orders() -> None:
    lower = 0
    for seed in range(40):
        problem, caps = case(seed)
        caps = Caps(max_compute_move=caps.max_compute_move)
        orders = orders_within(problem, caps.max_compute_move)
        peaks = [least_of_captured(replace(problem, reordered=order), caps) for order in orders]
        least = min(peak for peak in peaks if peak is not None)
        assert least_memory(problem, caps) == (least, least), seed
        lower += least < (least_of_captured(problem, caps) or 0)
    assert lower >= 3


@pytest.mark.slow
def test_what_least_memory_says_can_be_done_is_done() -> None:
    """However little work is allowed: the order and the launches that have that peak are known
    (seed 2 had its launches forgotten).
    """
    for seed in range(30):
        rng = random.Random(seed)
        problem = random_problem(rng, max_collectives=4, max_compute=8)
        caps = Caps(
            max_prefetch=rng.choice((None, 1, 2, 4)),
            max_topo_span=rng.choice((None, 3)),
            max_compute_move=rng.choice((3, 200)),
        )
        quick = SolveOptions(budget=0.02, seed=seed)
        least, _ = least_memory(problem, caps, quick)
        answer = solve(problem, replace(caps, memory_cap_bytes=least), quick)
        assert answer.best is not None, seed
        assert answer.best.peak_memory_bytes <= least
        assert verify(problem, answer.best.schedule, caps) == ()


def test_how_often_the_rule_alone_is_enough() -> None:
    """Where another order is faster: the rule around the buckets of the search finds the best one
    more often than not.
    """
    matters = found = 0
    gained = 0.0
    for seed in range(100):
        problem, caps = case(seed)
        caps = replace(caps, memory_cap_bytes=None, max_prefetch=None)
        best, captured = (
            best_of(problem, caps, orders_within(problem, caps.max_compute_move)),
            best_schedule(problem, caps),
        )
        if best is None or captured is None or best[0] == captured.step_time_ticks:
            continue
        small = problem_arrays(problem)
        search = Search(
            instance=Instance(problem=problem, arrays=small, caps=caps),
            report=lambda *_: None,
            max_evaluations=2_000,
            floor_bytes=0,
        )
        search.portfolio()
        assert search.best is not None
        mover = ComputeMover(Instance(problem=problem, arrays=small))
        moved = mover.improve(Moved(blocks=mover.captured, candidate=search.best), caps, 0)
        ticks = moved.candidate.figures.step_time_ticks
        matters += 1
        found += ticks == best[0]
        gained += max(captured.step_time_ticks - ticks, 0) / (captured.step_time_ticks - best[0])
    assert matters >= 20
    assert found >= matters * 0.5
    assert gained >= matters * 0.6


def test_the_bound_is_that_of_all_orders_that_the_cap_allows() -> None:
    """As captured the reduction begins behind 102 ticks of compute that it does not wait for."""
    b = ByHand(prices={"reduce_scatter": line(200)})
    x = b.input("x", 512)
    others = [b.compute(f"f{i}", ticks, x, size=512) for i, ticks in enumerate((100, 1, 1))]
    grad = b.compute("g", 1, x, size=512)
    problem = b.output(*others, b.wait("w", b.start("reduce_scatter", "rs", grad, 512, 512)))
    for most, ticks in ((0, 103 + 200), (3, 1 + 200)):
        told: list[float] = []
        result = solve(
            problem,
            Caps(max_compute_move=most),
            progress=lambda _stage, _best_us, bound_us, _share, told=told: told.append(bound_us),
        )
        assert max(told) <= ticks_to_us(ticks)
        assert result.best is not None
        assert result.best.step_time_ticks == ticks
        assert (result.status, result.bound_ticks) == ("optimal", ticks)
