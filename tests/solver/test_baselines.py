"""The greedy bucketing that people run today (AutoParallel #481): which group, what closes a
bucket, and what never shares one.
"""

from itertools import pairwise

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.baselines import TOPO_SPAN, baselines
from apsched.solver.search.grouping import group
from tests.helpers.problems.by_hand import ByHand, line

KIB = 1024
PRICES = {"all_gather": line(10, 1)}


def gathers(*groups: str, apart: int = 1) -> Problem:
    """A gather on each group named, in this order, each needed by a compute node; ``apart`` compute
    nodes lie before each.
    """
    hand = ByHand(prices=PRICES)
    x = hand.input("x", KIB)
    for i, name in enumerate(groups):
        shard = hand.input(f"w{i}", KIB, kept=True)
        for k in range(apart):
            x = hand.compute(f"c{i}_{k}", 2, x, size=KIB)
        wait = hand.wait(
            f"wait{i}",
            hand.start(
                "all_gather", f"ag{i}", shard, KIB, 2 * KIB, group=name, module=f"layers.{i}.w"
            ),
        )
        x = hand.compute(f"mm{i}", 5, x, wait, size=KIB)
    return hand.output(x)


def merged(problem: Problem, caps: Caps) -> list[list[int]]:
    """Return the buckets of the greedy under ``caps``, on all keys."""
    labels = group(
        Pricer(Instance.of(problem)),
        caps,
        range(len(problem.keys)),
    )
    return [
        [c for c, label in enumerate(labels) if label == head] for head in dict.fromkeys(labels)
    ]


def by_span(problem: Problem) -> tuple[Bucket, ...]:
    """The buckets of the baseline of #481: primary group, bytes and span."""
    return next(
        b for b in baselines(Instance.of(problem)) if b.name == "greedy_bytes_span"
    ).schedule.buckets


def members(buckets: tuple[Bucket, ...]) -> set[frozenset[int]]:
    return {frozenset(bucket.members) for bucket in buckets}


def test_the_group_with_the_most_gathers_wins_and_others_do_not_get_in_its_way():
    """One gather on another group stands between those of the many, and closes nothing."""
    assert members(by_span(gathers("dp", "dp", "tp", "dp", "dp", "tp"))) == {
        frozenset((0, 1, 3, 4))
    }
    assert members(by_span(gathers("tp", "dp", "tp", "tp"))) == {frozenset((0, 2, 3))}


def test_a_graph_without_collectives_gives_no_buckets():
    hand = ByHand()
    problem = hand.output(hand.compute("mm", 5, hand.input("x", KIB), size=KIB))
    assert by_span(problem) == ()
    assert all(score.num_launches == 0 for score in baselines(Instance.of(problem)))


@pytest.mark.parametrize("order", [("a", "b", "a", "b"), ("b", "a", "b", "a")])
def test_of_equal_groups_exactly_one_is_bucketed(order):
    (bucket,) = by_span(gathers(*order))
    assert {order[c] for c in bucket.members} == {"a"}, "the same one, whichever comes first"
    assert len(bucket.members) == 2


def test_neighbours_merge_within_the_caps():
    assert merged(gathers(*["dp"] * 4), Caps(bucket_cap_bytes=8 * KIB, max_topo_span=100)) == [
        [0, 1, 2, 3]
    ]


def test_a_bucket_is_closed_by_bytes():
    assert merged(gathers(*["dp"] * 4), Caps(bucket_cap_bytes=6 * KIB)) == [[0, 1, 2], [3]]
    assert merged(gathers(*["dp"] * 4), Caps(bucket_cap_bytes=2 * KIB)) == [[0], [1], [2], [3]]


def test_a_bucket_is_closed_by_span_where_bytes_would_allow_more():
    """Five nodes a gather: two fit into a span of five, three need ten."""
    problem = gathers(*["dp"] * 4)
    starts = [c.start for c in problem.collectives]
    assert [b - a for a, b in pairwise(starts)] == [5, 5, 5]
    assert merged(problem, Caps(bucket_cap_bytes=100 * KIB, max_topo_span=5)) == [[0, 1], [2, 3]]
    assert merged(problem, Caps(bucket_cap_bytes=100 * KIB, max_topo_span=9)) == [[0, 1], [2, 3]]
    assert merged(problem, Caps(bucket_cap_bytes=100 * KIB, max_topo_span=10)) == [[0, 1, 2], [3]]


def test_without_a_cap_on_span_distance_does_not_matter():
    far = gathers("dp", "dp", "dp", apart=TOPO_SPAN // 2 + 50)
    assert merged(far, Caps(bucket_cap_bytes=100 * KIB)) == [[0, 1, 2]]
    assert members(by_span(far)) == {frozenset((0, 1))}, "with it, it does"


def test_what_depends_on_a_member_never_shares_its_bucket():
    """A gather of a gather's result, on one group: neither the greedy, nor the solver, nor
    ``verify`` puts them together.
    """
    hand = ByHand(prices={"all_gather": line(1000)})
    x = hand.input("x", KIB)
    shards = [hand.input(f"w{i}", KIB, kept=True) for i in range(2)]
    first = hand.wait("wait0", hand.start("all_gather", "ag0", shards[0], KIB, 2 * KIB))
    later = hand.wait("wait1", hand.start("all_gather", "ag1", first, 2 * KIB, 4 * KIB))
    other = hand.wait("wait2", hand.start("all_gather", "ag2", shards[1], KIB, 2 * KIB))
    problem = hand.output(hand.compute("mm", 5, x, first, later, other, size=KIB))
    assert not any({0, 1} <= set(bucket) for bucket in merged(problem, Caps()))
    answer = solve(problem, Caps(), SolveOptions(time_slack=0.0))
    assert answer.best is not None
    assert answer.best.schedule.buckets, "a launch is dear: the third joins one of the two"
    assert all(not {0, 1} <= set(bucket.members) for bucket in answer.best.schedule.buckets)
    assert verify(problem, answer.best.schedule, Caps()) == ()
