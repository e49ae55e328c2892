"""Live bytes worked out by hand, step by step; one unit is the 512 bytes that the allocator rounds
to.
"""

from hypothesis import given, settings

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.memory import lifetimes, live_bytes
from apsched.schedule.schedule import Schedule
from tests.helpers.oracle import best_schedule
from tests.helpers.problems.by_hand import ByHand, schedule
from tests.helpers.problems.strategies import a_problem_with_caps

UNIT = 512


def live(problem: Problem, text: str, *buckets: str) -> dict[str, int]:
    """Return the units alive at each step of the schedule ``text``."""
    return {
        word: units // UNIT
        for word, units in zip(
            text.split(), live_bytes(problem, schedule(problem, text, *buckets)), strict=True
        )
    }


def test_a_result_lives_from_its_node_to_its_last_use_both_included() -> None:
    # x (1, freed after a), a (2, read by b and c), b (4, to the end), c (8, to the end)
    hand = ByHand()
    x = hand.input("x", UNIT)
    a = hand.compute("a", 1, x, size=2 * UNIT)
    b = hand.compute("b", 1, a, size=4 * UNIT)
    problem = hand.output(b, hand.compute("c", 1, a, size=8 * UNIT))
    assert live(problem, "x a b c output") == {"x": 1, "a": 3, "b": 6, "c": 14, "output": 12}


def test_what_the_caller_keeps_counts_throughout() -> None:
    hand = ByHand()
    w = hand.input("w", UNIT, kept=True)
    a = hand.compute("a", 1, w, size=2 * UNIT)
    problem = hand.output(hand.compute("b", 1, a, size=4 * UNIT))
    assert live(problem, "w a b output") == {"w": 1, "a": 3, "b": 7, "output": 5}


def test_an_input_is_there_from_the_first_step_on() -> None:
    """Also before its placeholder, as all placeholders hold at once."""
    hand = ByHand()
    x, y = hand.input("x", UNIT), hand.input("y", 2 * UNIT)
    problem = hand.output(hand.compute("a", 1, y, hand.compute("b", 1, x)))
    assert live(problem, "x y b a output") == {"x": 3, "y": 3, "b": 3, "a": 2, "output": 0}


def test_a_view_shares_and_prolongs_the_storage() -> None:
    hand = ByHand()
    a = hand.compute("a", 1, size=UNIT)
    v = hand.view("v", a)
    b = hand.compute("b", 1, size=2 * UNIT)
    problem = hand.output(hand.compute("c", 1, v, b))
    assert live(problem, "a v b c output") == {"a": 1, "v": 1, "b": 3, "c": 3, "output": 0}


def test_sizes_are_rounded_up_as_the_allocator_does() -> None:
    hand = ByHand()
    problem = hand.output(hand.compute("a", 1, size=513))
    assert live(problem, "a output") == {"a": 2, "output": 2}


def test_alone_a_collective_holds_its_input_until_the_wait() -> None:
    # cast 1 from cast to wait; gathered 4 from start to its last use c
    hand = ByHand()
    cast = hand.compute("cast", 1, hand.input("w", 2 * UNIT, kept=True), size=UNIT)
    ag = hand.start("all_gather", "ag", cast, UNIT, 4 * UNIT)
    a = hand.compute("a", 1)
    gathered = hand.wait("wait", ag)
    problem = hand.output(hand.compute("b", 1, a, gathered), hand.compute("c", 1, gathered))
    kept = 2
    at = live(problem, "w cast ag a wait b c output")
    assert at == {
        "w": kept,
        "cast": kept + 1,
        "ag": kept + 5,
        "a": kept + 5,
        "wait": kept + 5,
        "b": kept + 4,
        "c": kept + 4,
        "output": kept,
    }


def test_an_input_that_is_not_held_is_freed_at_the_start() -> None:
    hand = ByHand()
    a = hand.compute("a", 1, size=UNIT)
    ar = hand.start("all_reduce", "ar", a, UNIT, UNIT, holds_input=False)
    b = hand.compute("b", 1)
    problem = hand.output(b, hand.wait("wait", ar))
    assert live(problem, "a ar b wait output") == {"a": 1, "ar": 2, "b": 1, "wait": 1, "output": 1}


