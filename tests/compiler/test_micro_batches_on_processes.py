"""Real gloo processes, two and four, train on two micro-batches as one step as they do on one after
the other.
"""

import pytest

from tests.helpers.processes import WORKERS, run_sizes

pytestmark = pytest.mark.ranks
TOLERANCE = 2e-2
"""Share of the largest gradient: products and sums of gradients are bfloat16, with 8 bits."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[int, list[dict]]:
    return run_sizes(
        WORKERS / "training/micro_batch_worker.py",
        tmp_path_factory.mktemp("micro_batches"),
        timeout_s=600,
    )


@pytest.fixture(params=[2, 4], ids="{} processes".format)
def reports(jobs, request) -> list[dict]:
    return jobs[request.param]


def test_losses_gradients_and_weights_are_those_of_accumulation_bit_for_bit(reports):
    """Each micro-batch reduces its gradients, and a sum of two has one order."""
    for report in reports:
        assert report["compiled"]["num_unequal"] == 0


def test_the_graphs_that_ran_had_two_chains_and_are_what_was_claimed(reports):
    for report in reports:
        assert [graph["name"] for graph in report["graphs"]] == ["forward", "backward"]
        assert all(graph["chains"] == 2 and graph["exact"] for graph in report["graphs"])


def test_a_parameter_is_gathered_once_for_both_micro_batches(reports):
    """In backward, too, where it is gathered again; the embedding is not needed there."""
    for report in reports:
        assert report["kept"] == [report["parameters"], []]
        forward, backward = report["again"]
        assert forward == report["parameters"]
        assert len(backward) == len(set(backward)) >= report["num_parameters"] - 2


def test_reductions_of_both_micro_batches_share_launches(reports):
    """Their sums wait at the end of the graph."""
    for report in reports:
        backward = report["graphs"][1]
        num_alone = backward["collectives"] - 2 * report["num_parameters"]
        assert backward["launches"] <= num_alone + 6, "of 24 reductions"


def test_on_four_the_forward_graph_that_ran_was_interleaved(jobs):
    for report in jobs[4]:
        assert "chains merged" in report["graphs"][0]["solved_by"]


def test_the_backend_adds_gradients_before_it_reduces_them(reports):
    """On four processes some reductions belong to tensor parallelism."""
    for report in reports:
        forward, backward = report["reduced"]
        assert report["num_parameters"] == 12
        assert report["once"]["largest_distance"] < TOLERANCE
        assert report["once"]["reduced"] == [forward, backward - 12]


def test_graphs_in_merged_orders_with_random_buckets_give_the_same_bits(reports):
    for report in reports:
        assert report["merged"]["unequal"] == [0] * 6


def test_gradients_added_first_are_near_those_reduced_each(reports):
    for report in reports:
        assert report["merged"]["largest_distance"] < TOLERANCE
