"""Operations of ``flex_attention``, forward and backward, as make_fx traces it."""

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

from apsched.costs.compute.flops import count_flops, has_flops
from apsched.fx.operands import bound_arguments, result_of

BATCH, HEADS, KV_HEADS, LENGTH, DIM, VALUE_DIM = 2, 4, 2, 256, 32, 16
DENSE = 2 * BATCH * HEADS * LENGTH * LENGTH
FORWARD, BACKWARD = DENSE * (DIM + VALUE_DIM), DENSE * (3 * DIM + 2 * VALUE_DIM)


def causal(b, h, q, k):
    return q >= k


def traced(*, constant: bool, kv_heads: int = HEADS):
    """Return the graph of attention and its gradients; the numbers of its block mask are inputs, or
    constants of the graph.
    """
    mask = create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu", _compile=False)
    blocks = [part for part in mask.as_tuple() if isinstance(part, torch.Tensor)]

    def step(query, key, value, *blocks):
        left = iter(blocks)
        parts = tuple(
            next(left) if isinstance(part, torch.Tensor) else part for part in mask.as_tuple()
        )
        query, key, value = (t.detach().requires_grad_() for t in (query, key, value))
        out, *_ = flex_attention(
            query, key, value, lambda s, b, h, q, k: s * 2, parts, 0.2, {}, (), ()
        )
        return out, *torch.autograd.grad(out.sum(), (query, key, value))

    query = torch.randn(BATCH, HEADS, LENGTH, DIM)
    key = torch.randn(BATCH, kv_heads, LENGTH, DIM)
    value = torch.randn(BATCH, kv_heads, LENGTH, VALUE_DIM)
    module = make_fx(step, tracing_mode="fake")(query, key, value, *blocks)
    if constant:
        for k, part in enumerate(blocks):
            node = module.graph.find_nodes(op="placeholder")[3 + k]
            module.register_buffer(f"block_{k}", part)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(f"block_{k}"))
    return [n for n in module.graph.nodes if "flex_attention" in str(n.target)]


def flops(node):
    assert has_flops(node.target)
    return count_flops(node, bound_arguments(node), result_of(node))


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_without_what_the_mask_keeps_it_is_dense(kv_heads):
    assert [*map(flops, traced(constant=False, kv_heads=kv_heads))] == [FORWARD, BACKWARD]


def test_a_mask_that_is_a_constant_says_which_blocks_are_kept():
    kept = 3 / 4  # of four blocks of 128 by 128 the lower left and those on the diagonal
    assert [*map(flops, traced(constant=True))] == [FORWARD * kept, BACKWARD * kept]


def test_the_hint_of_the_user_goes_first():
    for node, dense in zip(traced(constant=True), (FORWARD, BACKWARD), strict=True):
        node.meta["custom"] = {"sparsity_hint": 0.875}
        assert flops(node) == dense / 8
