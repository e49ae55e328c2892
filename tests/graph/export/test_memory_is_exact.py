"""The bytes that the DAG says are live at each node are those that an interpreter counts on real
tensors.
"""

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_function

from apsched.graph.export.export import export_graph
from apsched.torch_compat import graphs as torch_private
from benchmarks.common.live_bytes import live_bytes_of, run_counting
from tests.helpers.graphs.instrumented import UnitCosts, capture_of, traced

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
WORLD = 4


@pytest.fixture(scope="module", autouse=True)
def group():
    """A fake process group: collectives return at once and leave their outputs as they were
    allocated.
    """
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=WORLD)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def check(function, inputs, kept=()):
    """Trace ``function``, run it on ``inputs``, and compare node by node."""
    module = traced(function, inputs)
    placeholders = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    names = frozenset(placeholders[k] for k in kept)
    dag = export_graph(capture_of(module, names), UnitCosts())
    boxed = list(inputs)
    inputs.clear()
    _, counted = run_counting(module, boxed, dag, names)
    told = live_bytes_of(dag)
    rows = [
        f"{n.name:30} counted {c:8} told {t:8}"
        for n, c, t in zip(module.graph.nodes, counted, told, strict=True)
    ]
    assert counted == told, "\n".join(rows)
    return dag


def floats(*shape):
    return torch.randn(*shape)


def views(x):
    a = aten.view.default(x, [32, 128])
    b = aten.t.default(a)
    c = aten.slice.Tensor(b, 0, 0, 64)
    d = aten.expand.default(aten.unsqueeze.default(c, 0), [3, 64, 32])
    e = aten.mul.Tensor(d, 2.0)
    f = aten._unsafe_view.default(
        aten.clone.default(e, memory_format=torch.contiguous_format), [192, 32]
    )
    g = aten.select.int(f, 0, 1)
    h = aten.as_strided.default(f, [4, 4], [8, 2], 3)
    return aten.sum.default(h), aten.exp.default(g)


def copies_that_may_be_views(x):
    a = aten.reshape.default(x, [32, 128])  # a view
    b = aten.reshape.default(aten.t.default(a), [4096])  # a copy
    c = aten.contiguous.default(a)  # the tensor itself
    d = aten.contiguous.default(aten.t.default(a))  # a copy
    e = aten.flatten.using_ints(aten.t.default(d), 0, -1)  # a copy
    f = aten.to.dtype(c, torch.float32)  # the tensor itself
    g = aten.to.dtype(c, torch.float64)  # a copy
    h = aten._to_copy.default(c, dtype=torch.float32)  # a copy
    return aten.sum.default(b), aten.sum.default(d), e, aten.sum.default(f), g, aten.sum.default(h)


def splits(x):
    a, b = aten.split.Tensor(aten.add.Tensor(x, 1.0), 32, 0)
    c = aten.chunk.default(aten.relu.default(a), 2, 1)
    d = aten.unsafe_split.Tensor(aten.neg.default(b), 8, 0)
    first, last = c[0], d[3]
    e = aten.unbind.int(last, 0)
    return aten.exp.default(first), aten.sum.default(e[2])


def in_place(x, y):
    a = aten.clone.default(x)
    b = aten.add_.Tensor(a, 1.0)
    row = aten.select.int(b, 0, 3)
    c = aten.mul_.Tensor(row, 2.0)
    d = aten.empty_like.default(y)
    e = aten.copy_.default(d, y)
    f = aten.mm.out(a, e, out=aten.new_empty.default(x, [64, 64]))
    aten.index_put_.default(a, [aten.arange.default(2)], aten.zeros.default([64]))
    aten.copy_.default(x, f)
    return aten.sum.default(f), aten.sum.default(c)


