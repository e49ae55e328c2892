"""``apsched.optimize`` and ``apsched.solve``: a graph in, a checked one out, and the result
available.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import apsched
from apsched.capture.fake_world import world
from apsched.compiler.settings import Settings
from apsched.config import SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.graph.graph_file import load_graph
from apsched.problem.build import build_problem
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
    assert result.account is not None
    assert result.caps.memory_cap_bytes == result.account.left_bytes, (
        "without a stated cap, the device's memory less what it holds beside the graph"
    )
    assert 0 < result.account.left_bytes < load_cluster("h100").device.memory_bytes
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


def test_a_graph_that_reduces_an_input_in_place() -> None:
    """No storage is of the graph, so a collective has neither an input nor an output of its own."""
    ops = torch.ops._c10d_functional
    with world(2) as running:
        group = next(iter(running.group_ranks))

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            for tensor in (x, y):
                ops.all_reduce_(tensor, "sum", group)
                ops.wait_tensor(tensor)

        graph = make_fx(step, tracing_mode="fake")(torch.empty(64, 64), torch.empty(16, 16))
        result = apsched.optimize(graph, budget=1).apsched_result
    assert result.best is not None
    assert result.best.num_launches == 2
    assert result.best.peak_memory_bytes == 4 * (64 * 64 + 16 * 16)
    assert result.gap == 0.0


def test_a_program_of_torch_export() -> None:
    """Its graph has an input of the name ``input``, which FX renames in copies; its module calls
    guards, which are no operators.
    """
    program = torch.export.export(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.ones(4, 8),))
    fast = apsched.optimize(program.graph_module, budget=0)
    assert fast.apsched_result.round_trip_exact
    names = [[n.name for n in module.graph.nodes] for module in (program.graph_module, fast)]
    assert names[0] == names[1]
    assert "input" in names[0]
    inputs = [*program.state_dict.values(), torch.randn(4, 8)]
    assert torch.equal(fast(*inputs)[0], program.graph_module(*inputs)[0])
    with pytest.raises(apsched.InputError, match=r"hand in its graph_module in place of module"):
        apsched.optimize(program.module())


def test_nothing_fits(gm: torch.fx.GraphModule) -> None:
    with pytest.raises(apsched.InfeasibleError, match=r"try memory_cap=\d+ \("):
        apsched.optimize(gm, memory_cap_bytes=1)


@pytest.mark.parametrize("cap", [-1, True, 1.5, "plenty"])
def test_what_is_no_cap(gm: torch.fx.GraphModule, cap: object) -> None:
    with pytest.raises(apsched.InputError, match="memory_cap_bytes"):
        apsched.optimize(gm, memory_cap_bytes=cap)


def test_the_memory_beside_the_graph_is_that_of_the_stated_optimizer(
    gm: torch.fx.GraphModule,
) -> None:
    usual, other = (
        apsched.optimize(gm, budget=0, **stated).apsched_result
        for stated in ({}, {"optimizer": "none", "reserve": "10%"})
    )
    assert usual.account is not None
    assert other.account is not None
    assert (usual.account.optimizer, usual.account.reserve) == ("adamw", 0.05)
    assert (other.account.optimizer, other.account.reserve) == ("none", 0.1)
    assert other.caps.memory_cap_bytes == other.account.left_bytes < usual.account.left_bytes
    with pytest.raises(apsched.InputError, match="optimizer"):
        apsched.optimize(gm, optimizer="lion")
    weight = nn.Parameter(torch.ones(1024, 1024))
    stated = {"optimizer": torch.optim.Adam([weight], amsgrad=True), "reserve": "10%"}
    held = apsched.optimize(gm, budget=0, **stated).apsched_result
    assert held.account is not None
    assert other.account.left_bytes - held.account.left_bytes == 3 * weight.nbytes


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
    assert (nothing.status, nothing.peak_memory_bytes) == ("infeasible", None)
    assert result.status == ("optimal" if result.gap == 0 else "feasible")
    assert result.peak_memory_bytes == result.best.peak_memory_bytes <= 2**30


@pytest.mark.parametrize("name", ["capture", "study"])
def test_a_function_with_the_name_of_a_package_has_a_signature(name: str) -> None:
    function = getattr(apsched, name)
    assert "args" not in inspect.signature(function).parameters


def test_solve_a_graph_file(debug_graphs: dict[str, Path]) -> None:
    options = apsched.SolveOptions(budget=0.0)
    dag = load_graph(debug_graphs["forward"])
    result = apsched.solve(debug_graphs["forward"], options=options, bucket_cap="1MiB")
    same = apsched.solve(dag, options=options, bucket_cap_bytes=2**20)
    assert result.schedule == same.schedule
    with pytest.raises(apsched.InputError, match="graph: expected a graph of"):
        apsched.solve(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("caps", 3),
        ("caps", SolveOptions()),
        ("options", 0),
        ("memory_cap", 5.5),
        ("memory_cap", "5.5"),
        ("bucket_cap", 1.5),
        ("max_topo_span", "many"),
        ("max_prefetch", -1),
        ("in_flight_cap", "lots"),
        ("max_compute_move", "far"),
        ("plan", 3),
        ("bitwise", "yes"),
        ("contention", 3),
        ("second_group", 1),
        ("scenarios", 0),
        ("scenarios", "5"),
        ("time_slack", "200%"),
        ("budget", "much"),
        ("seed", 1.5),
        ("group_ranks", 3),
    ],
)
def test_values_of_options_are_those_of_the_command_line(
    debug_graphs: dict[str, Path], name: str, value: object
) -> None:
    with pytest.raises(InputError, match="expected"):
        apsched.solve(debug_graphs["forward"], **{"budget": 0.0, name: value})


def test_texts_are_read_as_on_the_command_line(debug_graphs: dict[str, Path]) -> None:
    path = debug_graphs["forward"]
    texts = apsched.solve(path, max_prefetch="2", budget="0", time_slack="1%", seed="1")
    values = apsched.solve(path, max_prefetch=2, budget=0, time_slack=0.01, seed=1)
    assert texts.schedule == values.schedule


def test_another_graph_is_none_of_apsched() -> None:
    with pytest.raises(InputError, match=r"graph: expected a graph of apsched\.capture.*cluster"):
        apsched.solve(nx.DiGraph(), budget=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mesh", 3),
        ("keep", 3),
        ("accumulate", 0),
        ("accumulate", 1.5),
        ("cluster", 3),
        ("activation_checkpoint", 3),
        ("caps", 3),
        ("options", {}),
        ("memory_cap", 1.5),
        ("optimizer", 3),
        ("optimizer", "adam"),
        ("reserve", "200%"),
        ("plan", 3),
        ("second_group", "no"),
        ("budget", -1),
    ],
)
def test_a_step_takes_no_other_values(name: str, value: object) -> None:
    model, inputs = nn.Linear(4, 4), [torch.randn(2, 4)]
    with pytest.raises(InputError, match="expected"):
        apsched.solve_step(model, inputs, **{"budget": 0, name: value})


def test_optimize_takes_the_cluster_of_the_backend(gm: torch.fx.GraphModule) -> None:
    fast = apsched.optimize(gm, cluster="a100", budget=0.0)
    same = apsched.optimize(gm, cost_model=ClusterCostModel(load_cluster("a100")), budget=0.0)
    assert fast.meta["apsched_result"].step_time_us == same.meta["apsched_result"].step_time_us
    other = apsched.optimize(gm, cluster="h100", budget=0.0)
    assert fast.meta["apsched_result"].step_time_us != other.meta["apsched_result"].step_time_us


def test_the_backend_takes_the_records_of_solve() -> None:
    caps = apsched.Caps(memory_cap_bytes=2**30, bucket_cap_bytes=2**20, max_compute_move=3)
    options = apsched.SolveOptions(budget=0.5, seed=2)
    settings = Settings.of({"caps": caps, "options": options, "cluster": "a100"})
    assert settings == Settings(
        cluster="a100",
        memory_cap=2**30,
        bucket_cap=2**20,
        max_compute_move=3,
        budget=0.5,
        seed=2,
    )
    assert settings.solve_options == options
    with pytest.raises(apsched.InputError, match="bucket_cap: expected it once, found it in caps"):
        apsched.backend(caps=caps, bucket_cap="1MiB")
    with pytest.raises(apsched.InputError, match=r"options: expected apsched.SolveOptions\(...\)"):
        apsched.backend(options={"budget": 1})


def test_records_and_keywords_are_the_same(debug_graphs: dict[str, Path]) -> None:
    problem = build_problem(load_graph(debug_graphs["backward"]))
    caps = apsched.Caps(memory_cap_bytes=2**30, bucket_cap_bytes=2**20, max_compute_move=3)
    options = apsched.SolveOptions(budget=0.0, seed=2)
    one = apsched.solve(problem, caps, options)
    other = apsched.solve(
        problem,
        memory_cap_bytes=2**30,
        bucket_cap_bytes=2**20,
        max_compute_move=3,
        budget=0.0,
        seed=2,
    )
    both = apsched.solve(
        problem,
        apsched.Caps(memory_cap_bytes=2**30, max_compute_move=3),
        apsched.SolveOptions(budget=0.0),
        bucket_cap_bytes=2**20,
        seed=2,
    )
    assert one.answer == other.answer == both.answer
    assert one.caps == other.caps == both.caps


def test_caps_say_how_far_compute_moves(gm: torch.fx.GraphModule) -> None:
    """Not at all in ``Caps()``; the memory cap is what the device leaves, as without a record."""
    quick = apsched.SolveOptions(budget=0.0)
    result = apsched.optimize(gm, caps=apsched.Caps(max_prefetch=2), options=quick).meta[
        "apsched_result"
    ]
    assert result.caps.max_compute_move == 0
    assert result.caps.max_prefetch == 2
    without = apsched.optimize(gm, max_prefetch=2, options=quick).meta["apsched_result"]
    assert result.caps.memory_cap_bytes == without.caps.memory_cap_bytes
    assert result.caps.memory_cap_bytes < load_cluster("h100").device.memory_bytes


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"caps": {"max_prefetch": 2}, "max_prefetch": 2}, "max_prefetch: expected it once"),
        ({"caps": {"memory_cap_bytes": 1}, "memory_cap_bytes": 1}, "memory_cap"),
        ({"caps": {"max_compute_move": 1}, "max_compute_move": None}, "max_compute_move"),
        ({"options": {"seed": 1}, "seed": 0}, "seed: expected it once, found it in options"),
        ({"noise": 0.1}, "noise: it is about scenarios"),
    ],
)
def test_what_is_given_twice_is_refused(
    gm: torch.fx.GraphModule, stated: dict[str, Any], message: str
) -> None:
    records = {"caps": apsched.Caps, "options": apsched.SolveOptions}
    given = {
        name: records[name](**value) if name in records else value for name, value in stated.items()
    }
    with pytest.raises(apsched.InputError, match=message):
        apsched.optimize(gm, **given)
    with pytest.raises(apsched.InputError, match=message):
        apsched.solve(None, **given)


def test_scenarios_and_second_groups_in_a_compiler(gm: torch.fx.GraphModule) -> None:
    """The optimized module has the options of the command line."""
    fast = apsched.optimize(gm, scenarios=2, noise=0.3, robust="mean", budget=0.0)
    robustness = fast.meta["apsched_result"].robustness
    assert (robustness.options.count, robustness.options.measure) == (2, "mean")


def test_second_groups_without_a_compiler(debug_graphs: dict[str, Path]) -> None:
    """Never slower than without; the problem of the answer has the groups where it is faster."""
    dag = load_graph(debug_graphs["backward"])
    alone = apsched.solve(dag, memory_cap_bytes=2**30, budget=0.0)
    both = apsched.solve(dag, memory_cap_bytes=2**30, budget=0.0, second_group=True)
    assert (both.step_time_us or 0.0) <= (alone.step_time_us or 0.0)
    assert (both.step_time_us == alone.step_time_us) == (
        both.problem.streams == alone.problem.streams
    )


def test_a_model_of_ones_own_is_captured_by_mesh_and_solved() -> None:
    """In public, priced, and whether or not the package of that name was imported before."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    forward, backward = apsched.capture(model, [torch.zeros(4, 64)], "fsdp=4")
    assert (forward.graph["name"], backward.graph["name"]) == ("forward", "backward")
    assert forward.graph["cluster"] == "h100"
    result = apsched.solve(backward, memory_cap="1GiB", budget=0)
    assert result.best is not None
    assert result.caps.memory_cap_bytes == 2**30
    least = apsched.solve(backward, memory_cap="floor", budget=1)  # with 0 less is known of it
    assert least.caps.memory_cap_bytes == least.answer.floor_memory_bytes
    with pytest.raises(apsched.InputError, match="memory_cap: expected it once"):
        apsched.solve(backward, memory_cap="1GiB", memory_cap_bytes=2**30)
    with pytest.raises(apsched.InputError, match="mesh axes are"):
        apsched.capture(model, [torch.zeros(4, 64)], "pp=4")
