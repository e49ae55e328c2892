"""Warnings and notes on costs: measured on another device, contention that a cluster states."""

from dataclasses import replace

import pytest

from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.measured import MeasuredCosts
from apsched.pipeline.cost_choice import ReadCosts, other_device
from apsched.problem.contention_spec import ContentionChoice, contention_off


def _read(device: str, stated: str, cluster: str) -> ReadCosts:
    measured = MeasuredCosts(device=device, cluster=stated)
    return ReadCosts(cluster=load_cluster(cluster), measured=measured)


@pytest.mark.parametrize(
    ("device", "stated", "cluster"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", "h200"),
        ("cpu, 1 thread", "h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "mine", "a100-efa"),
    ],
)
def test_costs_of_one_device_and_a_cluster_of_another_are_worth_a_warning(
    device: str, stated: str, cluster: str
) -> None:
    (warning,) = other_device(_read(device, stated, cluster))
    assert repr(device) in warning
    assert repr(cluster) in warning


@pytest.mark.parametrize(
    ("device", "stated", "cluster"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", "h100-efa"),  # another network, the same device
        ("cpu, 1 thread", "cpu", "cpu"),
        ("a device of my own", "h100", "h100"),
    ],
)
def test_costs_of_the_same_device_or_of_one_that_is_not_known_are_not(
    device: str, stated: str, cluster: str
) -> None:
    assert other_device(_read(device, stated, cluster)) == ()


def test_costs_by_formula_alone_are_of_one_device() -> None:
    assert other_device(ReadCosts(cluster=load_cluster("h100"))) == ()


def test_contention_that_the_cluster_states_and_that_is_off_is_noted() -> None:
    h100 = load_cluster("h100")
    (note,) = contention_off(ContentionChoice(links=True), h100)
    assert note.startswith("contention of compute is off: cluster h100")
    assert "1.19 times as long" in note
    assert "--contention compute" in note
    assert contention_off(ContentionChoice(compute=True), h100) == ()
    assert contention_off(ContentionChoice(), replace(h100, compute_slowdown=None)) == ()
