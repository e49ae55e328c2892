"""The kernels of a graph, found once for all that asks for them: export, prices, and cuts."""

from functools import cached_property

import torch

from apsched.costs.compute.fusion import (
    Fusion,
    Share,
    fuse,
    fused_kernels,
    fused_shares,
    shares_if_cut,
)
from apsched.torch_compat.sizes import changes_of_assumed_sizes

_FOUND = "_apsched_fused"


class FusedGraph:
    """The kernels of a graph as it is now, each fact found at its first use."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph

    @cached_property
    def kernels(self) -> list[list[torch.fx.Node]]:
        """As :func:`apsched.costs.compute.fusion.fused_kernels`."""
        return fused_kernels(self._graph, self._fusion)

    @cached_property
    def shares(self) -> dict[torch.fx.Node, Share]:
        """As :func:`apsched.costs.compute.fusion.fused_shares`."""
        return fused_shares(self._graph, self._fusion)

    @cached_property
    def shares_if_cut(self) -> dict[torch.fx.Node, dict[torch.fx.Node, Share | None]]:
        """As :func:`apsched.costs.compute.fusion.shares_if_cut`."""
        return shares_if_cut(self._graph, self._fusion)

    @cached_property
    def _fusion(self) -> Fusion:
        return fuse(self._graph)


def fused_graph(graph: torch.fx.Graph, *, again: bool = False) -> FusedGraph:
    """Return the kernels of ``graph``, found once for as long as it has as many nodes, and sizes
    that depend on data are assumed to be the same; ``again``: found again in any case.

    They refer to its nodes, and these to the graph, so they are an attribute of the graph: both are
    freed together. A dictionary of graphs would keep each of them, also with weak keys.
    """
    state = len(graph.nodes), changes_of_assumed_sizes()
    known: tuple[tuple[int, int], FusedGraph] | None = getattr(graph, _FOUND, None)
    if again or known is None or known[0] != state:
        known = state, FusedGraph(graph)
        setattr(graph, _FOUND, known)
    return known[1]
