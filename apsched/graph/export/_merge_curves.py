"""Price curves that travel with a graph: copies of any size, and each kind of collective on each group."""

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from apsched.costs.model import CostModel, coalesced_member_us
from apsched.graph.curve_names import asked_kind, coalesced_curve_name, collective_curve_name, launch_curve_name
from apsched.price_curve import PriceCurve, sample_curve
from apsched.units import us_to_ticks


def copy_curve(cost_model: CostModel, device: torch.device) -> PriceCurve:
    """Return the price of copying so many bytes on ``device``: what ``cost_model`` says of a clone of as many uint8."""
    graph = torch.fx.Graph()
    source = graph.placeholder("copied")
    node = graph.call_function(torch.ops.aten.clone.default, (source,))

    def price_us(size_bytes: int) -> float:
        source.meta["val"] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        node.meta["val"] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return cost_model.compute_us(node)

    with FakeTensorMode():
        return sample_curve(price_us)


def collective_curves(cost_model: CostModel, groups: Iterable[tuple[str, str, int]]) -> dict[str, PriceCurve]:
    """Return a curve for each (kind, group name, group size), by its name."""
    return {collective_curve_name(kind, group): _collective_curve(cost_model, kind, group, size) for kind, group, size in groups}


def _collective_curve(cost_model: CostModel, kind: str, group: str, group_size: int) -> PriceCurve:
    return sample_curve(lambda size_bytes: cost_model.collective_us(asked_kind(kind), group, group_size, size_bytes))


def launch_curves(cost_model: CostModel, groups: Iterable[tuple[str, str, int]], device: torch.device) -> dict[str, PriceCurve]:
    """Return the price of launching a bucket, for each (kind, group name, group size) that can be bucketed, by its curve's name.

    No node of the captured graph has that price: a functional all-reduce clones its input first, a bucket's is in place.
    """
    curves = {}
    for kind, group, size in groups:
        if kind in _BUCKET_LAUNCHES:
            price_ticks = us_to_ticks(_launch_us(cost_model, kind, group, size, device))
            curves[launch_curve_name(kind, group)] = PriceCurve(size_bytes=(0, 1), price_ticks=(price_ticks, price_ticks))
    return curves


def coalesced_curves(cost_model: CostModel, groups: Iterable[tuple[str, str, int]]) -> dict[str, PriceCurve]:
    """Return what a member adds to a coalesced launch, by the curve's name, for each (kind, group name, group size) that has a price.

    Not of all-reduces: the functional one clones its inputs, which is the copy that a launch without a buffer would save.
    """
    curves = {}
    for kind, group, size in groups:
        member_us = coalesced_member_us(cost_model, kind, group, size) if kind in _COALESCED else None
        if member_us is not None:
            price_ticks = us_to_ticks(member_us)
            curves[coalesced_curve_name(kind, group)] = PriceCurve(size_bytes=(0, 1), price_ticks=(price_ticks, price_ticks))
    return curves


_COALESCED = ("all_gather", "reduce_scatter")
_BUCKET_LAUNCHES = ("all_gather", "reduce_scatter", "all_reduce")


def _launch_us(cost_model: CostModel, kind: str, group: str, group_size: int, device: torch.device) -> float:
    """Return what ``cost_model`` says of the launch that write-back would emit for a small bucket."""
    c10d = torch.ops._c10d_functional
    graph = torch.fx.Graph()
    with FakeTensorMode():
        one, all_of_them = torch.empty(1, device=device), torch.empty(group_size, device=device)

    def holding(name: str, value: torch.Tensor) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    def launch(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: torch.Tensor) -> float:
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return cost_model.compute_us(node)

    if kind == "all_gather":
        buffer = holding("buffer", all_of_them)
        return launch(c10d.all_gather_into_tensor_out.default, (holding("own", one), group_size, group), {"out": buffer}, all_of_them)
    if kind == "reduce_scatter":
        return launch(c10d.reduce_scatter_tensor.default, (holding("payload", all_of_them), "sum", group_size, group), {}, one)
    return launch(c10d.all_reduce_.default, (holding("buffer", one), "sum", group), {}, one)
