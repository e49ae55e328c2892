"""Features of torch one by one, on small models whose weights are gathered."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from apsched.capture.captured import CapturedGraph
from benchmarks.intake.case import Case
from benchmarks.intake.compiled import compiled_graphs
from benchmarks.intake.parts import (
    TOKENS,
    WIDTH,
    WORLD,
    Block,
    Model,
    ShardedLinear,
    activations,
    gathered,
)
from benchmarks.intake.worlds import running_world

Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""What is compiled, its inputs, and options of :func:`compiled_graphs`."""

_FEATURES: dict[str, Callable[[], Made]] = {}
_SMOKE = ("plain", "selective checkpointing", "tied embeddings", "mixture of experts")


def cases() -> Iterator[Case]:
    """Yield a case for each feature."""
    for name, make in _FEATURES.items():
        yield Case(name=name, group="features", build=partial(_graphs, make), smoke=name in _SMOKE)


def made(name: str) -> Callable[[], Made]:
    """Return what makes the feature ``name``."""
    return _FEATURES[name]


def _graphs(make: Callable[[], Made]) -> tuple[CapturedGraph, ...]:
    running_world(WORLD)
    torch.manual_seed(0)
    function, inputs, options = make()
    return compiled_graphs(function, inputs, **options)


def _feature(name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def registered(make: Callable[[], Made]) -> Callable[[], Made]:
        _FEATURES[name] = make
        return make

    return registered


@_feature("plain")
def _plain() -> Made:
    return Model(), (activations(),), {}


@_feature("forward alone")
def _inference() -> Made:
    model = Model()
    return torch.no_grad()(model.forward), (activations(),), {"backward": False}


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False, **self.options)
        return result


@_feature("checkpointing")
def _checkpointing() -> Made:
    return Model(_Checkpointed(Block()), _Checkpointed(Block())), (activations(),), {}


@_feature("selective checkpointing")
def _selective() -> Made:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    blocks = (_Checkpointed(Block(), context_fn=context) for _ in range(2))
    return Model(*blocks), (activations(),), {}


@_feature("checkpointing with dropout")
def _checkpointed_dropout() -> Made:
    return Model(_Checkpointed(Block(nn.Dropout(0.5))), Block()), (activations(),), {}


@_feature("dropout")
def _dropout() -> Made:
    return Model(Block(nn.Dropout(0.5)), Block(nn.Dropout(0.1))), (activations(),), {}


@_feature("dynamic shapes")
def _dynamic() -> Made:
    return Model(), (activations(3),), {"dynamic": True}


@_feature("autocast")
def _autocast() -> Made:
    model = Model()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = model(x)
            return loss

    return step, (activations(),), {}


