"""The cost model of a cluster, and the guard around a user's own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from apsched.capture.fake_world import world
from apsched.costs.checked import checked
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.model import CostModel
from apsched.costs.network.alpha_beta import collective_us, group_shape
from apsched.costs.network.table import load_table
from apsched.errors import InputError
from apsched.models.mesh import MeshSpec, build_meshes, group_of

H100 = load_cluster()
TABLE = "kind,group_size,size_bytes,time_us\nall_gather,8,1000,10\nall_gather,8,10000,10\n"


def _add_node() -> torch.fx.Node:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    node = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    node.meta["val"] = torch.empty(4)
    return node


def test_it_follows_the_protocol_and_knows_its_sources() -> None:
    model = ClusterCostModel(H100)
    node = _add_node()
    assert isinstance(model, CostModel)
    assert model.compute_us(node) == pytest.approx(2.0, abs=1e-3)
    assert model.cost_source(node) == "formula"
    assert model.cost_source(next(iter(node.graph.nodes))) == "free"
    assert model.collective_source("all_gather", "0", 8) == "formula"
    assert model.unpriced() == ()


def test_the_ranks_of_a_group_decide_its_price() -> None:
    """The same 8 ranks: in one node 11 us at no bytes (6.6 + 7 * 0.6), on eight nodes 25.5 (6.6 + 7
    * 2.7).
    """
    model = ClusterCostModel(H100, {"tp": range(8), "dp": range(0, 64, 8), "unknown": ()})
    assert model.collective_us("all_gather", "tp", 8, 0) == pytest.approx(10.8)
    assert model.collective_us("all_gather", "dp", 8, 0) == pytest.approx(25.5)
    assert model.collective_us("all_gather", "unknown", 8, 0) == pytest.approx(10.8)


def test_what_the_graph_says_of_the_size_of_a_group_goes_before_its_ranks() -> None:
    """Two ranks of one node, although 256 of 32 nodes are stated."""
    stated = ClusterCostModel(H100, {"0": range(256), "dp": range(0, 64, 8)})
    alone = ClusterCostModel(H100)
    for name, size in (("0", 2), ("0", 256), ("dp", 4)):
        assert stated.collective_us("all_gather", name, size, 0) == alone.collective_us(
            "all_gather", name, size, 0
        )


def test_the_table_comes_first_and_what_it_lacks_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    model = ClusterCostModel(H100, {"tp": range(8)}, load_table(path))
    assert model.collective_us("all_gather", "tp", 8, 5000) == 10
    assert model.collective_source("all_gather", "tp", 8) == "table"
    assert model.unpriced() == ()
    assert model.collective_us("reduce_scatter", "tp", 8, 0) == pytest.approx(10.8)
    assert model.collective_source("reduce_scatter", "tp", 8) == "formula"
    assert model.unpriced() == ("reduce_scatter on 8 ranks of 1 nodes",)


class _Returns:
    def __init__(self, price: Any) -> None:
        self.price = price

    def compute_us(self, node: torch.fx.Node) -> Any:
        return self.price

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> Any:
        return self.price


def test_good_prices_pass_the_guard() -> None:
    guarded = checked(_Returns(3))
    assert isinstance(guarded, CostModel)
    assert guarded.compute_us(_add_node()) == 3.0
    assert guarded.collective_us("all_gather", "0", 8, 100) == 3.0


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf"), "5", None, True, [1.0]])
def test_impossible_prices_name_the_node(price: Any) -> None:
    guarded = checked(_Returns(price))
    with pytest.raises(
        InputError, match=r"compute_us of node 'add_tensor' \(aten.add.Tensor\) returned"
    ):
        guarded.compute_us(_add_node())
    with pytest.raises(InputError, match="collective_us of all_gather of 100 bytes on group 'dp' "):
        guarded.collective_us("all_gather", "dp", 8, 100)


def test_an_object_without_the_methods_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs the methods compute_us\(node\) and collective_us"):
        checked(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "group", "shape"),
    [
        ("fsdp=64", "fsdp", (64, 8, 8)),
        ("fsdp=8,tp=8", "fsdp", (8, 8, 1)),  # one rank of each node: a rail of its own
        ("fsdp=8,tp=8", "tp", (8, 1, 8)),
        ("fsdp=16,tp=4", "fsdp", (16, 8, 2)),
        ("replicate=4,fsdp=16", "replicate", (4, 4, 1)),
        ("replicate=4,fsdp=16", "fsdp", (16, 2, 8)),
        ("replicate=8,fsdp=8", "fsdp", (8, 1, 8)),  # sharded within nodes, replicated across
        ("fsdp=6,tp=2", "fsdp", (6, 2, 2)),  # the last node half full
    ],
)
def test_the_shape_of_a_group_follows_from_the_mesh(
    mesh: str, group: str, shape: tuple[int, int, int]
) -> None:
    """Process ranks fill nodes of eight in order; the last axis changes first."""
    spec = MeshSpec.parse(mesh)
    with world(spec.world_size) as running:
        name = group_of(build_meshes(spec, "cpu").dense, group).name
        ranks = running.group_ranks[name]
    found = group_shape(H100, ranks)
    assert (found.num_ranks, found.num_nodes, found.ranks_per_node) == shape
    model = ClusterCostModel(H100, {"g": ranks})
    assert model.collective_us("all_gather", "g", shape[0], 1 << 28) == collective_us(
        H100, "all_gather", found, 1 << 28
    )


def test_a_group_with_fewer_ranks_a_node_has_fewer_nics() -> None:
    """Sixteen ranks: eight a node leave over eight NICs, two over two, one over one."""
    prices = [
        collective_us(H100, "all_gather", group_shape(H100, range(0, 128, step)[:16]), 1 << 30)
        for step in (1, 4, 8)
    ]
    assert prices[0] < prices[1] < prices[2]
    assert prices[1] == pytest.approx(prices[2] / 2, rel=0.05)
