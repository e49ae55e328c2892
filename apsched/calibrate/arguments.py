"""Real arguments for one node of a graph: tensors of its shapes, strides and dtypes, with values
that are valid where values matter.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from apsched.costs.compute.traffic import op_name
from apsched.fx.operands import bound_arguments, tensors_in, value_of
from apsched.torch_compat.sizes import size_hint


def real_call(node: Node, device: torch.device) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return operator, arguments and keyword arguments with which ``node`` runs on ``device``.

    Whole numbers are indices of rows, classes or experts in nearly every operator: they lie below
    the smallest size around, and where they are offsets into the rows of a grouped product they cut
    those into equal parts.
    """
    tensors = list(_tensors(node))
    limit = min(
        (size_hint(size) for tensor in tensors for size in tensor.shape if size_hint(size) > 0),
        default=1,
    )
    offsets = bound_arguments(node).get("offs")
    rows = max((size_hint(tensor.shape[0]) for tensor in tensors if tensor.dim() == 2), default=1)

    def real(value: Any) -> Any:
        if isinstance(value, Node):
            return real(value_of(value))
        if isinstance(value, torch.Tensor):
            return (
                _offsets(value, rows, device)
                if offsets is not None and value is offsets
                else _tensor(value, limit, device)
            )
        if isinstance(value, torch.SymInt):
            return size_hint(value)
        return device if isinstance(value, torch.device) else value

    args, kwargs = pytree.tree_map(
        real, (tuple(node.args), dict(node.kwargs)), is_leaf=lambda value: isinstance(value, Node)
    )
    stand_in = STAND_INS.get(op_name(node.target)) if device.type == "cuda" else None
    target = node.target if stand_in is None else stand_in()
    return target, args, kwargs


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    yield from tensors_in(list(bound_arguments(node).values()))


def _tensor(like: torch.Tensor, limit: int, device: torch.device) -> torch.Tensor:
    shape, strides = tuple(map(size_hint, like.shape)), tuple(map(size_hint, like.stride()))
    needed = (
        1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 not in shape
        else 0
    )
    return _filled(needed, like.dtype, limit, device).as_strided(shape, strides)


def _filled(num: int, dtype: torch.dtype, limit: int, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(num, device=device).to(dtype)
    if dtype is torch.bool:
        return torch.ones(num, dtype=dtype, device=device)
    return torch.randint(0, min(limit, 127), (num,), device=device).to(dtype)


def _offsets(like: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    num = size_hint(like.shape[0])
    return (torch.arange(1, num + 1, device=device) * rows // num).to(like.dtype)


def _attention(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        is_causal=is_causal,
        enable_gqa=q.shape[1] != k.shape[1],
        scale=scale,
    )


class _AttentionBackward:
    """The backward of the attention that a GPU runs, with its forward run once outside of the
    clock.
    """

    def __init__(self) -> None:
        self._ran: tuple[Any, list[torch.Tensor], Any] | None = None

    def __call__(
        self,
        grad: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        if self._ran is None or self._ran[0] is not q:
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
                query, key, value = leaves
                self._ran = (
                    q,
                    leaves,
                    _attention(query, key, value, dropout_p, is_causal, scale=scale),
                )
        _, leaves, result = self._ran
        return torch.autograd.grad(result, leaves, grad, retain_graph=True)


# a graph captured without a GPU has the CPU's attention; on a GPU the one that a job would run
# there is measured
STAND_INS: dict[str, Callable[[], Any]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda: _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _AttentionBackward,
}
