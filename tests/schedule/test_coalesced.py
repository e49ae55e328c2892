"""Coalesced buckets: what they cost in time and bytes, which are legal, and that files keep their
form.
"""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from tests.helpers.oracle import best_schedule
from tests.helpers.problems.by_hand import ONE_TICK_PER_KIB, ByHand, line, schedule
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import (
    a_problem_with_forms,
    problem_for_coalescing,
    random_caps,
)

KIB = 1024
MEMBER_TICKS = 7


def two_gathers_and_two_reductions() -> Problem:
    """Gathers that b and c need, and the reductions of their gradients."""
    prices = {"all_gather": line(10, 1), "reduce_scatter": line(5, 1)}
    hand = ByHand(prices=prices, copy_price=ONE_TICK_PER_KIB, bucket_launch_ticks=2)
    u, v = hand.input("u", KIB, kept=True), hand.input("v", 2 * KIB, kept=True)
    a = hand.compute("a", 1, size=KIB)
    gu, gv = (
        hand.start("all_gather", "gu", u, KIB, 2 * KIB),
        hand.start("all_gather", "gv", v, 2 * KIB, 4 * KIB),
    )
    b = hand.compute("b", 1, a, hand.wait("wu", gu), size=KIB)
    rb = hand.start("reduce_scatter", "rb", b, KIB, KIB // 2)
    c = hand.compute("c", 1, hand.wait("wv", gv), size=2 * KIB)
    rc = hand.start("reduce_scatter", "rc", c, 2 * KIB, KIB)
    problem = hand.output(hand.wait("wrb", rb), hand.wait("wrc", rc))
    return replace(
        problem,
        keys=tuple(replace(key, coalesced_member_ticks=MEMBER_TICKS) for key in problem.keys),
    )


FLAT = "u v in:0 start:0 a wait:0 out:gu b out:gv c in:1 start:1 wait:1 output"
COALESCED = "u v start:0 a wait:0 b c start:1 wait:1 output"


def both_forms() -> tuple[Problem, Schedule, Schedule]:
    problem = two_gathers_and_two_reductions()
    flat = schedule(problem, FLAT, "gu gv", "rb rc")
    plain = schedule(problem, COALESCED, "gu gv", "rb rc")
    return (
        problem,
        flat,
        replace(plain, buckets=tuple(Bucket(b.members, coalesced=True) for b in plain.buckets)),
    )


def test_a_coalesced_bucket_has_no_copies_and_pays_for_each_member():
    problem, flat, coalesced = both_forms()
    one, other = simulate(problem, flat), simulate(problem, coalesced)
    copies = one.compute_ticks - other.compute_ticks
    assert copies == sum(problem.copy_price(size) for size in (3 * KIB, 2 * KIB, 4 * KIB, 3 * KIB))
    assert [t.end_ticks - t.begin_ticks for t in other.transfers] == [
        t.end_ticks - t.begin_ticks + 2 * MEMBER_TICKS for t in one.transfers
    ]
    assert other.num_launches == one.num_launches == 2
    assert verify(problem, coalesced, Caps()) == ()


def test_a_coalesced_bucket_holds_inputs_to_its_wait_and_outputs_from_its_start():
    """u v start:0 a wait:0 b c start:1 wait:1 output, in KiB, counted by hand."""
    problem, _, coalesced = both_forms()
    assert [live / KIB for live in simulate(problem, coalesced).live_bytes] == [
        3,
        3,
        9,
        10,
        10,
        11,
        10,
        7.5,
        7.5,
        4.5,
    ]


def broken(
    text: str, *, coalesced: bool = True, buckets: tuple[str, ...] = ("gu gv", "rb rc")
) -> tuple[str, ...]:
    problem = two_gathers_and_two_reductions()
    plain = schedule(problem, text, *buckets)
    return verify(
        problem,
        replace(
            plain, buckets=tuple(Bucket(b.members, coalesced=coalesced) for b in plain.buckets)
        ),
        Caps(),
    )


def test_verify_names_what_is_wrong_with_a_form():
    assert broken(FLAT)[0] == "step copy-in 0 is there too often, or does not belong"
    assert broken(COALESCED, coalesced=False)[0] == "step copy-in 0 is missing"
    late = broken("u v a start:0 b wait:0 c start:1 wait:1 output")
    assert "b comes before wu, which it depends on" in late
    swapped = broken("u v wait:0 a start:0 b c start:1 wait:1 output")
    assert "bucket 0: start and wait are at steps 4 and 2; they must follow each other" in swapped


def test_sums_that_rest_on_the_payload_order_are_flat():
    problem, _, coalesced = both_forms()
    c = problem.collective_of_node[problem.node_names.index("rb")]
    asked = replace(
        problem.collectives[c], restriction=replace(problem.collectives[c].restriction, flat=True)
    )
    bound = replace(
        problem,
        collectives=tuple(asked if i == c else one for i, one in enumerate(problem.collectives)),
    )
    assert verify(bound, coalesced, Caps()) == ("bucket 1: rb must be in a flat bucket",)


def test_all_reduces_are_never_coalesced():
    hand = ByHand()
    a, b = hand.compute("a", 1, size=KIB), hand.compute("b", 1, size=KIB)
    one, other = (
        hand.start("all_reduce", "one", a, KIB, KIB),
        hand.start("all_reduce", "other", b, KIB, KIB),
    )
    problem = hand.output(hand.wait("w", one), hand.wait("x", other))
    plain = schedule(problem, "a b start:0 wait:0 output", "one other")
    assert verify(problem, replace(plain, buckets=(Bucket((0, 1), coalesced=True),)), Caps()) == (
        "bucket 0: all_reduce cannot be coalesced",
    )


@settings(max_examples=60)
@given(a_problem_with_forms(max_collectives=5), st.integers(0, 2**32))
def test_legal_orders_with_both_forms_are_accepted(problem: Problem, seed: int):
    assert verify(problem, random_schedule(problem, seed), Caps(max_compute_move=None)) == ()


def test_time_and_memory_are_those_of_an_oracle_that_counts_by_itself():
    """The oracle adds up times and lives of both forms without ``simulate``, and compares (in
    ``best_schedule``).
    """
    met = set()
    for seed in range(60):
        rng = random.Random(seed)
        problem = problem_for_coalescing(rng)
        best = best_schedule(problem, random_caps(rng, problem) if seed % 2 else Caps())
        met |= set() if best is None else {bucket.coalesced for bucket in best.schedule.buckets}
    assert met == {False, True}
