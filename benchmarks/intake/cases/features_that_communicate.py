"""Features of torch that communicate: attention, experts, and parallelism beside gathers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.intake.cases.feature_table import Made, feature
from benchmarks.intake.cases.parts import (
    WIDTH,
    WORLD,
    Block,
    Model,
    ShardedLinear,
    activations,
    functional,
    gathered,
    train_flex_attention_on_cpu,
)


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


@feature("attention of torch")
def _attention() -> Made:
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    return Model(_Attention(attend), Block()), (activations(),), {}


@feature("flex attention")
def _flex() -> Made:
    from torch.nn.attention.flex_attention import flex_attention

    def causal(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(q >= kv, score, -float("inf"))

    attend: Any = partial(flex_attention, score_mod=causal)
    model = torch.no_grad()(Model(_Attention(attend), Block()).forward)
    return model, (torch.randn(2, 128, WIDTH),), {"backward": False}


@feature("flex attention, backward")
def _flex_backward() -> Made:
    train_flex_attention_on_cpu()
    from torch.nn.attention.flex_attention import flex_attention

    return Model(_Attention(flex_attention), Block()), (torch.randn(2, 128, WIDTH),), {}


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


def exchanged(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return an all-to-all of ``x`` among all process ranks, with as many rows back as there."""
    result: torch.Tensor = _Exchange.apply(x, sizes, sizes)
    return result


@feature("mixture of experts")
def _experts() -> Made:
    """Splits that depend on the routing: their sizes are not known before the step runs."""

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
            there = _Exchange.apply(tokens[order], received, sent)
            back = _Exchange.apply(self.expert(there), sent, received)
            back = back[: tokens.shape[0]]
            result = torch.zeros_like(tokens).index_add(0, order[: back.shape[0]], back)
            return result.view_as(x) + x

    return Model(Block(), Experts(), Block()), (activations(),), {}


@feature("masks whose size depends on data")
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


@feature("Ulysses")
def _ulysses() -> Made:
    def attend(*heads: torch.Tensor) -> torch.Tensor:
        def swapped(x: torch.Tensor, split: int, joined: int) -> torch.Tensor:
            parts = torch.cat(x.chunk(WORLD, split)).contiguous()
            rows = [parts.shape[0] // WORLD] * WORLD
            there = _Exchange.apply(parts, rows, rows)
            return torch.cat(there.chunk(WORLD), joined)

        q, k, v = (swapped(x, 1, 2) for x in heads)
        return swapped(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)

    return Model(_Attention(attend), Block()), (activations(),), {}


@feature("ring attention")
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


@feature("context parallelism by gathered keys and values")
def _gathered_keys() -> Made:
    """Each process rank has the queries of its part of the sequence, and sees all keys."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = torch.stack((k, v)).movedim(3, 0).contiguous()  # [T, 2, B, H, D]
        every = gathered(first.flatten(1)).unflatten(1, first.shape[1:]).movedim(0, 3)
        result: torch.Tensor = F.scaled_dot_product_attention(q, *every.unbind())
        return result

    return Model(_Attention(attend), Block()), (activations(),), {}


@feature("float8")
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


@feature("sharded by DTensor")
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


@feature("tensor parallelism by DTensor, beside gathers")
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


@feature("fused operators of asynchronous tensor parallelism")
def _async_tp() -> Made:
    """As torch's pass over a graph leaves them, beside gathers of weights."""
    from torch.distributed import _symmetric_memory as operators

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
            self.down = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert operators is not None
            assert dist.group.WORLD is not None
            group = dist.group.WORLD.group_name
            _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
                x.flatten(0, 1), [self.up], 0, group
            )
            y = torch.ops.symm_mem.fused_matmul_reduce_scatter(y, self.down, "sum", 0, group)
            return y.view_as(x)

    model = torch.no_grad()(Model(Fused(), Block()).forward)
    return model, (activations(),), {"backward": False}


@feature("coalesced collectives")
def _coalesced() -> Made:
    shards = [torch.randn(4, WIDTH), torch.randn(WIDTH // WORLD, WIDTH)]

    def step(x: torch.Tensor) -> torch.Tensor:
        first, second = functional.all_gather_into_tensor_coalesced(shards, dist.group.WORLD)
        sums = functional.all_reduce_coalesced([x @ second, x + 1], "sum", dist.group.WORLD)
        return sums[0] @ first.t() + sums[1].sum()

    return step, (activations(),), {"backward": False}


@feature("broadcast")
def _broadcast() -> Made:
    model = Model()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(functional.broadcast(x, 0, dist.group.WORLD))
        return loss

    return step, (activations(),), {}