def two_gathers() -> Problem:
    """Casts of 1 and 2 units, gathered to 4 and 8; b needs the first, c the second, one compute
    node before and between.
    """
    hand = ByHand()
    u, v = hand.input("u", UNIT, kept=True), hand.input("v", UNIT, kept=True)
    a = hand.compute("a", 1)
    cu = hand.compute("cu", 1, u, size=UNIT)
    gu = hand.start("all_gather", "gu", cu, UNIT, 4 * UNIT, prologue=(cu,))
    b = hand.compute("b", 1, a, hand.wait("wu", gu))
    cv = hand.compute("cv", 1, v, size=2 * UNIT)
    gv = hand.start("all_gather", "gv", cv, 2 * UNIT, 8 * UNIT, prologue=(cv,))
    return hand.output(hand.compute("c", 1, b, hand.wait("wv", gv)))


def test_a_gather_bucket_with_early_copy_outs_frees_the_buffer_soon() -> None:
    # buffer 12 from in to the last out; casts 1, 2 until in; copies 4 (out:gu .. b) and 8 (out:gv
    # .. c)
    at = live(two_gathers(), "u v cu cv in:0 start:0 a wait:0 out:gu out:gv b c output", "gu gv")
    kept = 2
    assert at == {
        "u": kept,
        "v": kept,
        "cu": kept + 1,
        "cv": kept + 3,
        "in:0": kept + 3 + 12,
        "start:0": kept + 12,
        "a": kept + 12,
        "wait:0": kept + 12,
        "out:gu": kept + 12 + 4,
        "out:gv": kept + 12 + 4 + 8,
        "b": kept + 12,
        "c": kept + 8,
        "output": kept,
    }


def test_a_bucket_makes_no_casts() -> None:
    # as above, but v, which its owner lets go, is cast on the way: no cu, no cv, and v (2) lives
    # until the copy-in
    hand = ByHand()
    u, v = hand.input("u", UNIT, kept=True), hand.input("v", 2 * UNIT)
    a = hand.compute("a", 1)
    cu = hand.compute("cu", 1, u, size=UNIT)
    gu = hand.start(
        "all_gather", "gu", cu, UNIT, 4 * UNIT, prologue=(cu,), cast=(cu,), cast_bytes=2 * UNIT
    )
    b = hand.compute("b", 1, a, hand.wait("wu", gu))
    cv = hand.compute("cv", 1, v, size=UNIT)
    gv = hand.start(
        "all_gather", "gv", cv, UNIT, 8 * UNIT, prologue=(cv,), cast=(cv,), cast_bytes=2 * UNIT
    )
    problem = hand.output(hand.compute("c", 1, b, hand.wait("wv", gv)))
    at = live(problem, "u v in:0 start:0 a wait:0 out:gu out:gv b c output", "gu gv")
    kept = 1
    assert (at["v"], at["in:0"], at["start:0"]) == (kept + 2, kept + 2 + 12, kept + 12)
    assert live(problem, "u v cu gu wu a b cv gv wv c output")["cv"] == kept + 2 + 1


def test_a_gather_bucket_with_late_copy_outs_holds_the_buffer_instead() -> None:
    at = live(two_gathers(), "u v cu cv in:0 start:0 a wait:0 out:gu b out:gv c output", "gu gv")
    kept = 2
    assert (at["out:gu"], at["b"], at["out:gv"], at["c"]) == (
        kept + 16,
        kept + 16,
        kept + 20,
        kept + 8,
    )


def reductions(kind: str, out: int) -> Problem:
    """Gradients of 4 and 6 units from a and b, reduced to ``out`` and ``out``; the first is
    finished by an epilogue of 1 unit.
    """
    hand = ByHand()
    a = hand.compute("a", 1, size=4 * UNIT)
    ra = hand.start(kind, "ra", a, 4 * UNIT, out * UNIT)
    wa = hand.wait("wa", ra)
    ea = hand.compute("ea", 1, wa, size=UNIT)
    hand.collectives[0]["epilogue"] = (ea,)
    b = hand.compute("b", 1, size=6 * UNIT)
    rb = hand.start(kind, "rb", b, 6 * UNIT, out * UNIT)
    wb = hand.wait("wb", rb)
    c = hand.compute("c", 1)
    return hand.output(ea, wb, c)


def test_a_reduce_scatter_bucket_copies_the_gradients_and_shares_one_output() -> None:
    # a 4, b 6 until in; concatenated 10 from in to wait; output 2 + 2 from start to the end, as wb
    # is an output
    at = live(reductions("reduce_scatter", 2), "a b in:0 start:0 c wait:0 ea output", "ra rb")
    assert at == {
        "a": 4,
        "b": 10,
        "in:0": 20,
        "start:0": 14,
        "c": 14,
        "wait:0": 14,
        "ea": 5,
        "output": 5,
    }


