"""Pointwise chains cost what they take from outside and give to it, once; products and copies of
buckets are borders.
"""

import pytest
import torch
import torch.distributed._functional_collectives  # registers the collectives
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.compute.fusion import PIECE, Share, fused_kernels, fused_shares, shares_if_cut
from apsched.costs.compute.roofline import Roofline

H100 = load_cluster("h100")
SIZE_BYTES = 1024 * 1024 * 2


def graph_of(function, *inputs: torch.Tensor) -> torch.fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def matrix() -> torch.Tensor:
    return torch.empty(1024, 1024, dtype=torch.bfloat16)


def priced(graph: torch.fx.Graph, *, fused: bool) -> float:
    return sum(Roofline(cluster=H100, fused=fused).compute_us(node) for node in graph.nodes)


def test_chain_reads_its_inputs_and_writes_its_result_once() -> None:
    """silu(x) * y, then + x: five values pass between kernels unfused; x and y are read and one
    result is written fused.
    """
    graph = graph_of(lambda x, y: torch.nn.functional.silu(x) * y + x, matrix(), matrix())
    shares = fused_shares(graph)
    assert sum(share.traffic_bytes for share in shares.values()) == 3 * SIZE_BYTES
    assert sum(share.first for share in shares.values()) == 1


def test_value_that_a_product_takes_is_written() -> None:
    """h = exp(x) + 1 feeds a product: x is read, h is written, and exp(x) is inlined in it."""
    graph = graph_of(lambda x, w: torch.mm(torch.exp(x) + 1, w), matrix(), matrix())
    shares = {node.name: share.traffic_bytes for node, share in fused_shares(graph).items()}
    assert shares == {"exp": 0, "add": 2 * SIZE_BYTES}


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
    """An RMS norm (square, mean, rsqrt, product) reads its input once and writes its result
    once.
    """

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    shares = fused_shares(graph_of(norm, matrix()))
    assert sum(share.traffic_bytes for share in shares.values()) == 2 * SIZE_BYTES
    assert sum(share.first for share in shares.values()) == 1


def test_views_do_not_separate_what_they_join() -> None:
    shares = fused_shares(
        graph_of(lambda x: torch.exp(torch.exp(x).view(-1)).view(1024, 1024) + 1, matrix())
    )
    assert len(shares) == 3
    assert sum(share.traffic_bytes for share in shares.values()) == 2 * SIZE_BYTES


def test_fused_price_is_the_traffic_and_one_floor() -> None:
    graph = graph_of(lambda x: torch.exp(x) + 1, matrix())
    expected = 2 * SIZE_BYTES / H100.device.memory_bytes_per_us + H100.device.kernel_us
    assert priced(graph, fused=True) == pytest.approx(expected)
    assert priced(graph, fused=False) == pytest.approx(2 * expected)


def traffic(function, *inputs: torch.Tensor) -> tuple[int, int]:
    """Return matrices' worth of traffic, and kernels."""
    shares = fused_shares(graph_of(function, *inputs)).values()
    return sum(share.traffic_bytes for share in shares) // SIZE_BYTES, sum(
        share.first for share in shares
    )


def test_a_chain_that_two_kernels_need_is_computed_in_both() -> None:
    """exp(x) + 1 before the product, and again after it: nothing of it is written but what the
    product takes.
    """

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.exp(x)
        return torch.mm(h + 1, w) * h, w

    assert traffic(function, matrix(), matrix()) == (
        2 + 3,
        2,
    )  # x, h + 1; x, the product, the result


def test_a_long_chain_that_several_need_is_written() -> None:
    """Five values into one that two products' inputs need: computing it twice would read five
    more.
    """

    def function(a, b, c, d, e):
        h = a * b + c * d + e
        return torch.mm(h + 1, a), torch.mm(torch.exp(h).t(), a)

    few, _ = traffic(
        lambda a, b: (torch.mm((a * b) + 1, a), torch.mm(torch.exp(a * b).t(), a)),
        matrix(),
        matrix(),
    )
    assert few == 2 + 2  # one kernel: two reads, two writes
    assert traffic(function, *(matrix() for _ in range(5))) == (5 + 2, 1)


