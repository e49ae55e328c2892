"""Prices from a function of torch's kind: ``custom_runtime_estimation(node, override_size) ->
milliseconds | None``.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from math import log
from typing import Any

import torch

from apsched.costs.model import CostModel, coalesced_member_us
from apsched.fx.collectives import describe, group_sizes, is_collective

Estimation = Callable[..., float | None]


class EstimatedCosts:
    """A :class:`apsched.costs.model.CostModel` that gives the estimate of the function for a node,
    and that of ``formulas`` if the function has none.

    The function cannot estimate a bucket, which is no node, and callers differ in the unit of
    ``override_size`` (bytes sent and received in torch, GiB in AutoParallel). So a collective of
    size S costs formula(S) times the factor by which the function differs from the formula on the
    collectives of its kind and group that the graph has, interpolated in log S, constant outside.
    The formulas give the price of a launch.
    """

    def __init__(
        self,
        estimation: Estimation,
        formulas: CostModel,
        graph: torch.fx.Graph,
        group_ranks: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._estimation, self._formulas = estimation, formulas
        starts = [node for node in graph.nodes if is_collective(node)]
        sizes = group_sizes(starts, group_ranks)
        factors: dict[tuple[str, str], dict[int, float]] = {}
        for node in starts:
            call, estimate_us = describe(node, sizes), self._estimate_us(node)
            formula = formulas.collective_us(
                call.kind, call.group, call.group_size, call.size_bytes
            )
            if estimate_us is not None and formula > 0:
                factors.setdefault((call.kind, call.group), {}).setdefault(
                    call.size_bytes, estimate_us / formula
                )
        self._factors = {key: sorted(points.items()) for key, points in factors.items()}

    def compute_us(self, node: torch.fx.Node) -> float:
        """Return the time of ``node`` on the compute stream; of a start node, the price of its
        launch.
        """
        estimate_us = None if is_collective(node) else self._estimate_us(node)
        return self._formulas.compute_us(node) if estimate_us is None else estimate_us

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        """Return the time of a collective of any size."""
        formula = self._formulas.collective_us(kind, group_name, group_size, size_bytes)
        return formula * _interpolated(self._factors.get((kind, group_name), []), size_bytes)

    def coalesced_member_us(self, kind: str, group_name: str, group_size: int) -> float | None:
        """Return the price of each member of a coalesced launch."""
        return coalesced_member_us(self._formulas, kind, group_name, group_size)

    def _estimate_us(self, node: torch.fx.Node) -> float | None:
        """Return the estimate of the function, in microseconds."""
        found: Any = self._estimation(node, None)
        return None if found is None else float(found) * 1000.0


def _interpolated(points: list[tuple[int, float]], size_bytes: int) -> float:
    if not points:
        return 1.0
    k = bisect_left(points, (size_bytes,))
    if k == 0 or k == len(points):
        return points[min(k, len(points) - 1)][1]
    (low, a), (high, b) = points[k - 1], points[k]
    share = (log(size_bytes) - log(low)) / (log(high) - log(low)) if low > 0 else 1.0
    return a + share * (b - a)
