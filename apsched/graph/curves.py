"""Price curves that travel with a graph: copies of any size, and each kind of collective on each group."""

from collections.abc import Iterable

import torch
from torch._subclasses import FakeTensorMode

from apsched.costs.model import CostModel
from apsched.price_curve import PriceCurve, sample_curve

COPY = "copy"


def collective_curve_name(kind: str, group: str) -> str:
    """Return the name of the curve of ``kind`` on ``group``."""
    return f"{kind}:{group}"


def asked_kind(kind: str) -> str:
    """Return the kind that a cost model is asked for: a broadcast is priced as an all-gather, since each link carries as much."""
    return "all_gather" if kind == "broadcast" else kind


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
