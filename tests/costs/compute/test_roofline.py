"""Compute prices: bytes and operations counted by hand, one rule a test."""

import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.fx_passes.bucketing  # registers the bucketing operators
import torch.distributed._functional_collectives  # registers the collectives' meta functions
import torch.nn.attention.varlen  # registers its operators
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.compute.efficiency import filled_share
from apsched.costs.compute.flops import count_flops
from apsched.costs.compute.roofline import Roofline
from apsched.errors import InputError
from apsched.fx.operands import bound_arguments

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
H100 = load_cluster("h100")
ROOFLINE = Roofline(cluster=H100)
FLOOR_US = 2.0
BYTES_PER_US = 3350e3 * 0.90
BF16_MATMUL = 989.4e6 * 0.74  # operations a microsecond of a full device
BF16_ATTENTION = 989.4e6 * 0.40
BF16_ATTENTION_BACKWARD = 989.4e6 * 0.32


def _fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


def _node(target: Callable[..., Any], *args: Any, val: Any, **kwargs: Any) -> torch.fx.Node:
    """One call whose tensor arguments are placeholders."""
    graph = torch.fx.Graph()

    def placed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder("p")
            node.meta["val"] = value
            return node
        return [placed(item) for item in value] if isinstance(value, list) else value

    node = graph.call_function(
        target, tuple(map(placed, args)), {key: placed(value) for key, value in kwargs.items()}
    )
    node.meta["val"] = val
    return node


def _memory_us(num_bytes: int) -> float:
    return num_bytes / BYTES_PER_US + FLOOR_US


def _price(target: Callable[..., Any], *args: Any, val: Any, **kwargs: Any) -> float:
    return ROOFLINE.compute_us(_node(target, *args, val=val, **kwargs))


def test_a_product_takes_all_its_operations_at_the_peak_of_its_dtype() -> None:
    """2 M N K operations, not half of them; fp32 has its own peak, and TF32 only where asked
    for.
    """
    m, n, k = 8192, 4096, 2048
    bf16, fp32 = (
        [_fake(m, k), _fake(k, n)],
        [_fake(m, k, dtype=torch.float32), _fake(k, n, dtype=torch.float32)],
    )
    full = 1024 / (8 * 132)  # 32 x 32 tiles of 256 x 128 on 132 processors: eight waves
    assert _price(aten.mm.default, *bf16, val=_fake(m, n)) == pytest.approx(
        2 * m * n * k / (BF16_MATMUL * full) + FLOOR_US
    )
    node = _node(aten.mm.default, *fp32, val=_fake(m, n, dtype=torch.float32))
    assert ROOFLINE.compute_us(node) == pytest.approx(
        2 * m * n * k / (66.9e6 * 0.74 * full) + FLOOR_US
    )
    assert Roofline(cluster=H100, allow_tf32=True).compute_us(node) == pytest.approx(
        2 * m * n * k / (494.7e6 * 0.74 * full) + FLOOR_US
    )


def test_a_thin_product_is_bound_by_memory() -> None:
    assert _price(
        aten.mm.default, _fake(1, 4096), _fake(4096, 4096), val=_fake(1, 4096)
    ) == pytest.approx(_memory_us(2 * (4096 + 4096 * 4096 + 4096)))


def test_keyword_arguments_reach_the_formula() -> None:
    price = _price(
        aten.addmm.default,
        _fake(4096),
        _fake(8192, 4096),
        _fake(4096, 4096),
        val=_fake(8192, 4096),
        beta=1,
        alpha=2,
    )
    assert price == pytest.approx(
        2 * 8192 * 4096 * 4096 / (BF16_MATMUL * 1024 / (8 * 132)) + FLOOR_US
    )


