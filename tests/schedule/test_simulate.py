"""Timelines worked out by hand, a rule of the machine each (ticks; 1 KiB units)."""

from itertools import pairwise

import pytest
from hypothesis import given, settings

from apsched.problem.problem import Problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from tests.helpers.problems.by_hand import ONE_TICK_PER_KIB, ByHand, line, schedule
from tests.helpers.problems.strategies import a_problem

KIB = 1024


def spans(problem: Problem, text: str, *buckets: str) -> dict[str, tuple[int, int]]:
    """Return when each step of the schedule ``text`` begins and ends on the compute stream."""
    timeline = simulate(problem, schedule(problem, text, *buckets))
    return {
        word: (timeline.begin_ticks[k], timeline.end_ticks[k])
        for k, word in enumerate(text.split())
    }


def one_gather(launch_ticks: int = 0) -> Problem:
    """A gather of 10 ticks that b needs; a takes 4, b takes 5."""
    hand = ByHand(prices={"all_gather": line(10)})
    w = hand.input("w", KIB, kept=True)
    a = hand.compute("a", 4, size=KIB)
    ag = hand.start("all_gather", "ag", w, KIB, 2 * KIB, launch_ticks=launch_ticks)
    gathered = hand.wait("ag_wait", ag)
    b = hand.compute("b", 5, a, gathered, size=KIB)
    return hand.output(b)


def test_a_wait_right_after_its_start_exposes_the_whole_collective() -> None:
    # a 0-4; launch at 4, transfer 4-14; wait 4-14; b 14-19
    problem = one_gather()
    at = spans(problem, "w a ag ag_wait b output")
    assert at["a"] == (0, 4)
    assert at["ag"] == (4, 4)
    assert at["ag_wait"] == (4, 14)
    assert at["b"] == (14, 19)
    timeline = simulate(problem, as_captured(problem.num_nodes))
    assert (timeline.step_time_ticks, timeline.exposed_ticks, timeline.compute_ticks) == (19, 10, 9)


def test_a_collective_runs_beside_compute_from_its_launch_on() -> None:
    # transfer 0-10 beside a 0-4; wait 4-10; b 10-15
    problem = one_gather()
    timeline = simulate(problem, schedule(problem, "w ag a ag_wait b output"))
    assert (timeline.step_time_ticks, timeline.exposed_ticks, timeline.compute_ticks) == (15, 6, 9)
    assert (timeline.transfers[0].begin_ticks, timeline.transfers[0].end_ticks) == (0, 10)


def test_a_launch_takes_its_price_on_the_compute_stream_before_the_transfer_begins() -> None:
    # launch 0-3, transfer 3-13, a 3-7, wait 7-13, b 13-18; compute = 3 + 4 + 5
    problem = one_gather(launch_ticks=3)
    timeline = simulate(problem, schedule(problem, "w ag a ag_wait b output"))
    assert timeline.end_ticks[1] == 3
    assert (timeline.transfers[0].begin_ticks, timeline.transfers[0].end_ticks) == (3, 13)
    assert (timeline.step_time_ticks, timeline.exposed_ticks, timeline.compute_ticks) == (18, 6, 12)


def test_a_wait_for_what_has_ended_takes_no_time() -> None:
    hand = ByHand(prices={"all_gather": line(10)})
    ag = hand.start("all_gather", "ag", hand.input("w", KIB), KIB, 2 * KIB)
    a = hand.compute("a", 12)
    problem = hand.output(hand.compute("b", 1, a, hand.wait("ag_wait", ag)))
    assert spans(problem, "w ag a ag_wait b output")["ag_wait"] == (12, 12)


@pytest.mark.parametrize(("second_group", "ends"), [("dp", (10, 20)), ("tp", (10, 12))])
def test_one_stream_runs_in_order_and_two_streams_run_side_by_side(
    second_group: str, ends: tuple[int, int]
) -> None:
    # both launched by 2 (a takes 2): same stream 0-10 and 10-20, two streams 0-10 and 2-12
    hand = ByHand(prices={"all_gather": line(10)})
    u, v = hand.input("u", KIB), hand.input("v", KIB)
    first = hand.start("all_gather", "first", u, KIB, 2 * KIB)
    a = hand.compute("a", 2)
    second = hand.start("all_gather", "second", v, KIB, 2 * KIB, group=second_group)
    problem = hand.output(a, hand.wait("first_wait", first), hand.wait("second_wait", second))
    timeline = simulate(
        problem, schedule(problem, "u v first a second second_wait first_wait output")
    )
    assert tuple(t.end_ticks for t in timeline.transfers) == ends


