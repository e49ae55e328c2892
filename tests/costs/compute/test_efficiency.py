"""Efficiency by the shape of a product: tiles and waves counted by hand, and published products."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.compute.efficiency import attention_efficiency, filled_share, product_efficiency
from apsched.costs.compute.roofline import Roofline

H100 = load_cluster("h100")
A100 = load_cluster("a100")


def _product(rows: int, inner: int, columns: int) -> torch.fx.Node:
    graph = torch.fx.Graph()
    with FakeTensorMode():
        left, right, out = (
            torch.empty(shape, dtype=torch.bfloat16)
            for shape in ((rows, inner), (inner, columns), (rows, columns))
        )
    nodes = []
    for value in (left, right):
        nodes.append(graph.placeholder("p"))
        nodes[-1].meta["val"] = value
    node = graph.call_function(torch.ops.aten.mm.default, tuple(nodes))
    node.meta["val"] = out
    return node


def test_a_result_that_fills_whole_waves_is_a_full_device() -> None:
    """132 processors, tiles of 256 x 128: 11 x 12 of them are one wave, and 24 more columns of
    tiles are three.
    """
    assert filled_share(132, 11 * 256, 12 * 128) == 1.0
    assert filled_share(132, 11 * 256, 36 * 128) == 1.0


def test_the_last_wave_is_as_long_as_a_full_one() -> None:
    """1024 tiles are 7.76 waves, priced as eight."""
    assert filled_share(132, 8192, 4096) == pytest.approx(1024 / (8 * 132))


def test_a_narrow_slice_fills_few_processors() -> None:
    """8192 x 128: 32 tiles of 256 x 128 leave a hundred idle; 128 tiles of 128 x 64 fill the
    device, at their lesser speed.
    """
    speed = (128 * 64 / 192 / (256 * 128 / 384)) ** 0.5
    assert filled_share(132, 8192, 128) == pytest.approx(speed * 128 / 132)
    assert filled_share(132, 8192, 128) < filled_share(132, 8192, 1024)


def test_products_side_by_side_share_the_waves() -> None:
    assert filled_share(132, 1024, 512, 16) == pytest.approx(256 / (2 * 132))
    assert filled_share(132, 1024, 512, 16) > filled_share(132, 1024, 512)


@pytest.mark.parametrize(
    ("cluster", "tflops"),
    [("h100", 711.0), ("a100", 289.0)],  # bf16, 8192 cubed: tusharhqq/napkin-math-gpu, results/
)
def test_published_products_are_within_a_tenth(cluster: str, tflops: float) -> None:
    time_us = Roofline(cluster=load_cluster(cluster)).compute_us(_product(8192, 8192, 8192))
    assert 2 * 8192**3 / time_us / 1e6 == pytest.approx(tflops, rel=0.10)


def test_a_device_without_processors_prices_by_operations_alone() -> None:
    cluster = replace(H100, device=replace(H100.device, num_processors=None))
    node = _product(8192, 8192, 128)
    expected_us = 2 * 8192 * 8192 * 128 / (989.4e6 * 0.74) + 2.0
    memory_us = 2 * (8192 * 8192 + 2 * 8192 * 128) / H100.device.memory_bytes_per_us + 2.0
    assert Roofline(cluster=cluster).compute_us(node) == pytest.approx(max(expected_us, memory_us))


def test_only_matrices_have_tiles() -> None:
    """Convolutions, and results that are not one matrix or a batch of them, count by the device's
    own figure.
    """
    with FakeTensorMode():
        image, vector, empty = torch.empty(8, 64, 56, 56), torch.empty(8), torch.empty(0, 4)
    for result in (image, vector, empty, (image, vector)):
        assert (
            product_efficiency(H100.device, {}, result, grouped=False)
            == H100.device.matmul_efficiency
        )


def test_attention_s_backward_has_its_own_efficiency() -> None:
    name = "aten::_scaled_dot_product_flash_attention"
    assert attention_efficiency(H100.device, name) == 0.40
    assert attention_efficiency(H100.device, name + "_backward") == 0.32
    assert (
        attention_efficiency(
            replace(H100.device, attention_backward_efficiency=None), name + "_backward"
        )
        == 0.40
    )