@pytest.mark.parametrize(
    "name", ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"]
)
def test_causal_attention_computes_half(name: str) -> None:
    """Two products of S x S x D for each head over s(s+1)/2 pairs."""
    b, h, s, d = 2, 32, 4096, 128
    qkv = [_fake(b, h, s, d) for _ in range(3)]
    val = (_fake(b, h, s, d), _fake(b, h, s, dtype=torch.float32))
    target = getattr(aten, name).default
    dense = 2 * b * h * s * s * (d + d) / BF16_ATTENTION
    assert _price(target, *qkv, 0.0, False, val=val) == pytest.approx(dense + FLOOR_US)
    assert _price(target, *qkv, 0.0, True, val=val) == pytest.approx(
        dense * (s + 1) / (2 * s) + FLOOR_US
    )


def test_attention_backward_has_five_products_and_values_of_their_own_width() -> None:
    """Latent attention: keys 192 wide, values 128. Scores again, dV, dP over 128, 192 and 128, then
    dQ and dK over 192.
    """
    b, h, s, dk, dv = 1, 16, 2048, 192, 128
    grad, q, k, v, out = (
        _fake(b, h, s, dv),
        _fake(b, h, s, dk),
        _fake(b, h, s, dk),
        _fake(b, h, s, dv),
        _fake(b, h, s, dv),
    )
    lse = _fake(b, h, s, dtype=torch.float32)
    target = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    pairs = s * (s + 1) // 2
    expected = 2 * b * h * pairs * (dk + dv + dv + dk + dk) / BF16_ATTENTION_BACKWARD
    assert _price(target, grad, q, k, v, out, lse, 0.0, True, val=(q, k, v)) == pytest.approx(
        expected + FLOOR_US
    )


def test_registered_attention_with_is_causal_is_halved() -> None:
    s = 4096
    q = _fake(1, 32, s, 128)
    efficient = aten._scaled_dot_product_efficient_attention.default
    price = _price(
        efficient, q, q, q, None, True, 0.0, True, val=(q, _fake(1, 32, s, dtype=torch.float32))
    )
    assert price == pytest.approx(2 * 32 * s * (s + 1) / 2 * 256 / BF16_ATTENTION + FLOOR_US)


