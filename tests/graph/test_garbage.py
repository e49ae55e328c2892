"""Garbage is collected less often inside of the block, and as before behind it."""

import gc
from collections.abc import Iterator

import pytest

from apsched.graph.garbage import rare_garbage_collection


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_less_often_inside_and_as_before_behind() -> None:
    gc.set_threshold(700, 11, 12)
    with rare_garbage_collection():
        with rare_garbage_collection():
            assert gc.get_threshold()[0] > 100_000
        assert gc.get_threshold()[0] > 100_000, "the outer block has not ended"
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("threshold", [0, 10**9])
def test_who_collects_even_less_often_keeps_that(threshold: int) -> None:
    gc.set_threshold(threshold, 10, 10)
    with rare_garbage_collection():
        assert gc.get_threshold()[0] == threshold
    assert gc.get_threshold()[0] == threshold


def test_an_error_restores_it() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(KeyError), rare_garbage_collection():
        raise KeyError
    assert gc.get_threshold()[0] == 700


def test_blocks_of_threads_that_overlap() -> None:
    """The first to enter leaves first: the thresholds are back once the other has left, too."""
    gc.set_threshold(700, 10, 10)
    one, other = rare_garbage_collection(), rare_garbage_collection()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] > 700
    other.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 700
