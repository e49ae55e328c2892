"""Choices that do not fit: the work on one ends at its first graph without room."""

from dataclasses import replace

import pytest

from apsched.capture.captured import Capture
from apsched.names import NEXT, SUM, SUM_SHARDS, in_node, marked
from apsched.whole_step.accumulation.search import AccumulationAnswer
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.accumulation.step import _words as words_of
from apsched.whole_step.choices import Choice
from tests.helpers.graphs.accumulations import (
    CAPTURE,
    HSDP,
    accumulation_of,
    answer_of,
    floor_bytes,
)


@pytest.mark.parametrize("capture", [CAPTURE, HSDP], ids=["fsdp", "hsdp"])
def test_a_choice_that_was_left_unfinished_does_not_fit(capture: Capture) -> None:
    """Neither one whose memory bound exceeds the cap, nor one of which a graph has no schedule."""
    free = accumulation_of(3, capture=capture)
    too_large = unfit = 0
    for room_bytes in (0, 8_192, 24_576):
        capped = accumulation_of(3, cap_bytes=floor_bytes(free) + room_bytes, capture=capture)
        found = answer_of(capped)
        assert found.best.is_whole
        assert found.best.fits
        for choice, solved in capped.solved.items():
            assert len(solved.pairs) == len(capped.graphs_of(choice)) or not solved.is_whole
            if not solved.is_whole:
                assert not solved.fits
                whole = replace(capped, solved={}).solve(choice)
                assert whole.is_whole
                assert not whole.fits
                too_large += solved.is_too_large
                unfit += not solved.is_too_large
        assert found.best.step_ticks == answer_by_whole_choices(capped).best.step_ticks
    assert too_large > 0
    assert unfit > 0 or capture is HSDP


def answer_by_whole_choices(accumulation: Accumulation) -> AccumulationAnswer:
    """Return the answer of a search that solves every graph of each choice."""
    fresh = replace(accumulation, solved={})
    for choice in accumulation.solved:
        fresh.solve(choice, search_alone=True)
    return answer_of(fresh)


def test_an_unfinished_choice_is_solved_whole_where_it_is_stated() -> None:
    capped = accumulation_of(3, cap_bytes=floor_bytes(accumulation_of(3)))
    every = frozenset(capped.entries) - {in_node(name) for name in ("weights.0", "weights.1")}
    left_out = capped.search(every)
    assert (left_out.is_whole, left_out.is_too_large, left_out.may_improve) == (False, True, False)
    stated = capped.solve(every)
    assert stated.is_whole
    assert capped.solved[every] is stated
    assert len(stated.pairs) == 3
    assert [pair.graphs[1].problem.name for pair in stated.pairs] == [
        "backward",
        "backward-2",
        "backward-3",
    ]


def test_progress_names_each_kind_of_a_choice() -> None:
    every = Choice(
        ("a", in_node("b"), marked("a", NEXT), marked("a", SUM), marked("b", SUM_SHARDS))
    )
    assert words_of(every) == (
        "1 parameters kept, 1 in their node, 1 that stay gathered, 1 reduced once,"
        " 1 whose shards are reduced once"
    )
    assert words_of(Choice()) == "0 parameters kept"
