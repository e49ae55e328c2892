"""Compute may move where that has something to hide, and something to hide it with; elsewhere it
stays as captured.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from apsched.api import solve
from apsched.config import Caps, SolveOptions
from apsched.pipeline.solve_graph import SolveRequest, caps_of_problem
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.result import SolveResult
from apsched.schedule.verify import verify
from apsched.solver.arrays.instance import Instance
from apsched.solver.baselines import baselines
from apsched.solver.compute_move_cap import moving_where_it_pays
from apsched.solver.reorder.min_memory import is_small, least_memory
from apsched.solver.requested import completed, solve_requested
from apsched.solver.solve import solve as solve_in_order
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.layered import Layer, layered
from tests.helpers.problems.strategies import layered_problem, random_problem

QUICK = SolveOptions(budget=1)


@pytest.mark.parametrize("on_path", [False, True])
def test_compute_moves_where_a_collective_is_on_the_path(on_path: bool) -> None:
    problem = layered([Layer(ticks=(40, 60), on_path=on_path)] * 12, backward=True, ticks=(70, 1))
    result, captured = (
        solve(problem, options=QUICK),
        solve(problem, max_compute_move=0, options=QUICK),
    )
    assert result.caps.max_compute_move == 200
    assert result.chosen is not None
    assert (result.chosen.moved_nodes > 0) == on_path
    assert (result.answer.fastest_ticks < captured.answer.fastest_ticks) == on_path


def with_an_end(gradient: int, last: int) -> Problem:
    """Five gradients, of transfers of 10 ticks, beside a chain; behind its end one that takes
    ``last``.
    """
    b = ByHand(prices={"reduce_scatter": line(0, 10)})
    x = b.input("x", 512)
    outputs = []
    for i in range(5):
        grad = b.compute(f"g{i}", gradient, x, size=1024)
        outputs.append(b.wait(f"v{i}", b.start("reduce_scatter", f"rs{i}", grad, 1024, 512)))
        x = b.compute(f"c{i}", 100, x, size=512)
    x = b.compute("embedding", 5, x, size=last * 1024 // 10)
    return b.output(
        *outputs,
        b.wait("v", b.start("reduce_scatter", "rs", x, last * 1024 // 10, last * 512 // 10)),
    )


@pytest.mark.parametrize("seed", [543, 985, 1358])
def test_where_memory_is_short_compute_may_move_though_a_schedule_as_captured_fits(
    seed: int,
) -> None:
    """The cap is the peak of a baseline, below that of launches just in time."""
    problem = random_problem(random.Random(seed), max_collectives=14, max_compute=30)
    captured = Caps(max_compute_move=0)
    made = baselines(Instance.of(problem, captured))
    cap_bytes = min(one.peak_memory_bytes for one in made)
    caps = Caps(memory_cap_bytes=cap_bytes, max_compute_move=200)
    assert moving_where_it_pays(problem, caps).max_compute_move == 0
    options = SolveOptions(budget=0.0)
    found = solve_requested(problem, caps, options)
    fixed = solve_requested(problem, replace(caps, max_compute_move=0), options)
    assert found.best is not None
    assert fixed.best is not None
    assert verify(problem, found.best.schedule, caps) == ()
    assert found.best.step_time_ticks < fixed.best.step_time_ticks


def with_a_lower_peak_in_another_order(
    seed: int, num_layers: int = 9
) -> tuple[Problem, Caps, int, int]:
    """Return a problem whose compute stays as captured, its caps, and its least peaks as captured
    and in any order.
    """
    problem = layered_problem(random.Random(seed), num_layers=num_layers)
    caps = Caps(max_compute_move=200)
    assert not is_small(problem)
    assert moving_where_it_pays(problem, caps).max_compute_move == 0
    captured, _ = least_memory(problem, replace(caps, max_compute_move=0), QUICK)
    least, _ = least_memory(problem, caps, QUICK)
    assert least < captured
    return problem, caps, captured, least


@pytest.mark.parametrize("seed", [8, 23])
def test_the_floor_is_that_of_any_order_though_compute_stays_as_captured(seed: int) -> None:
    problem, caps, _, least = with_a_lower_peak_in_another_order(seed)
    free = solve_requested(problem, caps, QUICK)
    assert free.floor_memory_bytes <= least
    request = SolveRequest(
        caps=caps, options=QUICK, memory_cap=MemoryCap(size_bytes=0, above_floor=True)
    )
    at_floor = caps_of_problem(problem, request, Progress(quiet=True))
    assert at_floor.memory_cap_bytes == least
    assert solve_requested(problem, at_floor, QUICK).best is not None


def test_without_a_memory_cap_a_search_alone_leaves_the_floor_of_other_orders_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a search over kept parameters solves dozens of choices; the answer that it takes is
    completed, with the floor of other orders. Under a memory cap that floor tells which choices
    fit.
    """
    problem, caps, captured, least = with_a_lower_peak_in_another_order(23)
    whole = solve_requested(problem, caps, QUICK)
    with monkeypatch.context() as patch:
        patch.setattr("apsched.solver.requested.least_memory", lambda *_: 1 / 0)
        alone = solve_requested(problem, caps, QUICK, search_alone=True)
    assert alone.floor_memory_bytes > least
    assert alone.lacks_floor
    assert not alone.is_final
    assert completed(alone, problem, caps, QUICK) == whole
    assert whole.floor_memory_bytes <= least
    assert whole.is_final
    caps = replace(caps, memory_cap_bytes=2 * captured)
    capped = solve_requested(problem, caps, QUICK, search_alone=True)
    assert capped.floor_memory_bytes <= least
    assert capped.is_final


