"""The model of collectives against published measurements: within bounds, and as the document
says.
"""

from statistics import median

import pytest

from benchmarks.collectives.__main__ import (
    PUBLISHED,
    REPORT,
    TRAINING_BYTES,
    Comparison,
    comparisons,
    report,
)

FOUND = comparisons()


def _errors(num_ranks: int) -> list[float]:
    return [
        abs(one.error)
        for one in FOUND
        if one.num_ranks == num_ranks and one.size_bytes >= TRAINING_BYTES
    ]


def test_the_document_says_what_the_model_says() -> None:
    """Written anew by ``python -m benchmarks.collectives``."""
    assert REPORT.read_text() == report(FOUND)


@pytest.mark.parametrize(("num_ranks", "bound"), [(8, 0.03), (16, 0.12), (64, 0.08), (256, 0.10)])
def test_half_of_the_messages_of_a_training_step_are_within(num_ranks: int, bound: float) -> None:
    assert len(_errors(num_ranks)) >= 10
    assert median(_errors(num_ranks)) <= bound


def test_no_message_of_a_node_is_off_by_more_than_a_tenth() -> None:
    assert max(_errors(8)) <= 0.10


def test_every_measurement_has_a_source() -> None:
    assert all(one.source.startswith("github.com/") for one in FOUND)
    assert len(PUBLISHED.read_text().splitlines()) == len(FOUND) + 1


def test_the_error_is_that_of_the_time() -> None:
    one = Comparison(
        cluster="h100",
        kind="all_gather",
        num_ranks=8,
        size_bytes=1,
        published_gb_per_s=100.0,
        modelled_gb_per_s=80.0,
        source="s",
    )
    assert one.error == pytest.approx(0.25)  # 5/4 of the measured time: too slow