@_feature("tied embeddings")
def _tied() -> Made:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(64 // WORLD, WIDTH))
            self.block = Block()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            table = gathered(self.table)
            logits = F.linear(self.block(F.embedding(tokens, table)), table)
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return Tied(), (torch.randint(0, 64, (2, TOKENS)),), {}


@_feature("gradient accumulation")
def _accumulation() -> Made:
    model = Model()
    return (
        lambda one, other: model(one) + model(other),
        (activations(), activations()),
        {},
    )


@_feature("frozen weights")
def _frozen() -> Made:
    model = Model()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    return model, (activations().requires_grad_(),), {}


@_feature("batch norm, a buffer that is written")
def _batch_norm() -> Made:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.norm(x.flatten(0, 1)).view_as(x)
            return result

    return Model(Block(Norm())), (activations(),), {}


@_feature("custom operator")
def _custom() -> Made:
    @torch.library.custom_op("apsched_intake::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    scaled.register_fake(lambda x, factor: torch.empty_like(x))
    scaled.register_autograd(
        lambda ctx, gradient: (gradient * ctx.factor, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled(x, 0.5)

    return Model(Block(Scaled())), (activations(),), {}


@_feature("custom operator that writes its argument")
def _mutating() -> Made:
    @torch.library.custom_op("apsched_intake::write_", mutates_args=("x",))
    def write(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y.sum())

    write.register_fake(lambda x, y: None)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            write(self.seen, x.detach())
            return x

    return Model(Block(Counting()), Block()), (activations(),), {}


class _Attention(nn.Module):
    """Attention between two sharded layers; ``attend`` takes and returns [B, H, T, D]."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = ShardedLinear(WIDTH, 3 * WIDTH), ShardedLinear()
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        y = self.attend(*(part.contiguous() for part in heads.unbind()))
        result: torch.Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return result


@_feature("attention of torch")
def _attention() -> Made:
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    return Model(_Attention(attend), Block()), (activations(),), {}


@_feature("flex attention")
def _flex() -> Made:
    from torch.nn.attention.flex_attention import flex_attention

    def causal(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(q >= kv, score, -float("inf"))

    attend: Any = partial(flex_attention, score_mod=causal)
    model = torch.no_grad()(Model(_Attention(attend), Block()).forward)
    return model, (torch.randn(2, 128, WIDTH),), {"backward": False}


@_feature("flex attention, backward")
def _flex_backward() -> Made:
    from torch.nn.attention.flex_attention import flex_attention

    return Model(_Attention(flex_attention), Block()), (torch.randn(2, 128, WIDTH),), {}  # type: ignore[arg-type]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.received, ctx.sent = received, sent
        return functional.all_to_all_single(x, received, sent, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradient.contiguous()
        back = functional.all_to_all_single(gradient, ctx.sent, ctx.received, dist.group.WORLD)
        return back, None, None


@_feature("mixture of experts")
def _experts() -> Made:
    """Splits that depend on the routing: sizes that nobody knows before it runs."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.expert = nn.Linear(WIDTH, WORLD), ShardedLinear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = x.flatten(0, 1)
            chosen = self.router(tokens).argmax(-1)
            order = chosen.argsort(stable=True)
            counts = torch.histc(chosen.float(), WORLD, 0, WORLD - 1).long()
            theirs = functional.all_to_all_single(counts, None, None, dist.group.WORLD)
            sent, received = counts.tolist(), theirs.tolist()
            for size in (*sent, *received):
                torch._check(size >= 0)
                torch._check(size <= 10_000)
            there = _Exchange.apply(tokens[order], received, sent)  # type: ignore[no-untyped-call]
            back = _Exchange.apply(self.expert(there), sent, received)  # type: ignore[no-untyped-call]
            back = back[: tokens.shape[0]]
            result = torch.zeros_like(tokens).index_add(0, order[: back.shape[0]], back)
            return result.view_as(x) + x

    return Model(Block(), Experts(), Block()), (activations(),), {}


@_feature("masks whose size depends on data")
def _masked() -> Made:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ShardedLinear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.flatten(0, 1)
            places = (rows[:, 0] > 0).nonzero().squeeze(-1)
            result: torch.Tensor = rows.index_add(0, places, self.layer(rows[places])).view_as(x)
            return result

    return Model(Masked(), Block()), (activations(),), {}


@_feature("Ulysses")
def _ulysses() -> Made:
    def attend(*heads: torch.Tensor) -> torch.Tensor:
        def swapped(x: torch.Tensor, split: int, joined: int) -> torch.Tensor:
            parts = torch.cat(x.chunk(WORLD, split)).contiguous()
            rows = [parts.shape[0] // WORLD] * WORLD
            there = _Exchange.apply(parts, rows, rows)  # type: ignore[no-untyped-call]
            return torch.cat(there.chunk(WORLD), joined)

        q, k, v = (swapped(x, 1, 2) for x in heads)
        return swapped(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)

    return Model(_Attention(attend), Block()), (activations(),), {}


@_feature("ring attention")
def _ring() -> Made:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        both = torch.stack((k, v))
        total = torch.zeros_like(q)
        for _ in range(WORLD):
            k, v = both.unbind()
            total = total + F.scaled_dot_product_attention(q, k, v)
            turned, sizes = both.detach().contiguous(), [0, both.shape[0]]
            both = functional.all_to_all_single(turned, sizes, sizes, dist.group.WORLD)
        return total

    return Model(_Attention(attend), Block()), (activations(),), {}


@_feature("float8")
def _float8() -> Made:
    """Weights are gathered as eight bits, and multiplied by a kernel for them."""

    class Float8(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH // WORLD, WIDTH) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kind, one = torch.float8_e4m3fn, torch.ones(())
            shard = self.weight.to(kind).view(torch.uint8)
            whole = functional.all_gather_tensor(shard, 0, dist.group.WORLD).view(kind)
            rows = x.flatten(0, 1).to(kind)
            y = torch._scaled_mm(rows, whole.t(), one, one, out_dtype=torch.bfloat16)
            return y.view_as(x).to(x.dtype)

    model = torch.no_grad()(Model(Float8(), Block()).forward)
    return model, (activations(),), {"backward": False}


@_feature("sharded by DTensor")
def _dtensor() -> Made:
    """Weights are DTensors on a mesh, and are redistributed by their own rules."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))

    class Distributed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(WIDTH, WIDTH) / 8
            self.weight = nn.Parameter(
                distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight
            assert isinstance(weight, DTensor)
            return F.linear(x, weight.redistribute(mesh, [Replicate()]).to_local())

    return Model(Distributed(), Block(), Distributed()), (activations(),), {}


@_feature("tensor parallelism by DTensor, beside gathers")
def _two_axes() -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down(F.gelu(self.up(x)))
            return x + result

    split = Split()
    mesh = init_device_mesh("cpu", (WORLD,))
    parallelize_module(split, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Model(split, Block()), (activations(),), {}


@_feature("fused operators of asynchronous tensor parallelism")
def _async_tp() -> Made:
    """As torch's pass over a graph leaves them, beside gathers of weights."""
    from torch.distributed import _symmetric_memory as operators

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert operators is not None
            group = dist.group.WORLD.group_name  # type: ignore[union-attr]
            _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
                x.flatten(0, 1), [self.weight], 0, group
            )
            return y[: x.shape[0] * x.shape[1]].view_as(x)

    model = torch.no_grad()(Model(Fused(), Block()).forward)
    return model, (activations(),), {"backward": False}


@_feature("coalesced collectives")
def _coalesced() -> Made:
    shards = [torch.randn(4, WIDTH), torch.randn(WIDTH // WORLD, WIDTH)]

    def step(x: torch.Tensor) -> torch.Tensor:
        first, second = functional.all_gather_into_tensor_coalesced(shards, dist.group.WORLD)
        sums = functional.all_reduce_coalesced([x @ second, x + 1], "sum", dist.group.WORLD)
        return sums[0] @ first.t() + sums[1].sum()

    return step, (activations(),), {"backward": False}


@_feature("broadcast")
def _broadcast() -> Made:
    model = Model()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(functional.broadcast(x, 0, dist.group.WORLD))
        return loss

    return step, (activations(),), {}


def _with_optimizer(make: Callable[..., torch.optim.Optimizer]) -> Made:
    parameters = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3)]
    optimizer = make(parameters)

    def step(*gradients: torch.Tensor) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = functional.all_reduce(gradient, "avg", dist.group.WORLD)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    gradients = tuple(torch.randn(WIDTH, WIDTH) for _ in parameters)
    return step, gradients, {"backward": False, "fullgraph": False}


@_feature("compiled optimizer, AdamW")
def _adamw() -> Made:
    return _with_optimizer(partial(torch.optim.AdamW, lr=torch.tensor(0.01)))


@_feature("compiled optimizer, SGD with momentum")
def _sgd() -> Made:
    return _with_optimizer(partial(torch.optim.SGD, lr=0.01, momentum=0.9))


@_feature("branch")
def _branch() -> Made:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            return result

    return Model(Block(Branch()), Block()), (activations(),), {}


@_feature("scan")
def _scan() -> Made:
    from torch._higher_order_ops.scan import scan

    class Scan(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def one(carry: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                total = carry + y
                return total, total.clone()

            return x + scan(one, torch.zeros_like(x[0]), x, dim=0)[1]

    model = torch.no_grad()(Model(Block(Scan()), Block()).forward)
    return model, (activations(),), {"backward": False}


@_feature("regions compiled once")
def _regions() -> Made:
    from torch.compiler import nested_compile_region

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        @nested_compile_region
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.layer(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    region = Region()
    return Model(Block(), region, region, Block()), (activations(),), {}
