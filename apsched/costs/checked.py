"""Guards a cost model that a user hands in: a price that is no number is an error which names the
node.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from apsched.costs.model import CostModel, coalesced_member_us, cut_us, measured_bytes
from apsched.errors import InputError
from apsched.names import first_name


@dataclass(frozen=True, slots=True)
class _CheckedCostModel:
    cost_model: CostModel

    def compute_us(self, node: torch.fx.Node) -> float:
        """Return the price of the node, checked."""
        return _checked_us(
            self.cost_model.compute_us(node), f"compute_us of node {node.name!r} ({node.target})"
        )

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        """Return the price of the collective, checked."""
        what = (
            f"collective_us of {kind} of {size_bytes} bytes on group {group_name!r} ({group_size}"
            " ranks)"
        )
        return _checked_us(
            self.cost_model.collective_us(kind, first_name(group_name), group_size, size_bytes),
            what,
        )

    def coalesced_member_us(self, kind: str, group_name: str, group_size: int) -> float | None:
        """Return the price of each member of a coalesced launch, checked; ``None`` if there is no
        price.
        """
        price_us = coalesced_member_us(self.cost_model, kind, first_name(group_name), group_size)
        what = f"coalesced_member_us of {kind} on group {group_name!r} ({group_size} ranks)"
        return None if price_us is None else _checked_us(price_us, what)

    def measured_bytes(self, kind: str, group_name: str, group_size: int) -> tuple[int, ...]:
        """Return the sizes that were measured; none if the user's model does not state them."""
        return measured_bytes(self.cost_model, kind, first_name(group_name), group_size)

    def cut_us(
        self, graph: torch.fx.Graph
    ) -> Mapping[torch.fx.Node, Mapping[torch.fx.Node, float]]:
        """Return the times of the nodes of a kernel that is cut, checked."""
        return {
            first: {
                node: _checked_us(price, f"cut_us before {first.name!r}, node {node.name!r}")
                for node, price in times.items()
            }
            for first, times in cut_us(self.cost_model, graph).items()
        }

    def cost_source(self, node: torch.fx.Node) -> str:
        """Return the source of the node's price; ``model`` if the user's model does not state
        it.
        """
        source = getattr(self.cost_model, "cost_source", None)
        return str(source(node)) if callable(source) else "model"

    def collective_source(self, kind: str, group_name: str, group_size: int) -> str:
        """Return the source of a collective's price; ``model`` if the user's model does not state
        it.
        """
        source = getattr(self.cost_model, "collective_source", None)
        return (
            str(source(kind, first_name(group_name), group_size)) if callable(source) else "model"
        )


def checked(cost_model: CostModel) -> CostModel:
    """Return ``cost_model`` behind a check of each price: a finite number of microseconds, 0 or
    more.

    Raises ``InputError`` at once when it lacks a method of the protocol, and later when a price is
    impossible.
    """
    if not isinstance(cost_model, CostModel):
        raise InputError(
            "a cost model needs the methods compute_us(node) and collective_us(kind, group_name,"
            f" group_size, size_bytes); found {type(cost_model).__name__}"
        )
    return _CheckedCostModel(cost_model)


def _checked_us(price: object, what: str) -> float:
    if (
        isinstance(price, bool)
        or not hasattr(price, "__float__")
        or not math.isfinite(float(price))
        or float(price) < 0
    ):
        raise InputError(
            f"the cost model must return a finite number of microseconds, 0 or more; {what}"
            f" returned {price!r}"
        )
    return float(price)
