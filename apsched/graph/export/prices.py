"""The cost of each node on the compute stream, and its source."""

import threading
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from apsched.costs.model import CostModel, coalesced_member_us, measured_bytes
from apsched.costs.price_curve import PriceCurve, sample_curve
from apsched.fx.collectives import CollectiveCall, is_wait_tensor, tensor_bytes, tensors_of
from apsched.fx.effects.of_node import effects_of
from apsched.graph.export.whole_nodes import whole_us
from apsched.graph.records import (
    COPY,
    coalesced_curve_name,
    collective_curve_name,
    launch_curve_name,
    priced_kind,
)
from apsched.kinds import BUCKET_KINDS, COALESCED_KINDS, CollectiveKind, NodeKind
from apsched.units import ticks_to_us, us_to_ticks

_COPIES = ("copy_in", "copy_out")
_FREE_ROLES = ("buffer", "view", "wait")


class NodePrices:
    """Prices nodes; those that write-back added follow the curve by which the solver priced them,
    so that both agree to the tick.
    """

    def __init__(
        self, cost_model: CostModel, curves: dict[str, PriceCurve], sizes: Mapping[str, int]
    ) -> None:
        self._cost_model = cost_model
        self._curves = curves
        self._sizes = sizes

    def price(
        self, node: torch.fx.Node, kind: NodeKind, call: CollectiveCall | None
    ) -> tuple[float, str]:
        """Return duration in microseconds and its source; of a collective (``call``) that is
        scheduled, the duration of its launch.
        """
        role = node.meta.get("apsched", {}).get("role", "")
        timed = kind in (NodeKind.COMPUTE, NodeKind.START) and not is_wait_tensor(node)
        if not timed or role in _FREE_ROLES:
            return 0.0, "free"
        if role in _COPIES:
            return ticks_to_us(self._curves[COPY](copied_bytes(node))), "copy"
        if role == "start" and call is not None:
            return ticks_to_us(
                self._curves[launch_curve_name(call.kind, call.group)](0)
            ), self._source(node)
        if kind is NodeKind.START:
            return self._cost_model.compute_us(node), self._source(node)
        return whole_us(self._cost_model, node, self._sizes), self._source(node)

    def transfer_source(self, call: CollectiveCall) -> str:
        """Return the source of the duration of a collective on its group's stream."""
        source = getattr(self._cost_model, "collective_source", None)
        return (
            str(source(priced_kind(call.kind), call.group, call.group_size))
            if callable(source)
            else "model"
        )

    def _source(self, node: torch.fx.Node) -> str:
        source = getattr(self._cost_model, "cost_source", None)
        return str(source(node)) if callable(source) else "model"


