"""Features of torch one by one, on small models whose weights are gathered."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.intake.cases.feature_table import Made, feature
from benchmarks.intake.cases.parts import (
    TOKENS,
    WIDTH,
    WORLD,
    Block,
    Model,
    activations,
    functional,
    gathered,
)


@feature("plain")
def _plain() -> Made:
    return Model(), (activations(),), {}


@feature("forward alone")
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


@feature("checkpointing")
def _checkpointing() -> Made:
    return Model(_Checkpointed(Block()), _Checkpointed(Block())), (activations(),), {}


@feature("selective checkpointing")
def _selective() -> Made:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    blocks = (_Checkpointed(Block(), context_fn=context) for _ in range(2))
    return Model(*blocks), (activations(),), {}


@feature("checkpointing with dropout")
def _checkpointed_dropout() -> Made:
    return Model(_Checkpointed(Block(nn.Dropout(0.5))), Block()), (activations(),), {}


@feature("dropout")
def _dropout() -> Made:
    return Model(Block(nn.Dropout(0.5)), Block(nn.Dropout(0.1))), (activations(),), {}


@feature("dynamic shapes")
def _dynamic() -> Made:
    return Model(), (activations(3),), {"dynamic": True}


@feature("autocast")
def _autocast() -> Made:
    model = Model()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = model(x)
            return loss

    return step, (activations(),), {}


@feature("tied embeddings")
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


@feature("gradient accumulation")
def _accumulation() -> Made:
    model = Model()
    return (
        lambda one, other: model(one) + model(other),
        (activations(), activations()),
        {},
    )


@feature("frozen weights")
def _frozen() -> Made:
    model = Model()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    return model, (activations().requires_grad_(),), {}


@feature("batch norm, a buffer that is written")
def _batch_norm() -> Made:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.norm(x.flatten(0, 1)).view_as(x)
            return result

    return Model(Block(Norm())), (activations(),), {}


@feature("custom operator")
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


@feature("custom operator that writes its argument")
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


@feature("compiled optimizer, AdamW")
def _adamw() -> Made:
    return _with_optimizer(partial(torch.optim.AdamW, lr=torch.tensor(0.01)))


@feature("compiled optimizer, SGD with momentum")
def _sgd() -> Made:
    return _with_optimizer(partial(torch.optim.SGD, lr=0.01, momentum=0.9))


@feature("branch")
def _branch() -> Made:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            return result

    return Model(Block(Branch()), Block()), (activations(),), {}


@feature("scan")
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


@feature("regions compiled once")
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
