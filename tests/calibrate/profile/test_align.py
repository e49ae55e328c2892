"""The alignment is a longest common subsequence."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from apsched.calibrate.profile.match import aligned

WORDS = st.lists(st.sampled_from("abc"), max_size=14)


def longest(left: list[str], right: list[str]) -> int:
    """The textbook table."""
    rows = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, item in enumerate(left):
        for j, other in enumerate(right):
            rows[i + 1][j + 1] = (
                rows[i][j] + 1 if item == other else max(rows[i][j + 1], rows[i + 1][j])
            )
    return rows[-1][-1]


@given(WORDS, WORDS)
def test_it_is_common_in_order_and_longest(left, right):
    pairs = aligned(left, right)
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    assert len(pairs) == longest(left, right)


def test_long_sequences_with_insertions():
    left = [k % 7 for k in range(3000)]
    right = [
        item for k, item in enumerate(left) for item in ([item, "other"] if k % 50 == 0 else [item])
    ]
    assert [i for i, _ in aligned(left, right)] == list(range(3000))
