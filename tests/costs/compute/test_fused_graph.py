"""The kernels of a graph are found once, and live no longer than the graph."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.compute.fused_graph import fused_graph
from apsched.costs.compute.fusion import fused_kernels, fused_shares, shares_if_cut
from apsched.fx.graph_copies import copied
from apsched.graph.export.export import export_graph
from apsched.torch_compat.sizes import unknown_size
from tests.helpers.graphs.instrumented import capture_of

H100 = load_cluster("h100")


def _graph() -> torch.fx.Graph:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x * w + x
        b = torch.sin(a) * torch.cos(x)
        return a, torch.mm(b, w).view(64, -1), b.sum(1)

    matrix = torch.empty(1024, 1024, dtype=torch.bfloat16)
    return make_fx(function, tracing_mode="fake")(matrix, matrix).graph


def test_all_facts_are_those_of_the_graph() -> None:
    graph = _graph()
    found = fused_graph(graph)
    assert found.kernels == fused_kernels(graph) != []
    assert found.shares == fused_shares(graph) != {}
    assert found.shares_if_cut == shares_if_cut(graph) != {}


def test_found_once_as_long_as_the_graph_has_as_many_nodes() -> None:
    graph = _graph()
    assert fused_graph(graph) is fused_graph(graph)
    before = fused_graph(graph)
    last = next(reversed(graph.nodes))
    with graph.inserting_before(last):
        added = graph.call_function(torch.ops.aten.neg.default, (last.all_input_nodes[0],))
        added.meta["val"] = last.all_input_nodes[0].meta["val"].clone()
    assert fused_graph(graph) is not before


def test_prices_follow_the_assumed_sizes() -> None:
    """The same graph under two hints: each has the price of a graph that is exported first."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = torch.empty(unknown_size(env, "u0"), 4096)
    module = make_fx(lambda x: (torch.exp(x) * 2 + 1).sum(1))(rows)

    def price_us(size: int, traced: torch.fx.GraphModule) -> float:
        dag = export_graph(replace(capture_of(traced), hints={"u0": size}), ClusterCostModel(H100))
        return sum(dag.nodes[node]["record"].duration_us for node in dag)

    short_us, long_us = price_us(100, module), price_us(100_000, module)
    assert long_us == price_us(100_000, copied(module)) > 100 * short_us
    assert price_us(100, module) == short_us


def test_prices_follow_a_graph_that_changed_in_place() -> None:
    """The module is run on fake tensors of another size, and exported again."""
    with FakeTensorMode() as mode:
        short, long = torch.empty(100, 4096), torch.empty(100_000, 4096)
    module = make_fx(lambda x: (torch.exp(x) * 2 + 1).sum(1))(short)

    def price_us(rows: torch.Tensor) -> float:
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(rows)
        dag = export_graph(capture_of(module), ClusterCostModel(H100))
        return sum(dag.nodes[node]["record"].duration_us for node in dag)

    short_us, long_us = price_us(short), price_us(long)
    assert long_us > 100 * short_us
    assert price_us(short) == short_us


def test_a_priced_graph_is_freed() -> None:
    """A job that compiles again and again, or a study of many steps, holds no old graphs."""
    graph = _graph()
    model = ClusterCostModel(H100)
    assert sum(model.compute_us(node) for node in graph.nodes) > 0
    assert model.cut_us(graph)
    freed = weakref.ref(graph)
    del graph
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("kernel_us", [H100.device.kernel_us, 0.0])
@pytest.mark.parametrize("fused", [False, True])
def test_a_node_is_free_exactly_if_its_price_is_0(fused: bool, kernel_us: float) -> None:
    cluster = replace(H100, device=replace(H100.device, kernel_us=kernel_us))
    model, graph = ClusterCostModel(cluster, fused=fused), _graph()
    sources = [model.cost_source(node) for node in graph.nodes]
    assert sources == ["formula" if model.compute_us(node) else "free" for node in graph.nodes]
    assert {"formula", "free"} == {*sources}
