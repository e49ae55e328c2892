"""A graph module from the API is taken as it is, or refused with the node at fault."""

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.graph_module import capture_graph, direction_of, kept_by_name
from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from tests.helpers.graphs.instrumented import UnitCosts

FUNCTIONAL = torch.ops._c10d_functional


def gathered(x: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor]:
    whole = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(shard, 4, "0"))
    return (torch.relu(x @ whole),)


def traced(function: Callable[..., object] = gathered) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(torch.randn(2, 16), torch.randn(4, 8))


def graph_with(names: list[str], num_outputs: int = 1) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in names]
    graph.output((nodes[0], *[None] * (num_outputs - 1)))
    return graph


def test_traced_module_is_taken_as_it_is() -> None:
    module = traced()
    captured = capture_graph(module)
    assert captured.module is module
    assert (captured.name, captured.kept_inputs) == ("graph", {"x_1", "shard_1"})


def gathered_twice(x: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    start = FUNCTIONAL.all_gather_into_tensor(shard, 4, "0")
    first = torch.relu(x @ FUNCTIONAL.wait_tensor(start))
    return first, first @ FUNCTIONAL.wait_tensor(start).T, FUNCTIONAL.wait_tensor(start)


def test_repeated_waits_are_one_and_the_gather_may_share_a_bucket() -> None:
    """As torch 2.14 leaves them where a parameter is read several times."""
    module = traced(gathered_twice)
    before = module.code
    captured = capture_graph(module)
    waits = [n for n in captured.module.graph.nodes if n.target is FUNCTIONAL.wait_tensor.default]
    assert len(waits) == 1
    assert len(waits[0].users) == 3
    assert module.code == before, "the graph of the caller is not changed"
    problem = build_problem(export_graph(captured, UnitCosts()))
    assert [one.bucketable for one in problem.collectives] == [True]


def test_name_and_kept_inputs_are_the_callers() -> None:
    captured = capture_graph(traced(), name="forward", kept_inputs=["shard_1"])
    assert (captured.name, captured.kept_inputs) == ("forward", {"shard_1"})
    with pytest.raises(
        InputError,
        match=(
            "kept_inputs to name placeholders of the graph, found 'y'; the graph has x_1, shard_1"
        ),
    ):
        capture_graph(traced(), kept_inputs=["y"])


def test_example_inputs_give_values_to_a_copy() -> None:
    module = traced()
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(
        InputError, match=r'node x_1: expected meta\["val"\].*run torch.fx.passes.fake_tensor_prop'
    ):
        capture_graph(module)
    captured = capture_graph(module, example_inputs=(torch.randn(2, 16), torch.randn(4, 8)))
    assert [node.name for node in captured.module.graph.nodes] == [
        node.name for node in module.graph.nodes
    ]
    assert next(node for node in captured.module.graph.nodes if node.name == "relu").meta[
        "val"
    ].shape == (2, 8)
    assert not any("val" in node.meta for node in module.graph.nodes)


def test_example_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        InputError, match="expected 2 example_inputs, one for each placeholder, found 1"
    ):
        capture_graph(traced(), example_inputs=(torch.randn(2, 16),))
    with pytest.raises(
        InputError, match=r"node mm: expected shapes that torch\.ops\.aten\.mm\.default accepts"
    ):
        capture_graph(traced(), example_inputs=(torch.randn(2, 17), torch.randn(4, 8)))


def test_what_is_no_graph_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected a torch\.fx\.GraphModule, found Linear"):
        capture_graph(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_graph_that_fails_lint_is_refused() -> None:
    module = traced()
    nodes = {node.name: node for node in module.graph.nodes}
    nodes["mm"].prepend(nodes["relu"])
    with pytest.raises(InputError, match=r"passes torch's lint, found: .*mm"):
        capture_graph(module)


def test_waits_of_items_and_of_written_tensors_count() -> None:
    def both(x: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = FUNCTIONAL.all_gather_into_tensor_coalesced([shard, x], 4, "0")
        out = shard.new_empty(16, 8)
        FUNCTIONAL.all_gather_into_tensor_out(shard, 4, "0", out=out)
        return (*(FUNCTIONAL.wait_tensor(part) for part in parts), FUNCTIONAL.wait_tensor(out))

    names = [node.name for node in capture_graph(traced(both)).module.graph.nodes]
    assert "all_gather_into_tensor_out" in names


def test_methods_and_modules_are_refused() -> None:
    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

    module = torch.fx.symbolic_trace(Plain())
    with pytest.raises(
        InputError, match="node relu: expected a graph of operators, found call_method of relu"
    ):
        capture_graph(module, example_inputs=(torch.randn(3),))


def test_size_that_depends_on_data_is_taken_as_it_is() -> None:
    module = make_fx(lambda x: (torch.nonzero(x),), tracing_mode="symbolic")(torch.randn(2, 16))
    assert capture_graph(module).module is module


@pytest.mark.parametrize(
    ("names", "num_outputs", "direction", "kept"),
    [
        (["primals_1", "primals_2"], 1, "forward", {"primals_1", "primals_2"}),
        (["primals_2", "mm", "tangents_1"], 3, "backward", {"primals_2"}),
        (["primals_1", "primals_2", "tangents_1"], 2, "backward", {"primals_1", "primals_2"}),
        (["primals_1", "primals_2", "tangents_1"], 3, "joint", {"primals_1", "primals_2"}),
        (["mm", "tangents_1"], 2, "backward", set()),
        (["arg0_1", "arg1_1"], 1, "graph", {"arg0_1", "arg1_1"}),
    ],
)
def test_direction_and_kept_inputs_follow_the_names(
    names: list[str], num_outputs: int, direction: str, kept: set[str]
) -> None:
    assert direction_of(graph_with(names, num_outputs)) == direction
    assert kept_by_name(names) == kept