def test_a_wait_for_a_later_collective_of_a_stream_is_a_wait_for_those_before_it() -> None:
    # u 0-10, v 10-20: waiting for v first stops until 20, then u costs nothing
    hand = ByHand(prices={"all_gather": line(10)})
    u, v = hand.input("u", KIB), hand.input("v", KIB)
    first, second = (
        hand.start("all_gather", "first", u, KIB, KIB),
        hand.start("all_gather", "second", v, KIB, KIB),
    )
    problem = hand.output(hand.wait("first_wait", first), hand.wait("second_wait", second))
    at = spans(problem, "u v first second second_wait first_wait output")
    assert at["second_wait"] == (0, 20)
    assert at["first_wait"] == (20, 20)


def test_the_step_ends_with_the_last_transfer_even_where_nothing_waits_that_long() -> None:
    # a 0-4, reduction 4-24, the wait stands still until then; without work after it 20 ticks are
    # exposed
    hand = ByHand(prices={"reduce_scatter": line(20)})
    a = hand.compute("a", 4, size=2 * KIB)
    problem = hand.output(hand.wait("rs_wait", hand.start("reduce_scatter", "rs", a, 2 * KIB, KIB)))
    timeline = simulate(problem, schedule(problem, "a rs rs_wait output"))
    assert (timeline.step_time_ticks, timeline.exposed_ticks, timeline.compute_ticks) == (24, 20, 4)


def test_views_inputs_and_output_take_no_time() -> None:
    hand = ByHand()
    x = hand.input("x", KIB)
    problem = hand.output(hand.compute("a", 3, hand.view("v", x)))
    assert [end for _, end in spans(problem, "x v a output").values()] == [0, 0, 3, 3]


def two_gathers() -> Problem:
    """Gathers of 2 and 3 KiB for b and c; 10 ticks + 2 a KiB each; copies 1 tick a KiB; a bucket's
    launch 5 ticks, another's 7.
    """
    hand = ByHand(
        prices={"all_gather": line(10, 2)}, copy_price=ONE_TICK_PER_KIB, bucket_launch_ticks=5
    )
    u, v = hand.input("u", KIB, kept=True), hand.input("v", KIB + 512, kept=True)
    a = hand.compute("a", 100, size=KIB)
    gu = hand.start("all_gather", "gu", u, KIB, 2 * KIB, launch_ticks=7)
    wu = hand.wait("wu", gu)
    b = hand.compute("b", 20, a, wu, size=KIB)
    gv = hand.start("all_gather", "gv", v, KIB + 512, 3 * KIB, launch_ticks=7)
    wv = hand.wait("wv", gv)
    return hand.output(hand.compute("c", 30, b, wv, size=KIB))


def test_a_bucket_pays_copies_and_one_launch() -> None:
    # copy-in of 2.5 KiB: 3 ticks (rounded up) 0-3; launch 3-8; transfer of 5 KiB: 10 + 10 = 20:
    # 8-28; wait 8-28; copy-outs of 2 and 3 KiB: 28-30, 30-33; a 33-133, b 133-153, c 153-183
    problem = two_gathers()
    at = spans(problem, "u v in:0 start:0 wait:0 out:gu out:gv a b c output", "gu gv")
    assert at["in:0"] == (0, 3)
    assert at["start:0"] == (3, 8)
    assert at["wait:0"] == (8, 28)
    assert at["out:gu"] == (28, 30)
    assert at["out:gv"] == (30, 33)
    assert at["c"] == (153, 183)


def test_copies_stand_where_the_order_puts_them() -> None:
    # copy-in 0-3, launch 3-8, transfer 8-28 hidden under a 8-108, wait 108, copy-out of u 108-110,
    # b 110-130, of v 130-133, c 133-163
    problem = two_gathers()
    timeline = simulate(
        problem, schedule(problem, "u v in:0 start:0 a wait:0 out:gu b out:gv c output", "gu gv")
    )
    assert timeline.step_time_ticks == 163
    assert timeline.exposed_ticks == 0
    assert timeline.compute_ticks == 163
    assert timeline.num_launches == 1
    assert timeline.transfers[0].size_bytes == 5 * KIB


