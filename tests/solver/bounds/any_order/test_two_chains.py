"""The bound of two chains: never above the best of all orders, and above all compute where each
chain waits for the other.
"""

import random
from dataclasses import replace

import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order import two_chains
from apsched.solver.bounds.any_order.bound import loose_program
from apsched.solver.bounds.any_order.jobs import ends_of
from apsched.solver.bounds.any_order.two_chains import two_chains_bound
from apsched.solver.bounds.best import any_order_bound
from apsched.solver.bounds.linear_program import costs_of
from tests.helpers.oracle import best_schedule, orders_within
from tests.helpers.problems.chains import chains_of, random_chains

ANYWHERE = Caps(max_compute_move=None)


def two_chains_of(problem: Problem) -> int | None:
    instance = Instance.of(problem, ANYWHERE)
    loose = loose_program(instance, Orders(instance), costs_of(instance))
    bound = two_chains_bound(instance, loose, ends_of(loose, None))
    return None if bound is None else bound.ticks


def best_in_any_order(problem: Problem) -> int:
    found = []
    for order in orders_within(problem, None):
        best = best_schedule(replace(problem, reordered=order), ANYWHERE)
        assert best is not None
        found.append(best.step_time_ticks)
    return min(found)


@pytest.mark.parametrize("chunk", range(4))
def test_the_bound_is_never_above_the_best_of_all_orders(chunk: int) -> None:
    met = 0
    for seed in range(chunk * 12, (chunk + 1) * 12):
        rng = random.Random(seed)
        problem = random_chains(
            rng,
            num_stages=rng.randint(2, 3),
            late=rng.choice((0.0, 0.3)),
            num_gathers=rng.choice((0, 1)),
        )
        best, bound = best_in_any_order(problem), two_chains_of(problem)
        assert bound is not None
        assert bound <= best, seed
        met += bound == best
    assert met >= 3


def test_a_short_stage_does_not_hide_a_long_transfer() -> None:
    """Stages of 6 and 10 with transfers of 8: a transfer behind one chain runs during a stage of
    the other, which is 2 too short every other time.
    """
    problem = chains_of(((10, 6, 10), (10, 6, 10)), transfer_ticks=8)
    compute = 2 * (10 + 6 + 10)
    best = best_in_any_order(problem)
    assert compute < best
    assert two_chains_of(problem) == best
    bound = any_order_bound(Instance.of(problem, ANYWHERE), Orders(Instance.of(problem)))
    assert (bound.ticks, bound.source) == (best, "two chains between collectives")


def test_transfers_of_one_stream_come_one_after_the_other() -> None:
    """Long transfers: the stream is the narrow place, and the first launch comes behind a stage."""
    problem = chains_of(((1, 1, 1), (1, 1, 1)), transfer_ticks=20)
    assert two_chains_of(problem) == best_in_any_order(problem) == 1 + 4 * 20 + 1


@pytest.mark.parametrize("num_launches", [2, 3])
def test_a_launch_may_go_behind_others_of_the_other_chain(num_launches: int) -> None:
    """The first chain runs while the second waits. With its launch at once it would block the
    stream for the next launches of the second, which has much behind them.
    """
    problem = chains_of(((29, 0), (*[1] * num_launches, 90)), transfer_ticks=30)
    best = best_in_any_order(problem)
    assert best == num_launches * (1 + 30) + 90
    assert two_chains_of(problem) == best


def test_a_node_counts_in_one_chain_only() -> None:
    """Files name chains: in one that is wrong both lead through the same nodes."""
    problem = chains_of(((10, 10, 10, 10, 10),), transfer_ticks=1)
    wrong = []
    for name, chain in zip(problem.node_names, problem.chains, strict=True):
        wrong.append(chain if chain < 0 else int(name[-1]) % 2)
    bound = two_chains_of(replace(problem, chains=tuple(wrong)))
    assert bound is not None
    assert bound <= 5 * 10 + 4 * 1


def test_other_numbers_of_chains_have_no_such_bound() -> None:
    for works in (((5, 5),), ((5, 5),) * 3):
        assert two_chains_of(chains_of(works, transfer_ticks=4)) is None
    assert two_chains_of(chains_of(((5,), (5, 5)), transfer_ticks=4)) is None


def test_too_many_labels_are_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chains_of(((10, 6, 10), (10, 6, 10)), transfer_ticks=8)
    monkeypatch.setattr(two_chains, "_MOST", 0)
    assert two_chains_of(problem) is None
