"""What an answer says of sizes that depend on data: what they are taken to be, and what rests on
them.
"""

import json
import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import apsched
from apsched.artifacts.schedule_file import dump_schedule
from apsched.capture.fake_world import world
from apsched.compiler import schedule_graph as of_compiler
from apsched.compiler.schedule_graph import schedule_graph, scheduled_line
from apsched.compiler.settings import Settings
from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.graph.graph_file import from_bytes, to_bytes
from apsched.report.summary import graph_json, summary_lines
from tests.helpers.graphs.experts import Experts, Masked, env_of, knowledge_of
from tests.helpers.graphs.instrumented import UnitCosts, capture_of
from tests.helpers.graphs.small_models import WIDTH

c10d = torch.ops._c10d_functional


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A fake process group, in which buckets have a place for this process rank."""
    with world(4):
        yield


def gathered(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(c10d.wait_tensor(c10d.all_gather_into_tensor(t, 4, "0")) for t in (x, y, x))


@pytest.fixture
def module() -> torch.fx.GraphModule:
    """Two gathers of a known size, and one of ``u0`` rows."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = env.create_unbacked_symint()
        torch._check(rows >= 0)
        inputs = torch.empty(8, 8), torch.empty(rows, 8)
    return make_fx(gathered)(*inputs)


def test_shares_are_those_of_nodes_and_storages_of_such_sizes(module) -> None:
    """By hand: a launch takes 1 µs, a transfer 10 µs and 1 µs a KiB; ``u0`` is 16."""
    fast = apsched.optimize(
        module, cost_model=UnitCosts(), hints={"u0": 16}, budget=0, bucket_cap_bytes=0
    )
    found = fast.apsched_result.assumptions
    assert [(s.symbol, s.value, s.source) for s in found.sizes] == [("u0", 16, "stated")]
    assert found.time_share == pytest.approx((1 + 12) / (1 + 12 + 2 * (1 + 11)))
    given, results = 8 * 8 * 4 + 256, 2 * 4 * 8 * 8 * 4  # rounded up to 512 bytes
    of_data, gathered_data = 16 * 8 * 4, 4 * 16 * 8 * 4
    assert fast.apsched_result.best.peak_memory_bytes == given + results + of_data + gathered_data
    assert found.peak_share == pytest.approx(
        (of_data + gathered_data) / (given + results + of_data + gathered_data)
    )


def test_every_surface_says_what_is_assumed(module) -> None:
    result = apsched.optimize(module, cost_model=UnitCosts(), hints={"u0": 16}).apsched_result
    said = "u0 = 16 (as stated); "
    assert any(f"  assumed: {said}" in line for line in summary_lines(result))
    assert f"; assumed: {said}" in scheduled_line(result)
    stated = {"u0": {"value": 16, "source": "stated"}}
    assert graph_json(result)["assumed"]["sizes"] == stated
    file = json.loads(dump_schedule(result))
    assert file["assumed"]["sizes"] == stated
    assert 0 < file["assumed"]["time_share"] < 1
    assert 0 < file["assumed"]["peak_share"] < 1


def test_without_such_sizes_nothing_is_said() -> None:
    with FakeTensorMode():
        inputs = torch.empty(8, 8), torch.empty(8, 8)
    result = apsched.optimize(make_fx(gathered)(*inputs), cost_model=UnitCosts()).apsched_result
    assert result.assumptions is None
    assert "assumed" not in graph_json(result)
    assert b"assumed" not in dump_schedule(result)
    assert not any("assumed" in line for line in summary_lines(result))


def test_what_has_such_a_size_is_never_bucketed(module) -> None:
    dag = export_graph(capture_of(module, ["x_1", "y_1"]), UnitCosts())
    collectives = [r.collective for _, r in dag.nodes(data="record") if r.collective is not None]
    assert [c.bucketable for c in collectives] == [True, False, True]
    assert not any(c.on_path for c in collectives)


def test_a_graph_file_keeps_it(module) -> None:
    dag = export_graph(capture_of(module, ["x_1", "y_1"]), UnitCosts())
    back = from_bytes(to_bytes(dag))
    assert back.graph["assumed"] == dag.graph["assumed"]
    assert [s.symbol for s in back.graph["assumed"].sizes] == ["u0"]
    answers = [apsched.solve(one, budget=0).assumptions for one in (dag, back)]
    assert answers[0] == answers[1] is not None


@pytest.mark.parametrize("hints", [{"u0": -1}, {"u0": True}, {0: 3}, [("u0", 3)], "u0", "u0=x"])
def test_a_hint_that_is_none_is_refused(hints: object) -> None:
    with pytest.raises(InputError, match="hints: expected"):
        Settings.of({"hints": hints})


def test_hints_are_read_as_on_the_command_line() -> None:
    assert Settings(hints="u0=3, u1=4").stated_hints == {"u0": 3, "u1": 4}
    assert Settings().stated_hints == {}


@pytest.mark.parametrize("of_inputs", [False, True], ids=["", "sizes of inputs are symbols, too"])
def test_a_schedule_adds_no_guard(of_inputs: bool) -> None:
    """In a whole step with experts and a mask: capture, passes, prices, search, write-back."""
    torch.manual_seed(0)
    x = torch.randn(16, WIDTH)
    step = nn.Sequential(Experts(dist.group.WORLD), Masked())
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        given = mode.from_tensor(x, static_shapes=not of_inputs)
    module = make_fx(
        step, tracing_mode="symbolic" if of_inputs else "real", _allow_non_fake_inputs=True
    )(x if of_inputs else given)
    env = env_of(module)
    before = knowledge_of(env)
    fast = apsched.optimize(module, cost_model=None, budget=0, memory_cap_bytes="none")
    assert fast.apsched_result.assumptions is not None
    assert fast.apsched_result.round_trip_exact
    assert knowledge_of(env) == before


def test_a_hint_about_another_symbol_is_named(module) -> None:
    with pytest.raises(
        InputError, match=r"hints: expected a symbol .*, found 'u9'; the graph has u0"
    ):
        apsched.optimize(module, cost_model=UnitCosts(), budget=0, hints={"u9": 4})


@pytest.mark.parametrize(
    ("hints", "process_rank", "warned"),
    [
        ({"u9": 4}, 0, True),
        ({"u9": 4}, 1, False),
        ({"u0": 4, "u9": 4}, 0, False),
        (None, 0, False),
    ],
)
def test_hints_without_effect_on_a_graph_of_a_job_are_a_warning(
    module, caplog, monkeypatch, hints, process_rank, warned
) -> None:
    """A job has several graphs, with symbols of their own; one hint that applies is enough."""
    monkeypatch.setattr(of_compiler, "process_rank", lambda: process_rank)
    settings = Settings(cost_model=UnitCosts(), budget=0, hints=hints)
    with caplog.at_level(logging.WARNING, logger="apsched.compiler.schedule_graph"):
        assert schedule_graph(module, settings) is not module
    expected = "expected a symbol whose size depends on data, found 'u9'; the graph has u0"
    assert [expected in text for text in caplog.messages] == [True] * warned