def test_alone_a_collective_pays_its_captured_launch_and_no_copies() -> None:
    # gu: launch 0-7, transfer 7-21 (10 + 4); gv: launch 7-14, transfer 21-37 (10 + 6); a 14-114, b
    # 114-134, c 134-164
    problem = two_gathers()
    timeline = simulate(problem, schedule(problem, "u v gu gv a wu b wv c output"))
    assert [t.end_ticks for t in timeline.transfers] == [21, 37]
    assert timeline.step_time_ticks == 164


def test_a_bucket_of_reductions_is_not_copied_out() -> None:
    # a 0-4, copy-in of 4 KiB 4-8, launch 8-10, transfer 10-30, wait until 30
    hand = ByHand(
        prices={"reduce_scatter": line(20)}, copy_price=ONE_TICK_PER_KIB, bucket_launch_ticks=2
    )
    a = hand.compute("a", 4, size=2 * KIB)
    b = hand.compute("b", 0, size=2 * KIB)
    ra, rb = (
        hand.start("reduce_scatter", "ra", a, 2 * KIB, KIB),
        hand.start("reduce_scatter", "rb", b, 2 * KIB, KIB),
    )
    problem = hand.output(hand.wait("wa", ra), hand.wait("wb", rb))
    at = spans(problem, "a b in:0 start:0 wait:0 output", "ra rb")
    assert at == {
        "a": (0, 4),
        "b": (4, 4),
        "in:0": (4, 8),
        "start:0": (8, 10),
        "wait:0": (10, 30),
        "output": (30, 30),
    }


def test_a_copy_in_that_casts_pays_half_of_what_each_cast_reads_and_writes_rounded_up() -> None:
    # three elements of two bytes become three of one: (6 + 3) / 2 is 5 bytes; so do five: 8 bytes;
    # at a tick a byte 13 ticks, not 12.5, nor 12
    hand = ByHand(copy_price=line(0, 1024))
    starts = []
    for name, elements in (("u", 3), ("v", 5)):
        shard = hand.input(name, 2 * elements, kept=True)
        cast = hand.compute(f"c{name}", 1, shard, size=elements)
        starts.append(
            hand.start(
                "all_gather",
                f"g{name}",
                cast,
                elements,
                2 * elements,
                prologue=(cast,),
                cast=(cast,),
                cast_bytes=2 * elements,
            )
        )
    waits = [hand.wait(f"w{i}", start) for i, start in enumerate(starts)]
    problem = hand.output(hand.compute("a", 1, *waits))
    at = spans(problem, "u v in:0 start:0 wait:0 out:gu out:gv a output", "gu gv")
    assert at["in:0"] == (0, 5 + 8)


def test_in_flight_bytes_are_outputs_between_start_and_wait() -> None:
    # 2 KiB from gu's launch to its wait, 3 KiB from gv's; a wait no longer counts what it waits for
    problem = two_gathers()
    timeline = simulate(problem, schedule(problem, "u v gu gv a wu b wv c output"))
    assert [b // KIB for b in timeline.in_flight_bytes] == [0, 0, 2, 5, 5, 3, 3, 0, 0, 0]
    assert timeline.peak_in_flight_bytes == 5 * KIB


def test_on_path_collectives_are_in_flight() -> None:
    hand = ByHand(prices={"all_reduce": line(10)})
    a = hand.compute("a", 1, size=KIB)
    ar = hand.start("all_reduce", "ar", a, KIB, KIB, on_path=True, bucketable=False)
    problem = hand.output(hand.compute("b", 1, hand.wait("w", ar), size=KIB))
    assert simulate(problem, as_captured(problem.num_nodes)).peak_in_flight_bytes == KIB


@given(a_problem())
@settings(max_examples=60)
def test_the_books_balance(problem: Problem) -> None:
    """Compute and exposed time make the step time; transfers of a stream follow each other and
    their launches.
    """
    timeline = simulate(problem, as_captured(problem.num_nodes))
    assert timeline.compute_ticks + timeline.exposed_ticks == timeline.step_time_ticks
    work = sum(
        d
        for d, kind in zip(problem.duration_ticks, problem.kinds, strict=True)
        if kind in ("compute", "start")
    )
    assert timeline.compute_ticks == work
    assert timeline.begin_ticks == (0, *timeline.end_ticks[:-1])
    for s in range(len(problem.streams)):
        mine = [t for t in timeline.transfers if t.stream == s]
        assert all(a.end_ticks <= b.begin_ticks for a, b in pairwise(mine))
        assert all(t.begin_ticks >= timeline.end_ticks[t.start_step] for t in mine)
        assert all(t.end_ticks <= timeline.end_ticks[t.wait_step] for t in mine)