@pytest.mark.parametrize(
    ("window", "is_causal", "pairs"),
    [
        (None, False, 8192 * 2048),
        (None, True, 8192 * 2049 // 2),
        ([-1, 0], False, 8192 * 2049 // 2),  # how torch says causal
        ([-1, -1], False, 8192 * 2048),
        ([511, 0], False, 8192 * 512),  # a sliding window
        ([511, 0], True, 8192 * 512),
        ([4095, 0], True, 8192 * 2049 // 2),  # as wide as the sequences
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_packed_sequences_count_their_tokens(
    window: list[int] | None, is_causal: bool, pairs: int, backward: bool
) -> None:
    """8192 tokens in sixteen documents of at most 2048: not sixteen times 2048 by 2048 pairs, as
    torch's formula has it.
    """
    heads, dim = 32, 128
    q, k = _fake(8192, heads, dim), _fake(8192, 8, dim)
    ends, lse = _fake(17, dtype=torch.int32), _fake(heads, 8192, dtype=torch.float32)
    if backward:
        target, state = (
            torch.ops.torch_attn._varlen_attn_backward.default,
            _fake(2, dtype=torch.uint64),
        )
        price = _price(
            target,
            q,
            q,
            k,
            k,
            q,
            lse,
            ends,
            ends,
            2048,
            2048,
            is_causal,
            state,
            window_size=window,
            val=(q, k, k),
        )
        expected = 2 * heads * pairs * 5 * dim / BF16_ATTENTION_BACKWARD
    else:
        target = torch.ops.torch_attn._varlen_attn.default
        price = _price(
            target,
            q,
            k,
            k,
            ends,
            ends,
            2048,
            2048,
            is_causal,
            window_size=window,
            val=(q, lse, ends),
        )
        expected = 2 * heads * pairs * 2 * dim / BF16_ATTENTION
    assert price == pytest.approx(expected + FLOOR_US)


def test_documents_as_long_as_they_can_be_are_a_batch() -> None:
    """Four sequences of 2048: the pairs of a batch of four."""
    q = _fake(8192, 32, 128)
    price = _price(
        torch.ops.torch_attn._varlen_attn.default,
        q,
        q,
        q,
        _fake(5, dtype=torch.int32),
        None,
        2048,
        2048,
        val=(q, q, q),
    )
    assert price == pytest.approx(2 * 32 * 4 * 2048 * 2048 * 256 / BF16_ATTENTION + FLOOR_US)


@pytest.mark.parametrize(
    ("target", "args", "flops"),
    [
        (
            aten._addmm_activation.default,
            ((4096,), (8192, 2048), (2048, 4096)),
            2 * 8192 * 2048 * 4096,
        ),
        (aten.linear.default, ((8, 1024, 2048), (4096, 2048)), 2 * 8192 * 2048 * 4096),
        (aten.addmm_.default, ((8192, 4096), (8192, 2048), (2048, 4096)), 2 * 8192 * 2048 * 4096),
    ],
)
def test_products_that_torch_s_registry_lacks_have_operations(
    target: Any, args: tuple[Any, ...], flops: int
) -> None:
    node = _node(
        target,
        *(_fake(*shape) for shape in args),
        val=_fake(8, 1024, 4096) if len(args[0]) == 3 else _fake(8192, 4096),
    )
    assert count_flops(node, bound_arguments(node), node.meta["val"]) == flops


@pytest.mark.parametrize(
    ("left", "right", "out", "flops"),
    [
        ((4096, 2048), (8, 2048, 1024), (4096, 1024), 2 * 4096 * 2048 * 1024),
        ((8, 1024, 2048), (2048, 4096), (1024, 4096), 2 * 1024 * 2048 * 4096),
        ((1024, 8192), (8192, 2048), (8, 1024, 2048), 2 * 1024 * 8192 * 2048),
        ((8, 1024, 2048), (8, 2048, 1024), (8, 1024, 1024), 2 * 8 * 1024 * 2048 * 1024),
    ],
)
def test_grouped_products_have_a_formula(left: Any, right: Any, out: Any, flops: int) -> None:
    offsets = [_fake(8, dtype=torch.int32)] if len(left) != len(right) or len(left) == 2 else []
    cluster = load_cluster("a100")  # so slow at products that operations, not bytes, bound them
    price = Roofline(cluster=cluster).compute_us(
        _node(aten._grouped_mm.default, _fake(*left), _fake(*right), *offsets, val=_fake(*out))
    )
    bytes_us = (
        2
        * (torch.Size(left).numel() + torch.Size(right).numel() + torch.Size(out).numel())
        / (2039e3 * 0.86)
    )
    rows = (
        512 if len(left) == 2 and len(right) == 3 else out[-2]
    )  # 4096 rows of eight groups; 4096 columns of eight
    columns = 512 if len(left) == 3 and len(right) == 2 else out[-1]
    full = filled_share(108, rows, columns, 8)
    assert price == pytest.approx(max(flops / (312e6 * 0.86 * full), bytes_us) + 2.5, rel=1e-4)


def test_waits_views_getitem_allocations_and_sizes_are_free() -> None:
    x = _fake(1024, 1024)
    for node in (
        _node(c10d.wait_tensor.default, x, val=x),
        _node(aten.view.default, x, [-1], val=x.view(-1)),
        _node(aten._unsafe_view.default, x, [-1], val=x.view(-1)),
        _node(aten.t.default, x, val=x.t()),
        _node(aten.split_with_sizes.default, x, [512, 512], val=list(x.split(512))),
        _node(aten.reshape.default, x, [-1], val=x.view(-1)),
        _node(aten.detach.default, x, val=x.detach()),
        _node(aten.empty.memory_format, [1024, 1024], val=x),
        _node(aten.sym_size.int, x, 0, val=1024),
        _node(operator.getitem, [x, x], 0, val=x),
        _node(operator.mul, 3, 4, val=12),
    ):
        assert ROOFLINE.compute_us(node) == 0.0, node.target


def test_an_assertion_returns_nothing_and_is_free() -> None:
    """It has no ``meta["val"]`` to be priced by, and needs none."""
    node = _node(aten._assert_async.msg, _fake(1, dtype=torch.bool), "positive", val=None)
    del node.meta["val"]
    assert ROOFLINE.compute_us(node) == 0.0


def test_reshape_that_copies_is_priced_as_a_copy() -> None:
    x = _fake(1024, 1024)
    with FakeTensorMode():
        copied = torch.empty(1024 * 1024, dtype=torch.bfloat16)
    assert _price(aten.reshape.default, x.t(), [-1], val=copied) == pytest.approx(
        _memory_us(2 * 2 * 1024 * 1024)
    )


def test_pointwise_reads_each_tensor_once_and_writes_once() -> None:
    x, y, size = _fake(4096, 4096), _fake(4096, 4096), 2 * 4096 * 4096
    assert _price(aten.add.Tensor, x, y, val=_fake(4096, 4096)) == pytest.approx(
        _memory_us(3 * size)
    )
    assert _price(aten.mul.Tensor, x, x, val=_fake(4096, 4096)) == pytest.approx(
        _memory_us(2 * size)
    )
    assert _price(aten.mul.Tensor, x, 2.0, val=_fake(4096, 4096)) == pytest.approx(
        _memory_us(2 * size)
    )


def test_two_views_of_one_storage_are_read_once() -> None:
    x, size = _fake(4096, 4096), 2 * 4096 * 4096
    assert _price(aten.add.Tensor, x, x.t(), val=_fake(4096, 4096)) == pytest.approx(
        _memory_us(2 * size)
    )
    assert _price(aten.add.Tensor, x[:2048], x[2048:], val=_fake(2048, 4096)) == pytest.approx(
        _memory_us(size + size // 2)
    )


def test_expanded_inputs_count_what_lies_behind_them() -> None:
    x = _fake(1, 4096).expand(4096, 4096)
    assert _price(aten.mul.Tensor, x, _fake(4096, 4096), val=_fake(4096, 4096)) == pytest.approx(
        _memory_us(2 * (4096 + 2 * 4096**2))
    )


def test_in_place_reads_and_writes_its_argument_once() -> None:
    x, y, size = _fake(4096, 4096), _fake(4096, 4096), 2 * 4096 * 4096
    assert _price(aten.add_.Tensor, x, y, val=x) == pytest.approx(_memory_us(3 * size))
    assert _price(aten.copy_.default, x, y, val=x) == pytest.approx(_memory_us(2 * size))
    assert _price(aten.zero_.default, x, val=x) == pytest.approx(_memory_us(size))
    assert _price(aten.add.out, x, y, val=x, out=x) == pytest.approx(_memory_us(3 * size))


def test_lookups_read_only_the_rows_they_gather() -> None:
    """32,000 rows in the table, 1024 gathered: 8 bytes an index, rows read and written."""
    table, indices = _fake(32000, 4096), _fake(1024, dtype=torch.int64)
    rows = 2 * 1024 * 4096
    assert _price(aten.embedding.default, table, indices, val=_fake(1024, 4096)) == pytest.approx(
        _memory_us(2 * rows + 8 * 1024)
    )
    assert _price(aten.index.Tensor, table, [indices], val=_fake(1024, 4096)) == pytest.approx(
        _memory_us(2 * rows + 8 * 1024)
    )
    backward = _price(
        aten.embedding_dense_backward.default,
        _fake(1024, 4096),
        indices,
        32000,
        -1,
        False,
        val=table,
    )
    assert backward == pytest.approx(_memory_us(2 * 32000 * 4096 + 3 * rows + 8 * 1024))
    put = _price(aten.index_put_.default, table, [indices], _fake(1024, 4096), val=table)
    assert put == pytest.approx(_memory_us(8 * 1024 + rows + 2 * rows))


def test_copies_cost_twice_their_bytes_however_many_inputs() -> None:
    x, parts = _fake(1 << 20), [_fake(1 << 18) for _ in range(4)]
    copy_us = _memory_us(2 * 2 * (1 << 20))
    assert _price(aten.clone.default, x, val=_fake(1 << 20)) == pytest.approx(copy_us)
    assert _price(aten.cat.default, parts, val=_fake(1 << 20)) == pytest.approx(copy_us)
    cast = _price(
        aten._to_copy.default, _fake(1 << 20, dtype=torch.float32), val=x, dtype=torch.bfloat16
    )
    assert cast == pytest.approx(_memory_us(6 * (1 << 20)))


def test_copy_in_of_torch_s_buckets_fills_one_slice() -> None:
    """8 ranks: the members are read, and an eighth of the gathered buffer is written."""
    target = torch.ops.bucketing._pre_bucket_all_gather.default
    ins = [_fake(1 << 18), _fake(1 << 18)]
    price = _price(target, ins, 8, torch.bfloat16, [15, 15], 0, val=_fake(8 << 19))
    assert price == pytest.approx(_memory_us(2 * (1 << 19) + 2 * (1 << 19)))


def test_launches_have_a_price_and_functional_all_reduce_clones_its_input() -> None:
    x, gathered = _fake(1 << 20), _fake(8 << 20)
    assert _price(c10d.all_gather_into_tensor.default, x, 8, "0", val=gathered) == 5.0
    assert (
        _price(c10d.all_gather_into_tensor_out.default, x, 8, "0", val=gathered, out=gathered)
        == 5.0
    )
    assert _price(c10d.reduce_scatter_tensor.default, gathered, "sum", 8, "0", val=x) == 5.0
    assert _price(c10d.all_to_all_single.default, x, [1], [1], "0", val=x) == 5.0
    assert _price(c10d.all_reduce_.default, x, "sum", "0", val=x) == 5.0
    assert _price(c10d.all_reduce.default, x, "sum", "0", val=_fake(1 << 20)) == pytest.approx(
        5.0 + _memory_us(4 << 20)
    )


def test_symbolic_sizes_are_priced_at_their_hints() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(x * 2, y)

    args = torch.randn(48, 32, dtype=torch.bfloat16), torch.randn(32, 24, dtype=torch.bfloat16)
    fixed, symbolic = (
        make_fx(body, tracing_mode="fake")(*args),
        make_fx(body, tracing_mode="symbolic")(*args),
    )
    prices = [
        [
            ROOFLINE.compute_us(node)
            for node in gm.graph.nodes
            if node.target in (aten.mul.Tensor, aten.mm.default)
        ]
        for gm in (fixed, symbolic)
    ]
    assert prices[0] == prices[1]
    assert len(prices[0]) == 2


def test_what_cannot_be_priced_names_the_node() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    add = graph.call_function(aten.add.Tensor, (x, 1))
    method = graph.call_method("relu", (x,))
    assert ROOFLINE.compute_us(x) == 0.0
    with pytest.raises(InputError, match=r"node '.*' has no meta\['val'\]"):
        ROOFLINE.compute_us(add)
    with pytest.raises(InputError, match="node 'relu' is a call_method"):
        ROOFLINE.compute_us(method)
    with pytest.raises(
        InputError, match=r"operations of node 'mm_default' .*inner dimensions must match"
    ):
        _price(aten.mm.default, _fake(4, 5), _fake(6, 7), val=_fake(4, 7))


@pytest.mark.alone
def test_ten_thousand_nodes_take_about_a_second() -> None:
    x, y, out = _fake(1024, 1024), _fake(1024, 1024), _fake(1024, 1024)
    nodes = [
        _node(aten.mm.default, x, y, val=out),
        _node(aten.add.Tensor, x, y, val=out),
        _node(aten.view.default, x, [-1], val=x.view(-1)),
    ]
    start = time.process_time()
    for _ in range(3334):
        for node in nodes:
            ROOFLINE.compute_us(node)
    assert (
        time.process_time() - start < 3
    )  # 1 s on an idle core; the bound leaves room for slow machines
