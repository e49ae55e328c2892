"""Compute in another order: the compact form, the rules that find orders, and what the solver makes
of them.
"""

import random
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.analysis.moved_compute import moved_compute
from apsched.schedule.schedule import StepKind
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import ProblemArrays, problem_arrays
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.memory import memory_bound_of_any_order
from apsched.solver.program.evaluate import evaluate
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.lower_peak import lower_peak
from apsched.solver.reorder.min_memory import is_small, least_memory, least_memory_with
from apsched.solver.reorder.reorder import ComputeMover, Moved
from apsched.solver.search.decoder import Decoder
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.search.local_search import Search
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.layered import Layer, layered
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import (
    layered_problem,
    random_caps,
    random_problem,
    with_kernels,
)

SEEDS = range(40)
QUICK = SolveOptions(budget=1)


def random_order(problem: Problem, seed: int) -> np.ndarray:
    """Return the compute order in an order that the dependences allow."""
    place = {node: k for k, node in enumerate(problem.captured_order)}
    steps = random_schedule(problem, seed).steps
    return np.array(
        [place[s.index] for s in steps if s.kind is StepKind.NODE and s.index in place],
        dtype=np.int64,
    )


def same(a: ProblemArrays, b: ProblemArrays) -> list[str]:
    """Return the fields in which two compact forms differ."""
    pairs = [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    return [
        name
        for name, x, y in pairs
        if not (np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y)
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sizes", [{}, {"sized": 0.6, "chained": 0.5}])
def test_arrays_say_what_the_problem_says(seed: int, sizes: dict[str, float]) -> None:
    problem = random_problem(random.Random(seed), max_collectives=6, **sizes)
    orders = Orders(Instance.of(problem))
    for order in (
        np.arange(len(problem.compute_order)),
        random_order(problem, seed),
        random_order(problem, seed + 1000),
    ):
        assert same(orders.arrays_of(order), problem_arrays(orders.problem_of(order))) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_are_those_of_the_simulation(seed: int) -> None:
    """Whatever the order, the evaluator and the simulation agree to the tick and the byte."""
    problem = random_problem(random.Random(seed), max_collectives=6)
    small = problem_arrays(problem)
    orders = Orders(Instance(problem=problem, arrays=small))
    order = random_order(problem, seed)
    moved, places = orders.problem_of(order), orders.arrays_of(order)
    search = Search(
        instance=Instance(problem=moved, arrays=places, caps=Caps()),
        report=lambda *_: None,
        max_evaluations=50,
        floor_bytes=0,
    )
    search.portfolio()
    program = search.program()
    schedule = expand(Instance(problem=moved, arrays=places), program)
    assert verify(problem, schedule, Caps(max_compute_move=None)) == ()
    timeline, figures = simulate(problem, schedule), evaluate(places, program)
    assert (timeline.step_time_ticks, timeline.peak_memory_bytes) == (
        figures.step_time_ticks,
        figures.peak_memory_bytes,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("max_move", [1, 3, None])
def test_rules_keep_dependences_kernels_and_the_cap_on_moves(
    seed: int, max_move: int | None
) -> None:
    rng = random.Random(seed)
    problem = with_kernels(layered_problem(rng, num_layers=4), seed)
    small, caps = problem_arrays(problem), Caps(max_compute_move=max_move)
    mover = ComputeMover(Instance(problem=problem, arrays=small))
    search = Search(
        instance=Instance(problem=problem, arrays=small, caps=caps),
        report=lambda *_: None,
        max_evaluations=50,
        floor_bytes=0,
    )
    search.portfolio()
    assert search.best is not None
    found = mover.improve(Moved(blocks=mover.captured, candidate=search.best), caps, 0)
    assert found.candidate.figures.step_time_ticks <= search.best.figures.step_time_ticks
    moved = mover.moved(found.blocks)
    best = found.candidate
    program = Decoder(Pricer(moved), caps).program(best.labels, best.policy, best.steer_bytes)
    schedule = expand(moved, program)
    assert verify(problem, schedule, caps) == ()
    assert simulate(problem, schedule).step_time_ticks == best.figures.step_time_ticks
    compute_order, block_of = (
        mover.compute_order(found.blocks).tolist(),
        mover.orders.precedence.block_of,
    )
    together = [k for k in range(len(compute_order) - 1) if block_of[k] == block_of[k + 1]]
    assert all(compute_order.index(k + 1) == compute_order.index(k) + 1 for k in together)
    assert together
    assert all(
        problem.kernels[problem.captured_order[k]]
        == problem.kernels[problem.captured_order[k + 1]]
        >= 0
        for k in together
    )


def test_moving_fills_stalls_and_keeps_the_memory() -> None:
    """Weight gradients hide the all-reduce on the path of every layer, at the least memory as
    captured.
    """
    num_layers = 12
    problem = layered(
        [Layer(ticks=(40, 60), on_path=True)] * num_layers, backward=True, ticks=(30, 1)
    )
    assert not is_small(problem)
    cap, _ = least_memory(problem, Caps(), QUICK)
    before, after = (
        solve(problem, Caps(memory_cap_bytes=cap, max_compute_move=move), QUICK)
        for move in (0, None)
    )
    assert after.best is not None
    assert (
        verify(problem, after.best.schedule, Caps(memory_cap_bytes=cap, max_compute_move=None))
        == ()
    )
    assert after.fastest_ticks <= before.fastest_ticks - 20 * (num_layers - 1)


LARGE = 64 * 512


def on_the_wire(b: ByHand, x: int) -> int:
    """Return a result that takes 100 ticks on the path of compute."""
    start = b.start("all_reduce", "ar", x, 512, 512, on_path=True, bucketable=False)
    return b.wait("arrived", start)


def large_result_in_the_stall() -> tuple[Problem, int]:
    """In the stall, ``big`` would leave a large result beside that of ``f``; ``little`` leaves no
    more than it takes.
    """
    b = ByHand(prices={"all_reduce": line(100)})
    x, taken = b.input("x", 512), b.input("taken", LARGE)
    f = b.compute("f", 10, on_the_wire(b, b.compute("head", 10, x, size=512)), size=LARGE)
    used = b.compute("used", 10, f, size=512)
    big = b.compute("small", 10, b.compute("big", 100, x, size=LARGE), size=512)
    little = b.compute("little", 100, taken, size=LARGE)
    return b.output(used, big, little), 2 * LARGE + 10 * 512


def large_result_for_a_large_one() -> tuple[Problem, int]:
    """``big`` frees as much as it allocates, but needs both at once, beside what ``f`` takes."""
    b = ByHand(prices={"all_reduce": line(100)})
    x, taken, remade = b.input("x", 512), b.input("taken", LARGE), b.input("remade", LARGE)
    f = b.compute("f", 10, on_the_wire(b, b.compute("head", 10, x, size=512)), taken, size=512)
    big = b.compute("small", 10, b.compute("big", 100, remade, size=LARGE), size=512)
    return b.output(f, big, b.compute("little", 100, x, size=512)), 2 * LARGE + 10 * 512


def large_input_put_off() -> tuple[Problem, int]:
    """Put off until the stall, ``big`` would keep its input beside what ``a`` takes and makes;
    ``little`` keeps none.
    """
    b = ByHand(prices={"all_reduce": line(100)})
    x, saved, taken = b.input("x", 512), b.input("saved", LARGE), b.input("taken", LARGE)
    big = b.compute("big", 100, saved, size=512)
    little = b.compute("little", 100, x, size=512)
    a = b.compute("used", 10, b.compute("a", 10, taken, size=LARGE), size=512)
    f = b.compute("f", 10, on_the_wire(b, a), size=512)
    return b.output(f, big, little), 2 * LARGE + 10 * 512


@pytest.mark.parametrize(
    "case", [large_result_in_the_stall, large_result_for_a_large_one, large_input_put_off]
)
def test_what_fills_a_stall_is_what_memory_has_room_for(case: Callable) -> None:
    """The first block that could fill it would go over the cap, so that the other one does."""
    problem, cap = case()
    caps = Caps(memory_cap_bytes=cap, max_compute_move=None)
    instance = Instance.of(problem, caps)
    search = Search(instance=instance, report=lambda *_: None, max_evaluations=50, floor_bytes=0)
    search.portfolio()
    assert search.best is not None
    mover = ComputeMover(Instance.of(problem))
    start = Moved(blocks=mover.captured, candidate=search.best)
    found = mover.improve(start, caps, 0).candidate.figures
    assert found.peak_memory_bytes <= cap
    assert found.step_time_ticks == search.best.figures.step_time_ticks - 100


def test_compute_moves_only_for_more_than_the_slack_or_for_less_memory() -> None:
    """Stalls of three parts in a thousand: without any slack the compute moves; with a slack of
    five it stays as captured, or moves for 2 % of the peak.
    """
    problem = layered([Layer(ticks=(2000, 3000), on_path=True)] * 12, backward=True, ticks=(30, 1))
    assert not is_small(problem)
    as_captured = solve(problem, Caps(), SolveOptions(budget=1, time_slack=0.0))
    strict, slack = (
        solve(problem, Caps(max_compute_move=None), SolveOptions(budget=1, time_slack=share))
        for share in (0.0, 0.005)
    )
    assert strict.best is not None
    assert slack.best is not None
    assert strict.fastest_ticks < as_captured.fastest_ticks
    assert slack.best.step_time_ticks <= 1.005 * strict.fastest_ticks
    assert moved_compute(problem, strict.best.schedule)
    within = solve(problem, Caps(), SolveOptions(budget=1, time_slack=0.005)).best
    assert within is not None
    if moved_compute(problem, slack.best.schedule):
        assert slack.best.peak_memory_bytes < 0.98 * within.peak_memory_bytes


@pytest.mark.parametrize("seed", range(25))
def test_memory_bound_holds_for_every_order(seed: int) -> None:
    """No random schedule, whose compute is anywhere and kernels taken apart, has a lower peak; nor
    has what lower_peak finds.
    """
    problem = with_kernels(
        random_problem(random.Random(seed), max_collectives=5, max_compute=8), seed
    )
    small = problem_arrays(problem)
    mover = ComputeMover(Instance(problem=problem, arrays=small))
    bound = memory_bound_of_any_order(mover.orders, None)
    for k in range(20):
        assert (
            bound <= simulate(problem, random_schedule(problem, 100 * seed + k)).peak_memory_bytes
        )
    found = lower_peak(mover, Caps(max_compute_move=None), bound)
    known = just_in_time(Instance(problem=problem, arrays=small))
    assert known is not None
    assert bound <= known.peak_memory_bytes
    peaks = [known.peak_memory_bytes]
    for lower in found:
        floor = just_in_time(mover.moved(lower.blocks).within(Caps()))
        assert floor is not None
        assert bound <= lower.peak_bytes == floor.peak_memory_bytes < peaks[-1]
        peaks.append(lower.peak_bytes)


def test_the_peak_is_lowered_at_each_place_where_it_stands() -> None:
    """Three times two large results are made before either is used: as captured the peak stands at
    three places, and only the last of three moves lowers it.
    """
    b = ByHand()
    x = b.input("x", 512)
    for i in range(3):
        large = [b.compute(f"large{i}_{j}", 1, x, size=64 * 512) for j in range(2)]
        small = [b.compute(f"small{i}_{j}", 1, node, size=512) for j, node in enumerate(large)]
        x = b.compute(f"joined{i}", 1, *small, size=512)
    shard = b.input("w", 512, kept=True)
    gathered = b.wait("wait", b.start("all_gather", "gather", shard, 512, 512))
    problem = b.output(b.compute("last", 1, x, gathered, size=512))
    caps = Caps(max_compute_move=None)
    (as_captured, _), (least, _) = (least_memory(problem, c, QUICK) for c in (Caps(), caps))
    assert least < as_captured - 60 * 512
    found = lower_peak(ComputeMover(Instance.of(problem)), caps, 0)
    assert min((lower.peak_bytes for lower in found), default=as_captured) == least


def test_a_cap_below_what_captured_order_needs_goes_to_an_order_that_keeps_it() -> None:
    """The order as captured where that is enough, else the first of the lower ones within the cap,
    or the lowest.
    """
    several = 0
    for seed in range(30):
        problem = random_problem(random.Random(seed), max_collectives=3, max_compute=16)
        small = problem_arrays(problem)
        floor = least_memory_with(
            Instance(problem=problem, arrays=small, caps=Caps(max_compute_move=None)),
            ComputeMover(Instance(problem=problem, arrays=small)),
            QUICK,
        )
        assert floor.lowered_within(None) is None
        assert floor.lowered_within(floor.as_captured_bytes) is None
        lower = [found for found in floor.lowered if found.peak_bytes < floor.as_captured_bytes]
        for found in lower:
            assert floor.lowered_within(found.peak_bytes) is found
        if lower:
            assert floor.lowered_within(lower[-1].peak_bytes - 1) is lower[-1]
        several += len(lower) > 1
    assert several


def test_least_memory_is_lower_where_compute_may_move() -> None:
    """And the solver finds a schedule there, which it cannot as captured."""
    lower = 0
    for seed in range(40):
        problem = random_problem(random.Random(seed), max_collectives=4, max_compute=8)
        as_captured, _ = least_memory(problem, Caps())
        moved, bound = least_memory(problem, Caps(max_compute_move=None))
        assert bound <= moved <= as_captured
        if moved < as_captured:
            lower += 1
            answer = solve(problem, Caps(memory_cap_bytes=moved, max_compute_move=None), QUICK)
            assert answer.best is not None
            assert answer.best.peak_memory_bytes <= moved
            assert solve(problem, Caps(memory_cap_bytes=moved), QUICK).best is None
    assert lower


@pytest.mark.parametrize("seed", range(25))
def test_what_moves_is_never_slower_than_what_does_not(seed: int) -> None:
    """Small problems under random caps: moving only adds schedules; the answer says so, and keeps
    every cap.
    """
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=4, max_compute=7)
    caps = random_caps(rng, problem)
    before, after = (
        solve(problem, caps, QUICK),
        solve(problem, replace(caps, max_compute_move=2), QUICK),
    )
    if before.best is None:
        return
    assert after.best is not None
    assert after.fastest_ticks <= before.fastest_ticks
    assert after.bound_ticks <= before.fastest_ticks
    assert verify(problem, after.best.schedule, replace(caps, max_compute_move=2)) == ()
