"""What each node costs on the compute stream, and who says so."""

import torch
from torch.utils import _pytree as pytree

from apsched.collectives import CollectiveCall, is_blocking_collective, tensor_bytes, tensors_of
from apsched.costs.model import CostModel
from apsched.graph.aliasing import call_effects
from apsched.graph.curve_names import COPY, asked_kind, launch_curve_name
from apsched.graph.dag import NodeKind
from apsched.price_curve import PriceCurve
from apsched.units import ticks_to_us

_COPIES = ("copy_in", "copy_out")
_FREE_ROLES = ("buffer", "view", "wait")


class NodePrices:
    """Prices nodes; those that write-back added follow the curve by which the solver priced them, so that both agree to the tick."""

    def __init__(self, cost_model: CostModel, curves: dict[str, PriceCurve]) -> None:
        self._cost_model = cost_model
        self._curves = curves

    def price(self, node: torch.fx.Node, kind: NodeKind, call: CollectiveCall | None) -> tuple[float, str]:
        """Return duration in microseconds and its source; a collective (``call``) that blocks takes its own time too."""
        role = node.meta.get("apsched", {}).get("role", "")
        if kind not in (NodeKind.COMPUTE, NodeKind.START) or role in _FREE_ROLES:
            return 0.0, "free"
        if role in _COPIES:
            return ticks_to_us(self._curves[COPY](copied_bytes(node))), "copy"
        if role == "start" and call is not None:
            return ticks_to_us(self._curves[launch_curve_name(call.kind, call.group)](0)), self._source(node)
        duration_us = self._cost_model.compute_us(node)
        if call is not None and is_blocking_collective(node):
            duration_us += self._cost_model.collective_us(asked_kind(call.kind), call.group, call.group_size, call.size_bytes)
        return duration_us, self._source(node)

    def transfer_source(self, call: CollectiveCall) -> str:
        """Return where the duration of a collective on its group's stream comes from."""
        source = getattr(self._cost_model, "collective_source", None)
        return str(source(asked_kind(call.kind), call.group, call.group_size)) if callable(source) else "model"

    def _source(self, node: torch.fx.Node) -> str:
        source = getattr(self._cost_model, "cost_source", None)
        return str(source(node)) if callable(source) else "model"


def copied_bytes(node: torch.fx.Node) -> int:
    """Return what a copy is priced by: of each tensor that it reads half of the bytes read and written, rounded up; it may cast."""
    written = {n for n in pytree.tree_leaves(call_effects(node).writes) if isinstance(n, torch.fx.Node)}
    itemsize = next(t for target in (*written, node) for t in tensors_of(target)).itemsize
    given = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, torch.fx.Node)]
    read = [t for source in given if source not in written for t in tensors_of(source)]
    return sum((tensor_bytes(t, node) // t.itemsize * (t.itemsize + itemsize) + 1) // 2 for t in read)
