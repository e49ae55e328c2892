"""Updates of parameters beside the last reductions and the first gathers: worked out by hand, and
between limits on random steps.
"""

import random

import pytest

from apsched.problem.problem import Problem
from apsched.schedule.optimizer_beside import last_reductions, step_beside_optimizer
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from tests.helpers.problems.by_hand import ByHand, line, schedule
from tests.helpers.problems.random_plans import named
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import random_problem

KIB = 1024


def backward(reduction_ticks: int = 10) -> Problem:
    """Gradients of b, then of a, each computed in 5 ticks and reduced in 10."""
    hand = ByHand(prices={"reduce_scatter": line(reduction_ticks)})
    saved = hand.input("saved", KIB)
    results = []
    for name in ("b", "a"):
        gradient = hand.compute(f"grad_{name}", 5, saved, size=KIB)
        started = hand.start("reduce_scatter", f"rs_{name}", gradient, KIB, KIB, module=name)
        results.append(hand.wait(f"wait_{name}", started))
    return hand.output(*results)


BACKWARD = "saved grad_b rs_b grad_a rs_a wait_b wait_a output"
"""Computes until 10; b is reduced at 15, a at 25."""


def forward() -> Problem:
    """Gathers of a and b, 4 ticks each, for 6 ticks of compute each."""
    hand = ByHand(prices={"all_gather": line(4)})
    done = None
    for name in ("a", "b"):
        shard = hand.input(f"shard_{name}", KIB, kept=True)
        started = hand.start("all_gather", f"ag_{name}", shard, KIB, 2 * KIB, module=name)
        gathered = hand.wait(f"wait_{name}", started)
        before = () if done is None else (done,)
        done = hand.compute(f"f_{name}", 6, gathered, *before, size=KIB)
    return hand.output(done)


FORWARD = "shard_a shard_b ag_a ag_b wait_a f_a wait_b f_b output"
"""4 of waiting, 12 of compute: 16."""


def beside(updates: dict[str, int], rest: int = 0, text: str = FORWARD) -> int:
    ahead, behind = forward(), backward()
    return step_beside_optimizer(
        (ahead, schedule(ahead, text)), (behind, schedule(behind, BACKWARD)), updates, rest
    )


def test_without_updates_the_step_is_both_graphs() -> None:
    assert beside({}) == 25 + 16


@pytest.mark.parametrize(
    ("updates", "rest", "expected"),
    [
        # b reduced at 15: its update 15-19 hides behind the reduction of a, which ends at 25; the
        # gather of a waits for a's update 25-28, compute for that gather: 28-32; then 12
        ({"a": 3, "b": 4}, 0, 44),
        # the update of b, 15-33, ends behind the reduction of a; a's gather runs 36-40
        ({"a": 3, "b": 18}, 0, 52),
        # updates of parameters that nothing reduces begin with the tail: 10-17, b 17-21
        ({"a": 3, "b": 4}, 7, 44),
        # rest 10-30; then b 30-34 is left, and a 30-33 is first: its gather runs 33-37 beside b's
        # update 33-37
        ({"a": 3, "b": 4}, 20, 49),
    ],
)
def test_by_hand(updates: dict[str, int], rest: int, expected: int) -> None:
    assert beside(updates, rest) == expected


def test_a_bucket_is_launched_behind_the_updates_of_all_its_members() -> None:
    """Both are updated at 25 + 3, the bucket takes 4: compute begins at 32 and takes 12."""
    ahead, behind = forward(), backward()
    together = "shard_a shard_b in:0 start:0 wait:0 out:ag_a f_a out:ag_b f_b output"
    steps = schedule(ahead, together, "ag_a ag_b")
    order = schedule(behind, BACKWARD)
    assert step_beside_optimizer((ahead, steps), (behind, order), {"a": 3, "b": 4}) == 44
    # with a reduction of b that ends last, its update counts, too
    late = schedule(behind, "saved grad_b grad_a rs_a rs_b wait_a wait_b output")
    assert step_beside_optimizer((ahead, steps), (behind, late), {"a": 3, "b": 4}) == 30 + 4 + 16


def test_updates_do_not_put_off_a_launch() -> None:
    """b is reduced at 15, then a from 15 to 25, beside updates that nothing reduces; a is updated
    at 28, its gather ends at 32 beside the update of b, and 12 of compute follow.
    """
    ahead, behind = forward(), backward()
    late = schedule(behind, "saved grad_b rs_b grad_a wait_b rs_a wait_a output")
    pair = (ahead, schedule(ahead, FORWARD)), (behind, late)
    assert step_beside_optimizer(*pair, {"a": 3, "b": 4}, 10) == 44


def test_the_all_reduce_behind_a_reduce_scatter_counts() -> None:
    hand = ByHand()
    gradient = hand.compute("grad", 5, size=KIB)
    first = hand.start("reduce_scatter", "rs", gradient, KIB, KIB, module="w")
    second = hand.start("all_reduce", "ar", hand.wait("w1", first), KIB, KIB, module="w", group="r")
    other = hand.start("all_reduce", "on", gradient, KIB, KIB, module="w", on_path=True, group="t")
    problem = hand.output(hand.wait("w2", second), hand.wait("w3", other))
    assert last_reductions(problem) == {problem.collective_of_node[second]: ("w",)}


@pytest.mark.parametrize("seed", range(300))
def test_between_limits_on_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    pair = [named(random_problem(rng)) for _ in range(2)]
    orders = [
        as_captured(p.num_nodes) if rng.random() < 0.2 else random_schedule(p, rng.randrange(1000))
        for p in pair
    ]
    ahead, behind = zip(pair, orders, strict=True)
    names = [name for found in last_reductions(behind[0]).values() for name in found]
    updates = {name: rng.randrange(50_000) for name in names}
    rest = rng.choice((0, 10_000))
    times = [simulate(*one) for one in (ahead, behind)]
    in_turn = sum(one.step_time_ticks for one in times)
    work = sum(one.compute_ticks for one in times) + rest + sum(updates.values())
    found = step_beside_optimizer(ahead, behind, updates, rest)
    assert max(in_turn, work) <= found <= in_turn + rest + sum(updates.values())
    if not updates and not rest:
        assert found == in_turn
