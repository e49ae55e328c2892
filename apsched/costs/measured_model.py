"""The cost model of measured costs: measured times first, the formulas of a cluster for the
rest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import Cluster, cluster_of_file, load_cluster
from apsched.costs.compute.node_operation import node_operation
from apsched.costs.measured import MeasuredCosts, Price
from apsched.costs.measured_file import load_costs
from apsched.costs.network.alpha_beta import GroupShape, group_shape
from apsched.fx.collectives import collective_kind
from apsched.fx.operands import touched_bytes, value_of
from apsched.torch_compat.graphs import process_group_names


class MeasuredCostModel:
    """Follows :class:`apsched.costs.model.CostModel`.

    ``fallback`` prices the nodes and collectives that ``costs`` lack. Where it has a table of
    collectives, it prices those even before ``costs``: a table of the user has priority.
    """

    def __init__(
        self,
        costs: MeasuredCosts,
        fallback: ClusterCostModel,
        group_ranks: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.costs = costs
        self._table = costs.table
        self._fallback = fallback
        self._shapes = {
            name: group_shape(fallback.cluster, ranks)
            for name, ranks in (group_ranks or {}).items()
            if ranks
        }

    @property
    def cluster(self) -> Cluster:
        """The cluster whose formulas price the rest."""
        return self._fallback.cluster

    @property
    def profiled_sizes(self) -> Mapping[str, int]:
        """Symbol -> size, of sizes that depend on data, as the profile of the costs has them."""
        return self.costs.sizes

    def compute_us(self, node: torch.fx.Node) -> float:
        """Return the time of ``node`` on the compute stream; of a start node, the price of its
        launch.
        """
        price = self._price(node)
        return self._fallback.compute_us(node) if price is None else price.time_us

    def cost_source(self, node: torch.fx.Node) -> str:
        """Return ``profile`` or ``measured`` if the price of ``node`` was measured, else the source
        of the formulas.
        """
        price = self._price(node)
        return self._fallback.cost_source(node) if price is None else price.source

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        """Return the time of a collective; ``size_bytes`` is counted once (see the protocol)."""
        shape = self._measured_shape(kind, group_name, group_size)
        if shape is None:
            return self._fallback.collective_us(kind, group_name, group_size, size_bytes)
        return self._table.collective_us(kind, shape, size_bytes)

    def collective_source(self, kind: str, group_name: str, group_size: int) -> str:
        """Return the source of :meth:`collective_us`."""
        shape = self._measured_shape(kind, group_name, group_size)
        found = (
            None
            if shape is None
            else self.costs.transfer_source(kind, shape.num_ranks, shape.num_nodes)
        )
        return found or self._fallback.collective_source(kind, group_name, group_size)

    def measured_bytes(self, kind: str, group_name: str, group_size: int) -> tuple[int, ...]:
        """Return the sizes of such collectives that were measured."""
        shape = self._measured_shape(kind, group_name, group_size)
        if shape is None:
            return self._fallback.measured_bytes(kind, group_name, group_size)
        return self._table.measured_bytes(kind, shape)

    def coalesced_member_us(self, kind: str, group_name: str, group_size: int) -> float | None:
        """Return the price of each member of a coalesced launch, from the cluster."""
        return self._fallback.coalesced_member_us(kind, group_name, group_size)

    def cut_us(self, graph: torch.fx.Graph) -> dict[torch.fx.Node, dict[torch.fx.Node, float]]:
        """Return the times of the nodes of a kernel that is cut, by formula; none for kernels in
        which a node was measured.
        """
        found = self._fallback.cut_us(graph)
        return {
            first: times
            for first, times in found.items()
            if all(self._price(node) is None for node in times)
        }

    def unpriced(self) -> tuple[str, ...]:
        """Return the requested prices that a table does not have, one line each."""
        return self._fallback.unpriced()

    def _price(self, node: torch.fx.Node) -> Price | None:
        """Return the measured price of ``node``: of its operation, of any launch of its kind, or of
        a copy of its size.
        """
        if node.op != "call_function":
            return None
        found = self.costs.compute.get(operation := node_operation(node))
        if found is not None:
            return found
        if (kind := collective_kind(node)) is not None and kind in self.costs.launch_us:
            return Price(time_us=self.costs.launch_us[kind], source=self.costs.launch_source(kind))
        if operation.startswith("aten::clone(") and "{" not in operation:
            copy_us = self.costs.copy_us(touched_bytes(value_of(node.args[0])))
            return None if copy_us is None else Price(time_us=copy_us, source="measured")
        return None

    def _measured_shape(self, kind: str, group_name: str, group_size: int) -> GroupShape | None:
        """Return the shape of the group if transfers of that kind on it were measured and no table
        has priority.
        """
        if self._fallback.collective_source(kind, group_name, group_size) == "table":
            return None
        shape = self._shapes.get(group_name)
        if shape is None or shape.num_ranks != group_size:
            shape = group_shape(self.cluster, group_size)
        return shape if self.costs.transfer_source(kind, shape.num_ranks, shape.num_nodes) else None


def load_cost_model(
    path: str | Path,
    group_ranks: Mapping[str, Sequence[int]] | None = None,
    *,
    cluster: str | None = None,
) -> MeasuredCostModel:
    """Return the cost model of the measured costs in ``path``, for ``apsched.optimize`` and
    ``apsched.export_graph``.

    ``group_ranks`` are by default those of the process groups that run here, and ``cluster`` the
    one that the file names.
    """
    costs = load_costs(path)
    if group_ranks is None:
        group_ranks = process_group_names() if dist.is_available() and dist.is_initialized() else {}
    prices = load_cluster(cluster) if cluster else cluster_of_file(costs.cluster, str(path))
    return MeasuredCostModel(costs, ClusterCostModel(prices, group_ranks), group_ranks)