def many_outputs(x, weight, bias):
    out, _, rstd = aten.native_layer_norm.default(x, [64], weight, bias, 1e-5)
    values, indices = aten.topk.default(out, 4)
    ordered, _ = aten.sort.default(x)
    _, average = aten.var_mean.correction(ordered, [1])
    dropped, _ = aten.native_dropout.default(x, 0.5, True)
    return (
        values,
        aten.sum.default(indices),
        aten.sum.default(average),
        aten.sum.default(dropped),
        rstd,
    )


def dead_results(x, unused):
    aten.exp.default(x)
    aten.split.Tensor(aten.sin.default(x), 16, 0)
    aten.sort.default(x)
    aten.view.default(aten.cos.default(x), [4096])
    return aten.sum.default(x)


def attention(q, k, v):
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True)
    heads = aten.transpose.int(out, 1, 2)
    flat = aten.reshape.default(heads, [2, 16, 32])
    scores = aten.bmm.default(
        aten.view.default(q, [4, 16, 16]),
        aten.transpose.int(aten.view.default(k, [4, 16, 16]), 1, 2),
    )
    weights = aten._softmax.default(scores, -1, False)
    gradient = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        out, q, k, v, out, logsumexp, 0.0, True
    )
    return aten.sum.default(flat), aten.sum.default(weights), gradient[0]


