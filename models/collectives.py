"""Collectives on the path of compute, with their gradients, as functional ops that a graph shows as
they are.

Tensors are split along dim 0, so that no copy stands around the collective. Each function is the
identity on a group of one.
"""

from typing import Any

import torch

from apsched.models.mesh import Group

_ops = torch.ops._c10d_functional


def gather_tokens(x_TD: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the tokens of all process ranks of ``group``; the gradient is reduce-scattered."""
    return x_TD if group.size == 1 else _apply(_GatherTokens, x_TD, group)


def scatter_tokens(x_TD: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this process rank's tokens of the sum over ``group``; the gradient is gathered."""
    return x_TD if group.size == 1 else _apply(_ScatterTokens, x_TD, group)


def exchange_tokens(x_TD: torch.Tensor, group: Group) -> torch.Tensor:
    """Return an all-to-all of equal splits of dim 0; the gradient goes the same way back."""
    return x_TD if group.size == 1 else _apply(_ExchangeTokens, x_TD, group)


def exchange_rows(
    x: torch.Tensor, received: list[int], sent: list[int], group: Group
) -> torch.Tensor:
    """Return an all-to-all of dim 0, with the numbers of rows from and to each process rank; the
    gradient goes the same way back.
    """
    function: Any = _ExchangeRows
    result: torch.Tensor = function.apply(x, received, sent, group)
    return result


def sum_of_parts(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over ``group`` of values that every process rank then uses alike; the gradient
    passes unchanged.
    """
    return x if group.size == 1 else _apply(_SumOfParts, x, group)


def largest_of_parts(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the elementwise maximum over ``group``; no gradient flows."""
    return x.detach() if group.size == 1 else _wait(_ops.all_reduce(x.detach(), "max", group.name))


def gather_shards(
    x: torch.Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype
) -> torch.Tensor:
    """Return the shards of ``group`` along dim 0, in ``dtype``; the gradient is reduce-scattered in
    ``reduce_dtype``.
    """
    function: Any = _GatherShards
    result: torch.Tensor = function.apply(x, group, dtype, reduce_dtype)
    return result


def sum_gradient(x: torch.Tensor, group: Group, reduce_dtype: torch.dtype) -> torch.Tensor:
    """Return ``x``; its gradient is summed in ``reduce_dtype`` over ``group``, where each process
    rank has a part of it.
    """
    if group.size == 1:
        return x
    function: Any = _SumGradient
    result: torch.Tensor = function.apply(x, group, reduce_dtype)
    return result


def _apply(function: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
    result: torch.Tensor = function.apply(x, group)
    return result


def _wait(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _ops.wait_tensor(x)
    return result


def _all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    return _wait(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))


def _reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    return _wait(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


def _all_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    splits = [x.shape[0] // group.size] * group.size
    return _exchanged(x, splits, splits, group)


def _exchanged(x: torch.Tensor, received: list[int], sent: list[int], group: Group) -> torch.Tensor:
    return _wait(_ops.all_to_all_single(x.contiguous(), received, sent, group.name))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(gradient, ctx.group), None


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.group, ctx.dtype, ctx.reduce_dtype = group, x.dtype, reduce_dtype
        return _all_gather(x.to(dtype), group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return (
            _reduce_scatter(gradient.to(ctx.reduce_dtype), ctx.group).to(ctx.dtype),
            None,
            None,
            None,
        )


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(gradient, ctx.group), None


class _ExchangeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, received: list[int], sent: list[int], group: Group
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchanged(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradient, ctx.sent, ctx.received, ctx.group), None, None, None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return _wait(_ops.all_reduce(x, "sum", group.name))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, reduce_dtype: torch.dtype) -> torch.Tensor:
        ctx.group, ctx.dtype, ctx.reduce_dtype = group, x.dtype, reduce_dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = gradient.contiguous().to(ctx.reduce_dtype)
        return _wait(_ops.all_reduce(parts, "sum", ctx.group.name)).to(ctx.dtype), None, None