def test_kernels_that_read_the_same_are_one() -> None:
    """x is read once for both results; results of another size, or on either side of a product, are
    kernels of their own.
    """
    assert traffic(lambda x, w: (torch.exp(x) + 1, torch.sin(x) + 1), matrix(), matrix()) == (3, 1)
    assert (
        traffic(lambda x, w: (torch.exp(x) + 1, (torch.sin(x) + 1).sum(0)), matrix(), matrix())[1]
        == 2
    )
    assert traffic(
        lambda x, w: (torch.exp(x) + 1, torch.sin(x) * torch.mm(x, w)), matrix(), matrix()
    ) == (2 + 3, 2)


def test_two_halves_of_one_value_are_one_read() -> None:
    """Rotary embedding: both halves of the heads, each twice, put together again."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        left, right = x[:, :512], x[:, 512:]
        return torch.cat((left * 2 - right, left + right * 2), 1)

    assert traffic(rotate, matrix()) == (2, 1)


@pytest.mark.parametrize(
    "both",
    [lambda x: x + x.t(), lambda x: x[:768] + x[256:]],
    ids=["itself and its transpose", "parts that overlap"],
)
def test_a_kernel_reads_no_more_of_a_value_than_there_is(both) -> None:
    """Bytes that two views of one value share are read once."""
    graph = graph_of(lambda x: torch.exp(both(x)), matrix())
    shares = fused_shares(graph)
    written = torch.exp(both(matrix())).nbytes
    assert sum(share.traffic_bytes for share in shares.values()) == SIZE_BYTES + written


def test_a_change_of_layout_is_part_of_the_kernel_around_it() -> None:
    assert traffic(
        lambda x: torch.exp(torch.exp(x).t().clone(memory_format=torch.contiguous_format)), matrix()
    ) == (2, 1)
    assert not fused_shares(
        graph_of(lambda x: x.t().clone(memory_format=torch.contiguous_format), matrix())
    )


def test_copies_of_buckets_stay_kernels_of_their_own() -> None:
    """Their price follows the curve by which the solver priced them, so nothing around them may
    change with them.
    """
    graph = graph_of(lambda x: torch.exp(torch.exp(x).clone()), matrix())
    for node in graph.nodes:
        if "clone" in node.name:
            node.meta["apsched"] = {"role": "copy_out"}
    assert not fused_shares(graph)


def test_copies_beside_collectives_are_copies_of_a_bucket_whoever_made_it() -> None:
    """torch's own bucketing clones out of what was gathered, and concatenates what it reduces."""
    c10d = torch.ops._c10d_functional
    graph = torch.fx.Graph()
    value = torch.empty(64)

    def node(target, *args) -> torch.fx.Node:
        made = graph.placeholder("p") if target is None else graph.call_function(target, args)
        made.meta["val"] = value.clone()
        return made

    waited = node(c10d.wait_tensor.default, node(None))
    copied_out = node(torch.ops.aten.clone.default, node(torch.ops.aten.view.default, waited, [64]))
    gradient = node(torch.ops.aten.exp.default, copied_out)
    copied_in = node(torch.ops.aten.cat.default, [gradient])
    graph.output(node(c10d.reduce_scatter_tensor.default, copied_in, "sum", 1, "0"))
    assert not fused_shares(graph)