def convolution(x, weight):
    y = aten.convolution.default(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    pooled, where = aten.max_pool2d_with_indices.default(y, [2, 2], [2, 2])
    normal, _, _ = aten.native_batch_norm.default(
        pooled, None, None, aten.zeros.default([8]), aten.ones.default([8]), True, 0.1, 1e-5
    )
    gradient = aten.convolution_backward.default(
        y, x, weight, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return aten.sum.default(normal), gradient[1], where


def loss(x, target):
    logits = aten.log_softmax.int(x, 1)
    value, total = aten.nll_loss_forward.default(logits, target, None, 1, -100)
    gradient = aten.nll_loss_backward.default(value, logits, target, None, 1, -100, total)
    table = aten.embedding.default(x, target)
    scattered = aten.embedding_dense_backward.default(table, target, 64, -1, False)
    return value, gradient, aten.sum.default(scattered)


def lists(x, y):
    a, b = aten._foreach_mul.Scalar([x, y], 2.0)
    aten._foreach_add_.Scalar([a, b], 1.0)
    c = aten.cat.default([a, b])
    d = aten.stack.default([x, y])
    aten._foreach_copy_.default([a, b], [x, y])
    return aten.sum.default(c), aten.sum.default(d), aten.sum.default(a)


def complex_numbers(x):
    a = aten.view_as_complex.default(aten.view.default(x, [2048, 2]))
    b = aten.view_as_real.default(aten.mul.Tensor(a, a))
    return aten.sum.default(b)


OPERATORS = {
    "views": (views, lambda: [floats(64, 64)]),
    "copies that may be views": (copies_that_may_be_views, lambda: [floats(64, 64)]),
    "splits": (splits, lambda: [floats(64, 64)]),
    "in place": (in_place, lambda: [floats(64, 64), floats(64, 64)]),
    "many outputs": (many_outputs, lambda: [floats(64, 64), floats(64), floats(64)]),
    "dead results": (dead_results, lambda: [floats(64, 64), floats(128, 64)]),
    "attention": (
        attention,
        lambda: [floats(2, 2, 16, 16), floats(2, 2, 16, 16), floats(2, 2, 16, 16)],
    ),
    "convolution": (convolution, lambda: [floats(2, 4, 16, 16), floats(8, 4, 3, 3)]),
    "loss": (loss, lambda: [floats(64, 64), torch.arange(64)]),
    "lists": (lists, lambda: [floats(64, 64), floats(64, 64)]),
    "complex numbers": (complex_numbers, lambda: [floats(64, 64)]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    function, inputs = OPERATORS[name]
    check(function, inputs())
    check(function, inputs(), kept=(0,))


def fsdp_step(x, target, first, second):
    """Gather, multiply, and backward by hand; gradients reduce-scattered."""
    wholes, saved = [], []
    for shard in (first, second):
        cast = aten._to_copy.default(shard, dtype=torch.bfloat16)
        whole = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(cast, WORLD, "0"))
        whole = aten._to_copy.default(aten.view.default(whole, [64, 64]), dtype=torch.float32)
        saved.append(x)
        wholes.append(whole)
        x = aten.tanh.default(aten.mm.default(x, whole))
    gradient, outputs = aten.sub.Tensor(x, target), []
    for whole, before in zip(reversed(wholes), reversed(saved), strict=True):
        weight_gradient = aten.mm.default(aten.t.default(before), gradient)
        started = c10d.reduce_scatter_tensor.default(weight_gradient, "avg", WORLD, "0")
        gradient = aten.mm.default(gradient, aten.t.default(whole))
        outputs.append(c10d.wait_tensor.default(started))
    return outputs


def other_collectives(x, y):
    a = c10d.all_reduce.default(x, "sum", "0")
    b = aten.exp.default(y)
    a = c10d.wait_tensor.default(a)
    c = aten.clone.default(b)
    c10d.all_reduce_.default(c, "sum", "0")
    d = c10d.wait_tensor.default(c)
    e = c10d.all_to_all_single.default(d, [16] * 4, [16] * 4, "0")
    f = aten.sin.default(a)
    e = c10d.wait_tensor.default(e)
    g = c10d.wait_tensor.default(c10d.broadcast.default(e, 0, "0"))
    again = c10d.wait_tensor.default(g)
    return aten.sum.default(again), aten.sum.default(f)


def flat_bucket(x, y):
    """What write-back makes of two gathers: a buffer, a copy-in to this rank's part, one launch
    into the buffer, copies out.
    """
    whole = aten.empty.memory_format([4 * 128, 64])
    mine = aten.slice.Tensor(whole, 0, 0, 128)
    parts = aten.split_with_sizes.default(mine, [64, 64])
    aten._foreach_copy_.default([parts[0], parts[1]], [x, y])
    started = c10d.all_gather_into_tensor_out.default(mine, WORLD, "0", out=whole)
    done = c10d.wait_tensor.default(started)
    by_rank = aten.view.default(done, [4, 128, 64])
    a, b = aten.split_with_sizes.default(by_rank, [64, 64], 1)
    a = aten.clone.default(a, memory_format=torch.contiguous_format)
    b = aten.clone.default(b, memory_format=torch.contiguous_format)
    return aten.sum.default(a), aten.sum.default(b)


def coalesced(x, y):
    gathered = c10d.all_gather_into_tensor_coalesced.default(
        [aten.exp.default(x), aten.exp.default(y)], WORLD, "0"
    )
    a, b = c10d.wait_tensor.default(gathered[0]), c10d.wait_tensor.default(gathered[1])
    scattered = c10d.reduce_scatter_tensor_coalesced.default([a, b], "sum", WORLD, "0")
    c = c10d.wait_tensor.default(scattered[0])
    d = c10d.wait_tensor.default(scattered[1])
    return aten.sum.default(c), d


def shared_inputs(row, whole):
    a = aten.exp.default(row)
    b = aten.sin.default(whole)
    return aten.sum.default(b), aten.sum.default(a)


def overlapping():
    whole = floats(64, 64)
    return [whole[3], whole]


CONSTANT = floats(32, 32)


def with_constant(x):
    return aten.mm.default(x, CONSTANT), aten.t.default(CONSTANT)


COLLECTIVES = {
    "fsdp step": (
        fsdp_step,
        lambda: [floats(32, 64), floats(32, 64), floats(16, 64), floats(16, 64)],
        (2, 3),
    ),
    "other collectives": (other_collectives, lambda: [floats(64, 64), floats(64, 64)], ()),
    "flat bucket": (flat_bucket, lambda: [floats(64, 64), floats(64, 64)], ()),
    "coalesced": (coalesced, lambda: [floats(64, 64), floats(64, 64)], ()),
    "inputs that share a storage": (shared_inputs, overlapping, ()),
    "inputs that share a storage, one kept": (shared_inputs, overlapping, (0,)),
    "a constant": (with_constant, lambda: [floats(32, 32)], ()),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_and_inputs(name):
    function, inputs, kept = COLLECTIVES[name]
    check(function, inputs(), kept)


class Gather(torch.autograd.Function):
    """A parameter's gather, and the reduce-scatter of its gradient."""

    @staticmethod
    def forward(context, shard):
        return c10d.wait_tensor(c10d.all_gather_into_tensor(shard.to(torch.bfloat16), WORLD, "0"))

    @staticmethod
    def backward(context, gradient):
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(gradient.float(), "avg", WORLD, "0"))


class Block(torch.nn.Module):
    """A sharded transformer block with dropout, norms, attention and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32, dtype=torch.bfloat16)
        self.qkv, self.out = (
            torch.nn.Parameter(torch.randn(n // WORLD, 32) * 0.1) for n in (96, 32)
        )
        self.up, self.down = (
            torch.nn.Parameter(torch.randn(n // WORLD, m) * 0.1) for n, m in ((128, 32), (32, 64))
        )

    def forward(self, x):
        normal = self.norm(x)
        q, k, v = (
            (normal @ Gather.apply(self.qkv).t())
            .view(2, 16, 3, 2, 16)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + heads.transpose(1, 2).reshape(2, 16, 32) @ Gather.apply(self.out).t()
        gate, value = (x @ Gather.apply(self.up).t()).chunk(2, dim=-1)
        hidden = torch.nn.functional.dropout(torch.nn.functional.silu(gate) * value, 0.1)
        return x + hidden @ Gather.apply(self.down).t()


def copies_of_storages(tensors, held):
    """Return the same tensors on copies of their storages, save those in ``held``; who shared a
    storage still does.
    """
    copies = {}
    for tensor in tensors:
        key = tensor.untyped_storage()._cdata
        if key not in copies:
            copies[key] = (
                tensor.untyped_storage() if key in held else tensor.untyped_storage().clone()
            )
    layouts = [
        (t.dtype, copies[t.untyped_storage()._cdata], t.storage_offset(), t.shape, t.stride())
        for t in tensors
    ]
    return [
        torch.empty(0, dtype=dtype).set_(storage, *layout) for dtype, storage, *layout in layouts
    ]


def test_forward_and_backward_of_a_sharded_block_with_saved_activations():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block())
    held = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
    compared = []

    def compiler(name):
        def compile_graph(module, example_inputs):
            def run(boxed):
                nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
                named = {
                    n.name: held.get(v.untyped_storage()._cdata)
                    for n, v in zip(nodes, boxed, strict=True)
                }
                parameters = {n: parameter for n, parameter in named.items() if parameter}
                dag = export_graph(
                    capture_of(module, list(parameters), name=name, parameters=parameters),
                    UnitCosts(),
                )
                copied = copies_of_storages(
                    boxed, held
                )  # autograd still holds the ones of this frame
                boxed.clear()
                result, counted = run_counting(module, copied, dag, frozenset(parameters))
                compared.append(
                    (name, counted, live_bytes_of(dag), [n.name for n in module.graph.nodes], dag)
                )
                return result

            run._boxed_call = True
            return run

        return compile_graph

    compiled = aot_function(
        lambda parameters, x: (
            torch.func.functional_call(model, parameters, (x,)).float().square().mean()
        ),
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
    )
    compiled(
        dict(model.named_parameters()), torch.randn(2, 16, 32, dtype=torch.bfloat16)
    ).backward()
    assert [name for name, *_ in compared] == ["forward", "backward"]
    for _, counted, told, names, _ in compared:
        assert counted == told, [
            row for row in zip(names, counted, told, strict=True) if row[1] != row[2]
        ]
    for _, _, _, _, dag in compared:
        collectives = [r.collective for _, r in dag.nodes(data="record") if r.collective]
        assert len(collectives) >= 8
        assert all(c.bucketable and not c.on_path for c in collectives)
