"""What each node costs on the compute stream, and who says so."""

import torch
from torch.utils import _pytree as pytree

from apsched.collectives import CollectiveCall, tensor_bytes, tensors_of
from apsched.costs.model import CostModel
from apsched.graph.aliasing import call_effects
from apsched.graph.curves import asked_kind
from apsched.graph.dag import NodeKind
from apsched.price_curve import PriceCurve
from apsched.units import ticks_to_us

_COPIES = ("copy_in", "copy_out")
_FREE_ROLES = ("buffer", "view", "wait")


class NodePrices:
    """Prices nodes; those that write-back added follow the curve by which the solver priced them, so that both agree to the tick."""

    def __init__(self, cost_model: CostModel, copy_price: PriceCurve) -> None:
        self._cost_model = cost_model
        self._copy_price = copy_price

    def price(self, node: torch.fx.Node, kind: NodeKind, blocking: CollectiveCall | None) -> tuple[float, str]:
        """Return duration in microseconds and its source; a collective that blocks takes its own time too."""
        role = node.meta.get("apsched", {}).get("role", "")
        if kind not in (NodeKind.COMPUTE, NodeKind.START) or role in _FREE_ROLES:
            return 0.0, "free"
        if role in _COPIES:
            return ticks_to_us(self._copy_price(written_bytes(node))), "copy"
        duration_us = self._cost_model.compute_us(node)
        if blocking is not None:
            duration_us += self._cost_model.collective_us(
                asked_kind(blocking.kind), blocking.group, blocking.group_size, blocking.size_bytes
            )
        return duration_us, self._source(node)

    def _source(self, node: torch.fx.Node) -> str:
        source = getattr(self._cost_model, "cost_source", None)
        return str(source(node)) if callable(source) else "model"


def written_bytes(node: torch.fx.Node) -> int:
    """Return the bytes that ``node`` writes: those of the tensors it mutates, or else of its results."""
    mutated = [n for n in pytree.tree_leaves(call_effects(node).writes) if isinstance(n, torch.fx.Node)]
    return sum(tensor_bytes(t, node) for written in mutated or (node,) for t in tensors_of(written))
