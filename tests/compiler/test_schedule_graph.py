"""``schedule_graph``: what every surface in a compiler calls; its settings, its errors and its
policy on errors.
"""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import apsched
from apsched.capture.fake_world import world
from apsched.compiler import schedule_graph as of_compiler
from apsched.compiler.schedule_graph import schedule_graph
from apsched.compiler.settings import Settings
from tests.helpers.graphs.toy_graphs import capture_toy


@pytest.fixture
def gm() -> Iterator[torch.fx.GraphModule]:
    """A toy training step on two process ranks."""
    with world(2) as running:
        yield capture_toy(next(iter(running.group_ranks)), 2, num_shards=3).module


def test_a_graph_without_collectives_is_handed_back() -> None:
    alone = make_fx(lambda x: torch.sin(x) @ x, tracing_mode="fake")(torch.ones(4, 4))
    assert schedule_graph(alone, Settings()) is alone


def test_it_is_optimize_with_the_same_settings(
    gm: torch.fx.GraphModule, caplog: pytest.LogCaptureFixture
) -> None:
    before = gm.code
    with caplog.at_level(logging.INFO, logger="apsched.compiler.schedule_graph"):
        fast = schedule_graph(gm, Settings(memory_cap="1GiB", max_prefetch=4))
    assert fast.code == apsched.optimize(gm, memory_cap_bytes=2**30, max_prefetch=4).code
    assert fast.code != before == gm.code
    assert fast.meta["apsched_result"].round_trip_exact is True
    (line,) = caplog.messages
    assert "step time" in line
    assert "as captured" in line


def test_an_error_stops_or_is_logged(
    gm: torch.fx.GraphModule, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(apsched.InfeasibleError, match="memory"):
        schedule_graph(gm, Settings(memory_cap=1))
    with caplog.at_level(logging.WARNING):
        assert schedule_graph(gm, Settings(memory_cap=1, on_error="fallback"), name="forward") is gm
    assert [
        r.message.startswith("forward stays unchanged: ")
        for r in caplog.records
        if "stays" in r.message
    ] == [True]


def test_what_apsched_did_not_foresee_falls_back_too(gm: torch.fx.GraphModule) -> None:
    class Broken:
        def compute_us(self, node: torch.fx.Node) -> float:
            raise ZeroDivisionError

        def collective_us(
            self, kind: str, group_name: str, group_size: int, size_bytes: int
        ) -> float:
            return 1.0

    with pytest.raises((ZeroDivisionError, apsched.ApschedError)):
        schedule_graph(gm, Settings(cost_model=Broken()))
    assert schedule_graph(gm, Settings(cost_model=Broken(), on_error="fallback")) is gm


def test_an_error_in_the_line_about_a_graph_falls_back_too(
    gm: torch.fx.GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(result: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(of_compiler, "scheduled_line", fails)
    with pytest.raises(ZeroDivisionError):
        schedule_graph(gm, Settings())
    assert schedule_graph(gm, Settings(on_error="fallback")) is gm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_cup": 1}, "did you mean 'memory_cap'"),
        (
            {"accumulate": 2},
            r"apsched\.tune_fsdp2\(accumulate=N\) .* apsched\.micro_batches\(module",
        ),
        ({"micro_batches": 2}, r"TorchTitan's register\(micro_batches=N\)"),
        ({"keep": "auto"}, r"pass keep to apsched\.backend, apsched\.solve_step"),
        ({"on_error": "ignore"}, "expected 'raise' or 'fallback', found 'ignore'"),
        ({"cluster": "no-such-cluster"}, "no-such-cluster"),
        ({"memory_cap": "plenty"}, "memory_cap: expected bytes"),
        ({"bucket_cap": "-1MiB"}, "bucket_cap"),
        ({"max_prefetch": -1}, "max_prefetch"),
        ({"budget": -1.0}, "budget"),
        ({"plan": "no/such/plan.toml"}, "cannot read the plan"),
        ({"bitwise": 1}, "bitwise: expected True or False"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, object], message: str) -> None:
    with pytest.raises(apsched.InputError, match=message):
        Settings.of(settings)
