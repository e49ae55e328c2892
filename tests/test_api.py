"""``apsched.optimize`` and ``apsched.solve``: a graph in, a checked one out, and the result at
hand.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import apsched
from apsched.capture.fake_world import world
from apsched.graph.graph_file import load_graph
from tests.helpers.graphs.toy_graphs import capture_toy


class OneMicrosecond:
    """A cost model of the user's own."""

    def compute_us(self, node: torch.fx.Node) -> float:
        """Every node takes as long."""
        return 1.0

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        """Latency and bandwidth."""
        return 20.0 + size_bytes / 1000


@pytest.fixture
def gm() -> Iterator[torch.fx.GraphModule]:
    """A toy training step on two process ranks."""
    with world(2) as running:
        yield capture_toy(next(iter(running.group_ranks)), 2, num_shards=3).module


def _launches(module: torch.fx.GraphModule) -> int:
    return sum("wait_tensor" in str(node.target) for node in module.graph.nodes)


def test_the_result_is_at_hand(gm: torch.fx.GraphModule) -> None:
    """Fewer launches than before, never slower, checked by a round trip, and the input as it
    was.
    """
    before = [node.name for node in gm.graph.nodes]
    fast = apsched.optimize(gm)
    result = fast.meta["apsched_result"]
    assert isinstance(result, apsched.Result)
    assert fast.apsched_result is result
    assert result.round_trip_exact is True
    assert result.best is not None
    assert _launches(fast) == result.best.num_launches < _launches(gm)
    assert all(
        result.best.step_time_ticks <= b.step_time_ticks for b in result.answer.baselines if b.fits
    )
    assert result.bound_us <= (result.step_time_us or 0.0)
    assert result.caps.memory_cap_bytes == apsched.load_cluster("h100").device.memory_bytes, (
        "without a stated cap, the device's memory"
    )
    assert [node.name for node in gm.graph.nodes] == before
    assert "apsched_result" not in gm.meta
    fast.graph.lint()


def test_contention_is_that_of_the_result_and_of_the_round_trip(gm: torch.fx.GraphModule) -> None:
    result = apsched.optimize(gm, contention="compute=1.5").meta["apsched_result"]
    assert result.problem.contention.compute_slowdown == (3, 2)
    assert result.round_trip_exact is True
    with pytest.raises(apsched.InputError, match="expected none, or links"):
        apsched.optimize(gm, contention="everything")


def test_a_cost_model_of_the_users_own(gm: torch.fx.GraphModule) -> None:
    """Without a device there is no cap on memory; it may be stated as text."""
    result = apsched.optimize(gm, cost_model=OneMicrosecond()).meta["apsched_result"]
    assert result.cluster == ""
    assert result.caps.memory_cap_bytes is None
    capped = apsched.optimize(gm, cost_model=OneMicrosecond(), memory_cap_bytes="floor").meta[
        "apsched_result"
    ]
    assert (
        capped.best.peak_memory_bytes
        <= capped.caps.memory_cap_bytes
        <= result.best.peak_memory_bytes
    )
    assert capped.step_time_us >= result.bound_us


def test_caps(gm: torch.fx.GraphModule) -> None:
    result = apsched.optimize(
        gm,
        bucket_cap_bytes=300,
        max_topo_span=20,
        max_prefetch=2,
        in_flight_cap_bytes=1000,
        memory_cap_bytes="none",
    ).meta["apsched_result"]
    assert result.chosen.bucket_bytes <= 300
    assert result.chosen.topo_span <= 20
    assert result.chosen.prefetch <= 2
    assert result.chosen.in_flight_bytes <= 1000


def test_nothing_fits(gm: torch.fx.GraphModule) -> None:
    with pytest.raises(apsched.InfeasibleError, match=r"--memory-cap \d+"):
        apsched.optimize(gm, memory_cap_bytes=1)


@pytest.mark.parametrize("cap", [-1, True, 1.5, "plenty"])
def test_what_is_no_cap(gm: torch.fx.GraphModule, cap: object) -> None:
    with pytest.raises(apsched.InputError, match="memory_cap_bytes"):
        apsched.optimize(gm, memory_cap_bytes=cap)


def test_what_is_no_graph_module() -> None:
    with pytest.raises(
        apsched.InputError, match=r"expected a torch\.fx\.GraphModule, found Linear"
    ):
        apsched.optimize(torch.nn.Linear(2, 2))


def test_solve_a_dag(debug_graphs: dict[str, Path]) -> None:
    """A DAG and its problem have the same answer."""
    dag = load_graph(debug_graphs["forward"])
    options = apsched.SolveOptions(budget=0.0)
    result = apsched.solve(dag, memory_cap_bytes=2**30, options=options)
    assert result.best is not None
    assert result.cluster == "h100"
    again = apsched.solve(result.problem, memory_cap_bytes=2**30, options=options)
    assert again.schedule == result.schedule
    nothing = apsched.solve(dag, memory_cap_bytes=0, options=options)
    assert nothing.best is None
    assert nothing.answer.infeasibility is not None
