"""Pointwise chains cost what they take from outside and give to it, once; products and copies of buckets are borders."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.costs.cluster import load_cluster
from apsched.costs.fusion import fused_shares
from apsched.costs.roofline import Roofline

H100 = load_cluster("h100")
SIZE_BYTES = 1024 * 1024 * 2


def graph_of(function, *inputs: torch.Tensor) -> torch.fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def matrix() -> torch.Tensor:
    return torch.empty(1024, 1024, dtype=torch.bfloat16)


def priced(graph: torch.fx.Graph, *, fused: bool) -> float:
    return sum(Roofline(cluster=H100, fused=fused).compute_us(node) for node in graph.nodes)


def test_chain_reads_its_inputs_and_writes_its_result_once() -> None:
    """silu(x) * y, then + x: five values pass between kernels unfused; x and y are read and one result is written fused."""
    graph = graph_of(lambda x, y: torch.nn.functional.silu(x) * y + x, matrix(), matrix())
    shares = fused_shares(graph)
    assert sum(share.traffic_bytes for share in shares.values()) == 3 * SIZE_BYTES
    assert sum(share.first for share in shares.values()) == 1


def test_value_that_a_product_takes_is_written() -> None:
    """h = exp(x) + 1 feeds a product: x is read, h is written, and exp(x) is neither."""
    graph = graph_of(lambda x, w: torch.mm(torch.exp(x) + 1, w), matrix(), matrix())
    shares = {node.name: share.traffic_bytes for node, share in fused_shares(graph).items()}
    assert shares == {"exp": SIZE_BYTES, "add": SIZE_BYTES}


def test_product_is_a_border() -> None:
    """Nodes before and after a product are two kernels, though one reads what the other wrote."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.exp(x) + 1
        return torch.mm(h, w) * h + h

    shares = fused_shares(graph_of(function, matrix(), matrix()))
    assert sum(share.first for share in shares.values()) == 2
    # before: x read, h written; after: the product and h read, the result written
    assert sum(share.traffic_bytes for share in shares.values()) == 5 * SIZE_BYTES


def test_normalisation_is_one_kernel() -> None:
    """An RMS norm (square, mean, rsqrt, product) reads its input once and writes its result once."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    shares = fused_shares(graph_of(norm, matrix()))
    assert sum(share.traffic_bytes for share in shares.values()) == 2 * SIZE_BYTES
    assert sum(share.first for share in shares.values()) == 1


def test_views_do_not_separate_what_they_join() -> None:
    shares = fused_shares(graph_of(lambda x: torch.exp(torch.exp(x).view(-1)).view(1024, 1024) + 1, matrix()))
    assert len(shares) == 3
    assert sum(share.traffic_bytes for share in shares.values()) == 2 * SIZE_BYTES


def test_fused_price_is_the_traffic_and_one_floor() -> None:
    graph = graph_of(lambda x: torch.exp(x) + 1, matrix())
    expected = 2 * SIZE_BYTES / H100.device.memory_bytes_per_us + H100.device.kernel_us
    assert priced(graph, fused=True) == pytest.approx(expected)
    assert priced(graph, fused=False) == pytest.approx(2 * expected)


def test_copies_stay_kernels_of_their_own() -> None:
    assert not fused_shares(graph_of(lambda x: torch.exp(torch.exp(x).clone()), matrix()))