def copied_bytes(node: torch.fx.Node) -> int:
    """Return the bytes that price a copy: of each tensor half of the bytes read and written,
    rounded up; it may cast.
    """
    written = {
        n for n in pytree.tree_leaves(effects_of(node).writes) if isinstance(n, torch.fx.Node)
    }
    itemsize = next(t for target in (*written, node) for t in tensors_of(target)).itemsize
    given = [
        n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, torch.fx.Node)
    ]
    read = [t for source in given if source not in written for t in tensors_of(source)]
    return sum((tensor_bytes(t) // t.itemsize * (t.itemsize + itemsize) + 1) // 2 for t in read)


def copy_curve(cost_model: CostModel, device: torch.device) -> PriceCurve:
    """Return the price of copying a number of bytes on ``device``: that of ``cost_model`` for a
    clone of as many uint8.
    """
    graph = torch.fx.Graph()
    source = graph.placeholder("copied")
    node = graph.call_function(torch.ops.aten.clone.default, (source,))

    def price_us(size_bytes: int) -> float:
        source.meta["val"], node.meta["val"] = _COPIED.pair(size_bytes, device)
        return cost_model.compute_us(node)

    with _COPIED.mode:
        return sample_curve(price_us)


class _Copied(threading.local):
    """The fake tensors of copy curves: the sizes depend on no graph, and to make the tensors takes
    longer than to price them. A thread has its own: a mode is entered by one at a time.
    """

    @cached_property
    def mode(self) -> FakeTensorMode:
        """The mode of the tensors."""
        return FakeTensorMode()

    @cached_property
    def _pairs(self) -> dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def pair(self, size_bytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors of ``size_bytes`` on ``device``; the mode must be on."""
        found = self._pairs.get((size_bytes, device))
        if found is None:
            one, other = (
                torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)
            )
            found = self._pairs[size_bytes, device] = one, other
        return found


_COPIED = _Copied()


def collective_curves(
    cost_model: CostModel, groups: Iterable[tuple[CollectiveKind, str, int]]
) -> dict[str, PriceCurve]:
    """Return a curve for each (kind, group name, group size), by its name."""
    return {
        collective_curve_name(kind, group): _collective_curve(cost_model, kind, group, size)
        for kind, group, size in groups
    }


def _collective_curve(
    cost_model: CostModel, kind: CollectiveKind, group: str, group_size: int
) -> PriceCurve:
    priced = priced_kind(kind)
    return sample_curve(
        lambda size_bytes: cost_model.collective_us(priced, group, group_size, size_bytes),
        measured_bytes(cost_model, priced, group, group_size),
    )


def launch_curves(
    cost_model: CostModel, groups: Iterable[tuple[CollectiveKind, str, int]], device: torch.device
) -> dict[str, PriceCurve]:
    """Return the price of launching a bucket, for each (kind, group name, group size) that can be
    bucketed, by its curve's name.

    No node of the captured graph has that price: a functional all-reduce clones its input first, a
    bucket's is in place.
    """
    curves = {}
    for kind, group, size in groups:
        if kind in BUCKET_KINDS:
            price_ticks = us_to_ticks(launch_us(cost_model, kind, group, size, device))
            curves[launch_curve_name(kind, group)] = PriceCurve(
                size_bytes=(0, 1), price_ticks=(price_ticks, price_ticks)
            )
    return curves


def coalesced_curves(
    cost_model: CostModel, groups: Iterable[tuple[CollectiveKind, str, int]]
) -> dict[str, PriceCurve]:
    """Return the price of a member of a coalesced launch, by the curve's name, for each (kind,
    group name, group size) that has one.

    Not of all-reduces: the functional one clones its inputs, which is the copy that a launch
    without a buffer would save.
    """
    curves = {}
    for kind, group, size in groups:
        member_us = (
            coalesced_member_us(cost_model, kind, group, size) if kind in COALESCED_KINDS else None
        )
        if member_us is not None:
            price_ticks = us_to_ticks(member_us)
            curves[coalesced_curve_name(kind, group)] = PriceCurve(
                size_bytes=(0, 1), price_ticks=(price_ticks, price_ticks)
            )
    return curves


def launch_us(
    cost_model: CostModel, kind: CollectiveKind, group: str, group_size: int, device: torch.device
) -> float:
    """Return the price in ``cost_model`` of the launch that write-back would emit for a small
    bucket, in microseconds on the compute stream.
    """
    c10d = torch.ops._c10d_functional
    graph = torch.fx.Graph()
    with FakeTensorMode():
        one, all_of_them = torch.empty(1, device=device), torch.empty(group_size, device=device)

    def holding(name: str, value: torch.Tensor) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    def launch(
        target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: torch.Tensor
    ) -> float:
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return cost_model.compute_us(node)

    if kind == CollectiveKind.ALL_GATHER:
        buffer = holding("buffer", all_of_them)
        return launch(
            c10d.all_gather_into_tensor_out.default,
            (holding("own", one), group_size, group),
            {"out": buffer},
            all_of_them,
        )
    if kind == CollectiveKind.REDUCE_SCATTER:
        return launch(
            c10d.reduce_scatter_tensor.default,
            (holding("payload", all_of_them), "sum", group_size, group),
            {},
            one,
        )
    return launch(c10d.all_reduce_.default, (holding("buffer", one), "sum", group), {}, one)
