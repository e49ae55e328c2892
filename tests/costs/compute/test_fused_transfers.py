"""Operators that transfer inside: the same operations and bytes as the product and the collective
that they stand for.
"""

from math import prod

import pytest
import torch
import torch.distributed._symmetric_memory  # registers its operators
import torch.distributed.tensor.experimental._context_parallel._cp_custom_ops  # registers cplib
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.fake_world import world
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.compute.at_peak import at_peak_us
from apsched.costs.compute.flops import count_flops
from apsched.costs.compute.fused_transfers import inner_transfers
from apsched.fx.collectives import describe, is_collective
from apsched.fx.operands import bound_arguments, result_of
from apsched.graph.export.whole_nodes import whole_us
from apsched.graph.records import priced_kind

c10d, symm_mem, cplib = torch.ops._c10d_functional, torch.ops.symm_mem, torch.ops.cplib
RANKS = 4


def traced(step, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16):
    """Return the calls of ``step``, which takes tensors and a group, of process rank 0 of four."""
    with world(RANKS) as running, FakeTensorMode():
        group = next(iter(running.group_ranks))
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
        module = make_fx(lambda *tensors: step(*tensors, group))(*inputs)
    return [node for node in module.graph.nodes if node.op == "call_function"]


def only(nodes, target) -> torch.fx.Node:
    (node,) = [node for node in nodes if node.target is target]
    return node


def gathered_product(left, right, group):
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(left, RANKS, group))
    return torch.mm(whole.flatten(0, -2), right)


def gathered_inner_product(left, right, group):
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(left, RANKS, group))
    return torch.mm(torch.cat(whole.chunk(RANKS), dim=-1), right)


def reduced_product(left, right, group):
    product = torch.mm(left.flatten(0, -2), right)
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(product, "sum", RANKS, group))