def test_an_all_reduce_bucket_works_in_place_on_its_copy() -> None:
    # a 4, b 6 until in; one buffer of 4 + 6 from in to the end
    hand = ByHand()
    a = hand.compute("a", 1, size=4 * UNIT)
    b = hand.compute("b", 1, size=6 * UNIT)
    ra = hand.start("all_reduce", "ra", a, 4 * UNIT, 4 * UNIT)
    rb = hand.start("all_reduce", "rb", b, 6 * UNIT, 6 * UNIT)
    problem = hand.output(hand.wait("wa", ra), hand.wait("wb", rb))
    at = live(problem, "a b in:0 start:0 wait:0 output", "ra rb")
    assert at == {"a": 4, "b": 10, "in:0": 20, "start:0": 10, "wait:0": 10, "output": 10}


def test_a_reduction_bucket_keeps_its_output_until_the_last_use_of_any_member() -> None:
    # both finished by epilogues: the shared output of 4 goes after the second one
    hand = ByHand()
    a, b = hand.compute("a", 1, size=UNIT), hand.compute("b", 1, size=UNIT)
    ra, rb = (
        hand.start("reduce_scatter", "ra", a, UNIT, 2 * UNIT),
        hand.start("reduce_scatter", "rb", b, UNIT, 2 * UNIT),
    )
    wa, wb = hand.wait("wa", ra), hand.wait("wb", rb)
    ea, eb = hand.compute("ea", 1, wa, size=UNIT), hand.compute("eb", 1, wb, size=UNIT)
    problem = hand.output(ea, eb)
    at = live(problem, "a b in:0 start:0 wait:0 ea eb output", "ra rb")
    assert at == {
        "a": 1,
        "b": 2,
        "in:0": 4,
        "start:0": 6,
        "wait:0": 6,
        "ea": 5,
        "eb": 6,
        "output": 2,
    }


def test_the_buffer_of_a_bucket_is_rounded_once() -> None:
    """Two members of 100 bytes fill one unit of 512, not two."""
    hand = ByHand()
    a, b = hand.compute("a", 1, size=100), hand.compute("b", 1, size=100)
    ra, rb = (
        hand.start("reduce_scatter", "ra", a, 100, 50),
        hand.start("reduce_scatter", "rb", b, 100, 50),
    )
    problem = hand.output(hand.wait("wa", ra), hand.wait("wb", rb))
    assert live(problem, "a b in:0 start:0 wait:0 output", "ra rb") == {
        "a": 1,
        "b": 2,
        "in:0": 3,
        "start:0": 2,
        "wait:0": 2,
        "output": 1,
    }


def test_a_shard_that_two_gathers_read_is_held_by_the_one_that_stands_alone() -> None:
    # s (2) is read by g1, g2 (bucket) and g3 (alone): freed after g3's wait
    hand = ByHand()
    s = hand.input("s", 2 * UNIT)
    g1, g2, g3 = (
        hand.start("all_gather", name, s, 2 * UNIT, 4 * UNIT) for name in ("g1", "g2", "g3")
    )
    w1, w2, w3 = hand.wait("w1", g1), hand.wait("w2", g2), hand.wait("w3", g3)
    problem = hand.output(
        hand.compute("a", 1, w1), hand.compute("b", 1, w2), hand.compute("c", 1, w3)
    )
    at = live(problem, "s in:0 start:0 wait:0 out:g1 a out:g2 b g3 w3 c output", "g1 g2")
    assert at == {
        "s": 2,
        "in:0": 10,
        "start:0": 10,
        "wait:0": 10,
        "out:g1": 14,
        "a": 14,
        "out:g2": 14,
        "b": 6,
        "g3": 6,
        "w3": 6,
    } | {
        "c": 4,
        "output": 0,
    }


def _by_definition(problem: Problem, order: Schedule) -> list[int]:
    """Live bytes from the lifetimes, counted one step at a time."""
    lives = lifetimes(problem, order)
    return [
        problem.kept_bytes + sum(x.size_bytes for x in lives if x.first <= k <= x.last)
        for k in range(len(order.steps))
    ]


@given(a_problem_with_caps(max_collectives=4, max_compute=4))
@settings(max_examples=40)
def test_live_bytes_are_the_sum_of_lifetimes(given_: tuple[Problem, Caps]) -> None:
    """And no lifetime is empty. The schedules are optimal ones, so that buckets of every kind
    occur.
    """
    problem, caps = given_
    if (best := best_schedule(problem, caps)) is None:
        return
    assert all(x.first <= x.last for x in lifetimes(problem, best.schedule))
    assert list(live_bytes(problem, best.schedule)) == _by_definition(problem, best.schedule)
