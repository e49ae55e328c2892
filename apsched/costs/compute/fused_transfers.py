"""Operators of torch that transfer inside: products of asynchronous tensor parallelism, and gathers
of keys and values of context parallelism.

Asynchronous tensor parallelism (torch/distributed/_symmetric_memory/__init__.py) cuts a product
into one part for each process rank, and computes a part while the others are transferred. The own
part needs no transfer, so that with n process ranks

    t = max(compute, compute / n + transfer)

Context parallelism for ``flex_attention``
(torch/distributed/tensor/experimental/_context_parallel/_cp_custom_ops.py) starts one transfer of
keys and one of values, and waits for both:

    t = compute + transfers
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from apsched.costs.compute.traffic import op_name
from apsched.fx.collectives import group_name, kind_inside
from apsched.fx.operands import bound_arguments, result_of, shape_of, tensors_in
from apsched.kinds import CollectiveKind

_GATHERED = ("symm_mem::fused_all_gather_matmul", "symm_mem::fused_all_gather_scaled_matmul")
_REDUCED = (
    "symm_mem::fused_matmul_reduce_scatter",
    "symm_mem::fused_scaled_matmul_reduce_scatter",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerTransfer:
    """A transfer inside of an operator."""

    kind: CollectiveKind
    group: str
    group_size: int
    size_bytes: int
    """Counted once, as of :class:`apsched.fx.collectives.CollectiveCall`."""
    beside_product: bool
    """Whether the operator computes during the transfer."""

    def whole_us(self, compute_us: float, transfer_us: float) -> float:
        """Return the time of the operator, which computes for ``compute_us`` by itself."""
        if self.beside_product:
            return max(compute_us, compute_us / self.group_size + transfer_us)
        return compute_us + transfer_us


def multiplies_and_transfers(name: str) -> bool:
    """Return whether the operator is a product of asynchronous tensor parallelism."""
    return name in _GATHERED or name in _REDUCED


def product_flops(name: str, arguments: Mapping[str, Any], result: object) -> int:
    """Return the operations of a product of asynchronous tensor parallelism: that of the gathered
    matrix, or that which is reduced.
    """
    if name in _GATHERED:
        inner = shape_of(arguments["Bs"][0])[0]
        return 2 * inner * sum(prod(shape_of(product)) for product in _products(result))
    return 2 * prod(shape_of(arguments["A"])) * shape_of(arguments["B"])[-1]


def inner_transfers(node: torch.fx.Node) -> tuple[InnerTransfer, ...]:
    """Return the transfers inside of the operator that ``node`` calls; none of most operators."""
    kind = kind_inside(node.target)
    if kind is None:
        return ()
    name, arguments, result = op_name(node.target), bound_arguments(node), result_of(node)
    return tuple(
        InnerTransfer(
            kind=kind,
            group=group_name(node),
            group_size=max(whole // max(part, 1), 1),
            size_bytes=whole * element_bytes,
            beside_product=multiplies_and_transfers(name),
        )
        for whole, part, element_bytes in _whole_and_part(name, arguments, result)
    )


def _whole_and_part(
    name: str, arguments: Mapping[str, Any], result: Any
) -> Iterator[tuple[int, int, int]]:
    """Yield the elements of all process ranks, those of one, and the bytes of an element."""
    if name in _GATHERED:
        sent, rows = arguments["A"], prod(shape_of(_products(result)[0])[:-1])
        yield rows * shape_of(arguments["Bs"][0])[0], *_elements(sent)
    elif name in _REDUCED:
        product = (*shape_of(arguments["A"])[:-1], shape_of(arguments["B"])[-1])
        yield prod(product), *_elements(result)
    else:
        given = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        for pair in zip(given, tensors_in(result), strict=True):
            part, whole = sorted(pair, key=lambda tensor: prod(shape_of(tensor)))
            yield prod(shape_of(whole)), *_elements(part)


def _products(result: Any) -> list[torch.Tensor]:
    """Return the products of a gathered matrix, without that matrix."""
    return list(tensors_in(result[1]))


def _elements(tensor: torch.Tensor) -> tuple[int, int]:
    return prod(shape_of(tensor)), tensor.element_size()
