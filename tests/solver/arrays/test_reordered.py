"""Storages whose bytes count in every order of the compute."""

from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from tests.helpers.problems.by_hand import ByHand


def test_a_reduced_result_counts_what_it_takes_in_a_bucket_of_the_most_members() -> None:
    """A result of one byte takes 512 alone; 512 of them take 512 bytes together in a bucket, so
    that each may count for one byte and no more.
    """
    hand, results = ByHand(), []
    for i in range(3):
        gradient = hand.compute(f"g{i}", 10, hand.input(f"x{i}", 512), size=2048)
        results.append(
            hand.wait(f"w{i}", hand.start("reduce_scatter", f"rs{i}", gradient, 2048, 1))
        )
    lives = list(Orders(Instance.of(hand.output(*results))).lives())
    assert [life.size_bytes for life in lives if life.to_the_end] == [1, 1, 1]
