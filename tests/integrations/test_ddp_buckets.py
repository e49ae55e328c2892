"""``ddp_buckets``: launches cost on the compute stream, and no other runs end the step earlier."""

import random
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import nn

import apsched
from apsched.capture.fake_world import world
from apsched.errors import InputError
from apsched.integrations import ddp_buckets as module
from apsched.integrations.ddp_buckets import DdpBuckets, _Backward, _best, _judged
from tests.helpers.processes import WORKERS, run_processes


class Prices:
    """A cost model in which an all-reduce takes ``latency_us`` and a microsecond per 1000 bytes."""

    def __init__(self, latency_us: float) -> None:
        self.latency_us = latency_us

    def compute_us(self, node: torch.fx.Node) -> float:
        return 0.0

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        return self.latency_us + size_bytes / 1000


def backward(seed: int, launch_us: float) -> _Backward:
    draw = random.Random(seed)
    ready = sorted(draw.uniform(0, 200) for _ in range(7))
    sizes = [draw.choice([100, 3000, 20000]) for _ in ready]
    return _Backward(
        names=tuple(f"p{k}" for k in range(7)),
        parameters=tuple(torch.empty(size // 4, device="meta") for size in sizes),
        ready_us=tuple(ready),
        end_us=ready[-1] + draw.choice([0.0, 20.0]),
        launch_us=launch_us,
    )


def all_limits(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the limits of each way to cut the gradients into runs."""
    found = []
    for cuts in product([False, True], repeat=len(sizes) - 1):
        ends = [0, *(k + 1 for k, cut in enumerate(cuts) if cut), len(sizes)]
        found.append(tuple(sum(sizes[a:b]) for a, b in pairwise(ends)))
    return found


@pytest.mark.parametrize("launch_us", [0.0, 5.0, 40.0])
@pytest.mark.parametrize("latency_us", [0.5, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_runs_end_the_step_earlier(monkeypatch, seed, latency_us, launch_us):
    monkeypatch.setattr(module, "_SLACK", 0.0)
    of, prices = backward(seed, launch_us), Prices(latency_us)
    with world(2):
        found = _best(of, prices)
        least_us = min(_judged(of, limits, prices)[0] for limits in all_limits(of.sizes))
    assert found.step_time_us == pytest.approx(least_us, rel=1e-3), "prices are interpolated"


def test_limits_of_ddp_itself_need_no_arguments():
    found = DdpBuckets(
        bucket_cap_mb=25.0,
        bucket_cap_mb_list=(1.0, 25.0),
        first_bucket_bytes=100,
        buckets=(("weight",),),
        bucket_bytes=(100,),
        step_time_us=1.0,
        default_us=1.0,
    )
    assert found.arguments == {}, "a list also cuts the buckets of the first step"
    assert replace(found, bucket_cap_mb_list=(1.0, 5.0)).arguments != {}


@pytest.mark.parametrize("takes_a_list", [True, False])
def test_a_ddp_without_limits_of_each_bucket_gets_one_limit(monkeypatch, takes_a_list):
    monkeypatch.setattr(module, "_SLACK", 0.0)
    monkeypatch.setattr(module, "takes_limits_of_buckets", lambda: takes_a_list)
    with world(2):
        found = _best(backward(0, 0.0), Prices(0.5))
    assert ("bucket_cap_mb_list" in found.arguments) == takes_a_list


def test_a_launch_delays_the_compute_behind_it():
    of, prices = backward(0, 5.0), Prices(0.5)
    with world(2):
        one_us = _judged(of, (sum(of.sizes),), prices)[0]
        assert one_us == pytest.approx(of.ready_us[-1] + 5.0 + 0.5 + sum(of.sizes) / 1000)
        many_us, buckets, _ = _judged(of, of.sizes, prices)
        assert many_us >= of.end_us + 5.0 * len(buckets)


def test_buckets_of_a_small_model_are_few():
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    with world(2):
        found = apsched.ddp_buckets(nn.Sequential(*layers), (torch.ones(4, 32),), cluster="h100")
    assert len(found.buckets) == 1, "a launch costs more than the wait for a few bytes"


def test_parameters_that_ddp_ignores_are_in_no_bucket():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    ignored = ["0.weight", "2.bias"]
    ddp: Any = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ignored)
    with world(2):
        found = apsched.ddp_buckets(model, (torch.ones(4, 8),), cluster="h100")
    reduced = {name for name, _ in model.named_parameters()} - {*ignored}
    assert {*found.parameter_order} == reduced
    assert sum(found.bucket_bytes) == 4 * (2 * 8 * 8 + 2 * 8)


def test_errors_name_the_remedy():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with world(2):
        with pytest.raises(InputError, match="found none; hand in a model with a parameter"):
            apsched.ddp_buckets(frozen, (torch.ones(1, 2),), cluster="h100")
        with pytest.raises(InputError, match="found 'budget'; leave it out"):
            apsched.ddp_buckets(nn.Linear(2, 2), (torch.ones(1, 2),), budget=1.0)


@pytest.mark.ranks
def test_all_reduces_of_ddp_in_a_graph_share_launches_and_keep_their_bits(tmp_path):
    """docs/integrations.md: the mode of DDP that leaves its all-reduces to the graph."""
    worker = WORKERS / "training/ddp_graph_worker.py"
    reports = run_processes(worker, tmp_path / "two", 2, timeout_s=300)
    for report in [of_one for of_rank in reports for of_one in of_rank.values()]:
        assert report["scheduled"] == report["plain"], "bit for bit"
        ((num_collectives, num_launches),) = report["launches"]
        assert num_collectives == 4
        assert num_launches < 3, "torch puts a copy behind each, which goes with its wait"