CASES = {
    "gathered rows": (
        lambda left, right, group: symm_mem.fused_all_gather_matmul(left, [right], 1, group),
        symm_mem.fused_all_gather_matmul.default,
        gathered_product,
        ((2, 64, 96), (96, 160)),
    ),
    "gathered inner dimension": (
        lambda left, right, group: symm_mem.fused_all_gather_matmul(left, [right], 1, group),
        symm_mem.fused_all_gather_matmul.default,
        gathered_inner_product,
        ((64, 24), (96, 160)),
    ),
    "without the gathered matrix": (
        lambda left, right, group: symm_mem.fused_all_gather_matmul(
            left, [right], 0, group, return_A=False
        ),
        symm_mem.fused_all_gather_matmul.default,
        gathered_product,
        ((64, 96), (96, 160)),
    ),
    "reduced": (
        lambda left, right, group: symm_mem.fused_matmul_reduce_scatter(
            left, right, "sum", 1, group
        ),
        symm_mem.fused_matmul_reduce_scatter.default,
        reduced_product,
        ((2, 64, 96), (96, 160)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_parted_product_has_the_operations_and_bytes_of_both(case):
    step, target, apart, shapes = CASES[case]
    node, other = only(traced(step, *shapes), target), traced(apart, *shapes)
    product = only(other, torch.ops.aten.mm.default)
    (start,) = filter(is_collective, other)
    call = describe(start, dict.fromkeys([start.args[-1]], RANKS))
    (inner,) = inner_transfers(node)
    assert (inner.kind, inner.group, inner.group_size, inner.size_bytes) == (
        call.kind,
        call.group,
        RANKS,
        call.size_bytes,
    )
    assert flops_of(node) == flops_of(product) > 0
    device = load_cluster("h100").device
    assert at_peak_us(node.graph, device) == at_peak_us(product.graph, device)


def flops_of(node: torch.fx.Node) -> int:
    return count_flops(node, bound_arguments(node), result_of(node))


@pytest.mark.parametrize("reduced", [False, True])
def test_products_with_scales_count_as_those_without(reduced):
    def step(left, right, group):
        one = torch.ones(())
        left, right = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        if reduced:
            shape = [left.shape[0], right.shape[1]]
            return symm_mem.fused_scaled_matmul_reduce_scatter(
                left, right, one, one, "sum", 0, 0, group, shape, None, None, torch.bfloat16
            )
        return symm_mem.fused_all_gather_scaled_matmul(
            left, [right], one, [one], 0, group, [None], [None], [torch.bfloat16], [False]
        )

    target = (
        symm_mem.fused_scaled_matmul_reduce_scatter.default
        if reduced
        else symm_mem.fused_all_gather_scaled_matmul.default
    )
    node = only(traced(step, (64, 96), (160, 96)), target)
    (inner,) = inner_transfers(node)
    sent = 64 * 160 * 2 if reduced else RANKS * 64 * 96
    assert (inner.group_size, inner.size_bytes) == (RANKS, sent)
    assert flops_of(node) == 2 * 64 * 96 * 160 * (1 if reduced else RANKS)


def test_two_products_of_one_gathered_matrix_transfer_it_once():
    def step(left, right, other, group):
        return symm_mem.fused_all_gather_matmul(left, [right, other], 0, group)

    node = only(
        traced(step, (64, 96), (96, 160), (96, 32)), symm_mem.fused_all_gather_matmul.default
    )
    (inner,) = inner_transfers(node)
    assert inner.size_bytes == RANKS * 64 * 96 * 2
    assert flops_of(node) == 2 * RANKS * 64 * 96 * (160 + 32)


def test_one_part_of_a_product_has_no_transfer_beside_it():
    """max(compute, compute / ranks + transfer): either may be the longer one."""

    def step(left, right, group):
        return symm_mem.fused_all_gather_matmul(left, [right], 0, group)

    model = ClusterCostModel(load_cluster("h100"))
    for width, transfer_is_longer in ((64, True), (65536, False)):
        node = only(
            traced(step, (4096, 1024), (1024, width)), symm_mem.fused_all_gather_matmul.default
        )
        (inner,) = inner_transfers(node)
        compute_us = model.compute_us(node)
        transfer_us = model.collective_us("all_gather", inner.group, RANKS, inner.size_bytes)
        expected_us = compute_us / RANKS + transfer_us if transfer_is_longer else compute_us
        assert whole_us(model, node, {}) == expected_us
        assert (expected_us > compute_us) == transfer_is_longer


@pytest.mark.parametrize("backward", [False, True])
def test_keys_and_values_are_transferred_one_after_the_other(backward):
    operator = cplib.flex_cp_allgather_backward if backward else cplib.flex_cp_allgather

    def step(keys, values, group):
        return operator(keys, values, 2, group)

    shapes = ((2, 8, 128, 64), (2, 8, 128, 32))
    node = only(traced(step, *shapes), operator.default)
    inner = inner_transfers(node)
    times = 1 if backward else RANKS
    assert [t.size_bytes for t in inner] == [2 * prod(shape) * times for shape in shapes]
    assert {t.group_size for t in inner} == {RANKS}
    model = ClusterCostModel(load_cluster("h100"))
    transfers_us = [
        model.collective_us(priced_kind(t.kind), t.group, RANKS, t.size_bytes) for t in inner
    ]
    assert inner[0].kind == ("reduce_scatter" if backward else "all_gather")
    assert whole_us(model, node, {}) == pytest.approx(model.compute_us(node) + sum(transfers_us))


def test_no_elements_are_no_error():
    def step(keys, values, group):
        return cplib.flex_cp_allgather(keys, values, 2, group)

    node = only(traced(step, (0, 8, 16, 4), (1, 1, 1, 1)), cplib.flex_cp_allgather.default)
    assert [(t.group_size, t.size_bytes) for t in inner_transfers(node)] == [(1, 0), (RANKS, 8)]


def test_other_operators_have_no_transfer_inside():
    nodes = traced(gathered_product, (64, 96), (96, 160))
    assert all(inner_transfers(node) == () for node in nodes)
