"""Which buckets may be, and which of them are coalesced."""

from dataclasses import replace

import numpy as np

from apsched.problem.problem import Problem
from apsched.solver.arrays.bucket_prices import legal, members_of
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.suggestions import labels_of
from tests.helpers.problems.by_hand import ByHand, schedule

MOST = 2**40


def three_gathers() -> Problem:
    """Return gathers that start at ranks 2, 3 and 4."""
    b = ByHand()
    shards = [b.input(f"s{i}", 512, kept=True) for i in range(2)]
    starts = [b.start("all_gather", f"ag{i}", shards[i % 2], 512, 1024) for i in range(3)]
    waits = [b.wait(f"w{i}", start) for i, start in enumerate(starts)]
    return b.output(b.compute("k", 1, *waits, size=512))


def test_the_span_of_a_bucket_is_from_its_first_to_its_last_start() -> None:
    pricer = Pricer(Instance.of(three_gathers()))
    _, begin, members = members_of(np.array([0, 1, 0]))
    assert [legal(pricer.tables, begin, members, MOST, span) for span in (1, 2)] == [False, True]
    assert [legal(pricer.tables, begin, members, size, 2) for size in (2047, 2048)] == [False, True]


def test_coalesced_is_a_bucket_of_several_without_a_buffer() -> None:
    problem = three_gathers()
    keys = tuple(replace(key, coalesced_member_ticks=1) for key in problem.keys)
    pricer = Pricer(Instance.of(replace(problem, keys=keys)))
    forms = np.array([True, False, False])
    pair = pricer.partition_of(np.array([0, 0, 2]), forms)
    assert pair.coalesced.tolist() == [True, False]
    assert pricer.partition_of(np.array([0, 0, 2]), ~forms).coalesced.tolist() == [False, False]


def test_the_label_of_a_bucket_is_its_first_member() -> None:
    problem = three_gathers()
    text = "s0 s1 in:0 start:0 wait:0 out:ag2 out:ag1 ag0 w0 k output"
    assert labels_of(problem, schedule(problem, text, "ag2 ag1")).tolist() == [0, 1, 1]


def test_what_is_ready_behind_the_need_of_another_shares_no_launch_with_it() -> None:
    b = ByHand()
    x, shard = b.input("x", 512), b.input("s", 512, kept=True)
    early = b.wait("w0", b.start("all_gather", "ag0", shard, 512, 1024))
    first = b.compute("first", 1, x, early, size=512)
    late = b.wait("w1", b.start("all_gather", "ag1", first, 512, 1024))
    pricer = Pricer(Instance.of(b.output(b.compute("last", 1, late, size=512))))
    _, begin, members = members_of(np.array([0, 0]))
    assert not legal(pricer.tables, begin, members, MOST, MOST)