def test_bounds_that_nothing_claims_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the order as captured, while the answer claims the bound of any order: rows of memory take
    as long as the search.
    """
    problem, caps, captured, _ = with_a_lower_peak_in_another_order(8)
    monkeypatch.setattr("apsched.solver.bounds.best._in_memory", lambda _: 1 / 0)
    monkeypatch.setattr("apsched.solver.bounds.best.launch_sequence_bound", lambda *_: 1 / 0)
    for cap_bytes in (None, captured, 2 * captured):
        capped = replace(caps, memory_cap_bytes=cap_bytes)
        assert solve_requested(problem, capped, QUICK, search_alone=True).best is not None
    with pytest.raises(ZeroDivisionError):
        solve_requested(problem, replace(caps, max_compute_move=0), QUICK)


@pytest.mark.parametrize(("seed", "num_layers"), [(4, 9), (8, 9), (28, 9), (23, 12)])
def test_compute_moves_near_the_least_peak_as_captured_where_another_order_has_less(
    seed: int, num_layers: int
) -> None:
    """The last only with buckets that are searched around both orders."""
    problem, caps, captured, _ = with_a_lower_peak_in_another_order(seed, num_layers)
    caps = replace(caps, memory_cap_bytes=captured)
    found = solve_requested(problem, caps, QUICK).best
    fixed = solve_requested(problem, replace(caps, max_compute_move=0), QUICK).best
    assert found is not None
    assert fixed is not None
    assert verify(problem, found.schedule, caps) == ()
    assert found.step_time_ticks < fixed.step_time_ticks


def test_where_nothing_fits_as_captured_that_order_is_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = random_problem(random.Random(6), max_collectives=14, max_compute=30)
    caps, solved = Caps(max_compute_move=200), list[int | None]()
    captured, bound = least_memory(problem, replace(caps, max_compute_move=0), QUICK)
    least, _ = least_memory(problem, caps, QUICK)
    assert least < captured == bound

    def counted(problem: Problem, caps: Caps, **options: Any) -> SolveResult:
        solved.append(caps.max_compute_move)
        return solve_in_order(problem, caps, **options)

    monkeypatch.setattr("apsched.solver.requested.solve_any", counted)
    for cap_bytes in (least, captured):
        solve_requested(problem, replace(caps, memory_cap_bytes=cap_bytes), QUICK)
    assert solved == [200, 0]
    monkeypatch.setattr("apsched.solver.large.search_bound", lambda _: 1 / 0)
    short = replace(caps, memory_cap_bytes=least)
    solve_requested(problem, short, QUICK, search_alone=True)  # no bound of that order either


@pytest.mark.parametrize(
    ("gradient", "last", "max_move", "moves"),
    [
        (40, 120, 200, True),
        (40, 120, None, True),
        (40, 120, 9, True),  # three gradients make up for 90
        (40, 120, 4, False),  # and one for 30
        (10, 120, 200, False),  # what they hide they add behind it
        (21, 120, 200, False),  # five times 11 are less than half
        (22, 120, 200, True),
    ],
)
def test_the_end_pays_where_gradients_near_it_make_up_for_half_of_it(
    gradient: int, last: int, max_move: int | None, moves: bool
) -> None:
    problem = with_an_end(gradient, last)
    assert moving_where_it_pays(problem, Caps(max_compute_move=max_move)).max_compute_move == (
        max_move if moves else 0
    )