def test_the_loss_reads_the_scores_of_the_targets_alone() -> None:
    """Gradients of a cross entropy: the log-softmax is read and the gradient written; what the
    target picks is a choice by index.
    """
    logits, target = torch.randn(1024, 4096), torch.zeros(1024, dtype=torch.int64)

    def backward(log_probabilities: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        aten = torch.ops.aten
        one, weight = torch.ones(()), torch.ones(())
        picked = aten.nll_loss_backward(one, log_probabilities, target, None, 1, -100, weight)
        return aten._log_softmax_backward_data(picked, log_probabilities, 1, torch.float32)

    graph = graph_of(backward, logits, target)
    shares = fused_shares(graph)
    matrices = sum(share.traffic_bytes for share in shares.values()) / (1024 * 4096 * 4)
    assert matrices == pytest.approx(2, rel=0.01)


def test_inlined_nodes_are_in_the_kernel_that_needs_them() -> None:
    graph = graph_of(lambda x, w: torch.mm(torch.exp(x) + 1, w) * x, matrix(), matrix())
    assert [[node.name for node in kernel] for kernel in fused_kernels(graph)] == [["exp", "add"]]


def log_softmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shifted scores, their exponentials and the sum of these: all written, one kernel."""
    shifted = x - 1
    exponentials = torch.exp(shifted)
    return shifted, exponentials, exponentials.sum(1)


def test_a_cut_is_paid_by_what_passes_it() -> None:
    """Whole: x read, two matrices written. Cut before exp: what it reads is read again; a floor
    more.
    """
    graph = graph_of(log_softmax, matrix())
    named = {
        first.name: {node.name: share for node, share in shares.items()}
        for first, shares in shares_if_cut(graph).items()
    }
    assert [[node.name for node in kernel] for kernel in fused_kernels(graph)] == [
        ["sub", "exp", "sum_1"]
    ]
    assert set(named) == {"exp", "sum_1"}
    assert named["exp"] == {
        "sub": None,
        "exp": Share(2 * SIZE_BYTES, True),
        "sum_1": Share(1024 * 2, False),
    }
    whole, roofline = priced(graph, fused=True), Roofline(cluster=H100)
    cut_us = {first.name: sum(times.values()) for first, times in roofline.cut_us(graph).items()}
    more = SIZE_BYTES / H100.device.memory_bytes_per_us + H100.device.kernel_us
    assert cut_us == pytest.approx({"exp": whole + more, "sum_1": whole + more})


@pytest.mark.parametrize("at", range(5))
def test_a_marked_graph_costs_what_the_cut_was_said_to(at: int) -> None:
    """Kernels with values in between that are inlined, shared reads, and parts of one value."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.exp(x) + y
        left, right = a[:, :512] * 2, a[:, 512:] * y[:, 512:]
        b = torch.sin(a) * torch.cos(x)
        return a, torch.cat((left, right), 1) + b, b.sum(1), torch.tanh(y)

    graph, roofline = graph_of(function, matrix(), matrix()), Roofline(cluster=H100)
    whole = {node: roofline.compute_us(node) for node in graph.nodes}
    cuts = roofline.cut_us(graph)
    assert len(cuts) >= 5
    first, times = list(cuts.items())[at]
    (kernel,) = [kernel for kernel in fused_kernels(graph) if first in kernel]
    for node in kernel[kernel.index(first) :]:
        node.meta[PIECE] = "/" + first.name
    marked = Roofline(cluster=H100)
    shares = fused_shares(graph)
    for node in graph.nodes:
        again = marked._piece_us(node, shares.get(node)) if node in times else whole[node]
        assert again == times.get(node, whole[node])
        assert times.get(node, whole[node]) >= whole[node]
    assert not any(
        {kernel[-1], first} <= set(piece) and len(piece) == len(kernel)
        for piece in fused_kernels(graph)
    )


@pytest.mark.parametrize(("length", "num_cuts"), [(64, 63), (65, 0)])
def test_kernels_longer_than_inductor_makes_are_not_cut(length: int, num_cuts: int) -> None:
    """Each cut prices the whole kernel: without an end to that, a chain of 2,000 nodes takes a
    minute.
    """

    def chain(x: torch.Tensor) -> list[torch.Tensor]:
        results = [x + 1]
        for _ in range(length - 1):
            results.append(results[-1] + x)
        return results

    graph = graph_of(chain, matrix())
    assert [len(kernel) for kernel in fused_kernels(graph)] == [length]
    assert len(shares_if_cut(graph)) == num_cuts
