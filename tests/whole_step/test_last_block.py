"""The habit of FSDP2 to keep the last block comes out by itself."""

import pytest

from apsched.whole_step import search
from apsched.whole_step.choices import Choice, named_choices
from apsched.whole_step.search import solve_step
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers
from tests.whole_step.test_search import step_of


def test_at_the_least_memory_the_last_block_alone_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward needs it first, and at the peak it is there anyway."""
    layers, prices = captured_layers((64,) * 7), FlatPrices(bytes_per_us=1200.0, latency_us=2.0)
    free = step_of(layers, prices, None)
    least_bytes = free.solve(Choice()).least_bytes
    last = Choice(["weights.5"])
    assert named_choices(free.parameters)["last_block"] == last

    def without_last_block(*given: object) -> dict[str, Choice]:
        return {n: c for n, c in named_choices(*given).items() if n != "last_block"}

    monkeypatch.setattr(search, "named_choices", without_last_block)
    step = step_of(layers, prices, least_bytes)
    found = solve_step(step)
    assert "last_block" not in found.baselines
    assert found.best.kept == last
    assert found.best.step_ticks < step.solve(Choice()).step_ticks
