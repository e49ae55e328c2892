"""The three rules by hand: shares of a link, compute beside a collective, a collective beside
compute, whole ticks.
"""

from fractions import Fraction

import pytest

from apsched.errors import InputError
from apsched.problem.contention import Contention
from apsched.schedule.clocks import SharedClock


def shared(links, compute=Fraction(1), transfer=Fraction(1), latency=Fraction(1)) -> SharedClock:
    return SharedClock(links, compute, transfer, latency)


def test_two_on_a_link_share_it_until_one_ends():
    clock = shared([(0,), (0,)])
    clock.launch(0, 100, 0)
    clock.run(20)
    clock.launch(1, 100, 0)  # alone up to 20: 80 left, then half speed each
    assert clock.finish() == 200  # all work on the link, without a pause
    assert clock.begins == [0, 20]
    assert clock.ends == [180, 200]


def test_other_links_are_not_shared():
    clock = shared([(0,), (1,)])
    clock.launch(0, 100, 0)
    clock.launch(1, 100, 0)
    clock.finish()
    assert clock.ends == [100, 100]


def test_the_fullest_link_counts():
    clock = shared([(0,), (0, 1), (1,), (1,)])
    for stream in range(4):
        clock.launch(stream, 60, 0)
    clock.finish()
    # a third each for those on link 1; stream 0 gets the half that two on its link give it
    assert clock.ends == [120, 180, 180, 180]


def test_latency_hinders_nobody():
    clock = shared([(0,), (0,)])
    clock.launch(0, 100, 0)
    clock.launch(1, 60, 50)  # 50 of latency, then 10 of bytes at half speed
    clock.finish()
    assert clock.ends == [110, 70]


def test_one_stream_is_in_order_and_alone():
    clock = shared([(0,)])
    clock.launch(0, 10, 4)
    clock.launch(0, 10, 4)
    clock.finish()
    assert (clock.begins, clock.ends) == ([0, 10], [10, 20])


def test_compute_is_slower_beside_a_collective_only():
    clock = shared([()], Fraction(5, 4))
    clock.launch(0, 50, 10)
    clock.run(60)  # 50 ticks do 40 of it, 20 more alone
    assert clock.now == 70
    clock.run(60)
    assert clock.now == 130


def test_a_transfer_is_slower_beside_compute_only():
    clock = shared([(0,), (0,)], transfer=Fraction(5, 4))
    clock.launch(0, 60, 10)
    clock.run(60)  # 10 of latency, which nothing slows, then 40 of its 50 ticks of bytes
    clock.wait(0)
    assert clock.now == 70
    clock.launch(0, 40, 0)
    clock.launch(1, 40, 0)
    clock.run(50)  # each moves 20 of 40: a half of 4/5
    assert clock.finish() == 160
    assert clock.ends == [70, 160, 160]


def test_latency_is_longer_beside_compute_only():
    clock = shared([(0,)], latency=Fraction(5, 2))
    clock.launch(0, 60, 20)
    clock.run(30)  # 12 ticks of latency have passed; 8 more pass alone, and 40 of bytes
    clock.wait(0)
    assert clock.now == 78
    clock.launch(0, 30, 10)
    clock.wait(1)
    assert clock.ends == [78, 108]
    clock.launch(0, 30, 10)
    clock.run(40)  # 25 of latency, then 15 of 20 ticks of bytes
    assert clock.finish() == 153


def test_both_slow_each_other():
    clock = shared([()], Fraction(2), Fraction(5, 4))
    clock.launch(0, 40, 0)
    clock.run(30)  # 50 ticks move 40, and do 25 of the work
    assert clock.ends == [50]
    assert clock.now == 55


def test_a_wait_stands_still_as_long_as_it_takes():
    clock = shared([(0,), (0,)], Fraction(2))
    clock.launch(0, 30, 0)
    clock.launch(1, 50, 0)
    clock.run(10)
    clock.wait(0)
    assert clock.now == 60
    clock.run(5)
    assert clock.now == 70
    clock.wait(1)
    assert clock.now == 80


def test_times_are_whole_ticks_rounded_up():
    clock = shared([(0,), (0,), (0,)], Fraction(3))
    for stream, ticks in enumerate((1, 1, 2)):
        clock.launch(stream, ticks, 0)
    clock.run(1)
    assert clock.now == 3
    clock.finish()
    assert clock.ends == [3, 3, 4]


def test_nothing_takes_no_time():
    clock = shared([(0,), (0,)], Fraction(2))
    clock.launch(0, 0, 0)
    clock.launch(1, 10, 0)
    clock.run(0)
    clock.wait(0)
    assert clock.now == 0
    assert clock.finish() == 10


def test_parts_divide_among_all_that_share():
    groups = tuple((name, (0, 1) if name == "a" else (1,)) for name in "abcd")
    assert Contention(links=("x", "y"), links_of_group=groups).parts() == 12
    assert Contention().parts() == 1
    assert Contention(transfer_slowdown=(6, 5)).parts() == 6


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"compute_slowdown": (1, 2)}, "compute_slowdown: .* at least 1"),
        ({"transfer_slowdown": (1, 2)}, "transfer_slowdown: .* at least 1"),
        ({"compute_slowdown": (0, 0)}, "at least 1"),
        (
            {
                "links": ("nic",),
                "links_of_group": tuple((str(k), (0,)) for k in range(16)),
                "transfer_slowdown": (9999, 1000),
            },
            "fewer digits",
        ),
        ({"links": ("nic",), "links_of_group": (("a", (1,)),)}, "links below 1"),
        (
            {"links": ("nic",), "links_of_group": tuple((str(k), (0,)) for k in range(17))},
            "at most 16 groups",
        ),
    ],
)
def test_the_impossible_is_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        Contention(**wrong)
