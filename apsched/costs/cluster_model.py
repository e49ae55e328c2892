"""The cost model of a named cluster: a roofline for compute; a measured table, else the topology,
for collectives.
"""

from collections.abc import Mapping, Sequence

import torch

from apsched.costs.clusters.cluster import Cluster
from apsched.costs.compute.roofline import Roofline
from apsched.costs.network.alpha_beta import GroupShape, collective_us, group_shape
from apsched.costs.network.table import CollectiveTable


class ClusterCostModel:
    """Follows :class:`apsched.costs.model.CostModel`.

    ``group_ranks`` maps a group's name to its process ranks, numbered node by node. A group that it
    lacks, or has with other numbers of ranks than the graph says, is priced by the size that the
    graph says, as contiguous ranks. Where ``table`` has the
    kind on a group of that shape it prices the collective; elsewhere the cluster's formula does,
    and :meth:`unpriced` lists it.
    """

    def __init__(
        self,
        cluster: Cluster,
        group_ranks: Mapping[str, Sequence[int]] | None = None,
        table: CollectiveTable | None = None,
        *,
        allow_tf32: bool = False,
        fused: bool = True,
    ) -> None:
        self.cluster = cluster
        self._table = table
        self._roofline = Roofline(cluster=cluster, allow_tf32=allow_tf32, fused=fused)
        self._shapes = {
            name: group_shape(cluster, ranks)
            for name, ranks in (group_ranks or {}).items()
            if ranks
        }
        self._unpriced: set[tuple[str, GroupShape]] = set()

    def compute_us(self, node: torch.fx.Node) -> float:
        """Return the time of ``node`` on the compute stream; of a start node, the price of its
        launch.
        """
        return self._roofline.compute_us(node)

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        """Return the time of a collective; ``size_bytes`` is counted once (see the protocol)."""
        shape = self._shape(group_name, group_size)
        if self._table is not None:
            if self._table.covers(kind, shape):
                return self._table.collective_us(kind, shape, size_bytes)
            self._unpriced.add((kind, shape))
        return collective_us(self.cluster, kind, shape, size_bytes)

    def coalesced_member_us(self, kind: str, group_name: str, group_size: int) -> float | None:
        """Return the price of each member of a coalesced launch; ``None`` if the cluster does not
        state it.
        """
        return self.cluster.coalesced_member_us

    def cut_us(self, graph: torch.fx.Graph) -> dict[torch.fx.Node, dict[torch.fx.Node, float]]:
        """Return the times of the nodes of a kernel that is cut, by the node before the cut (see
        the protocol).
        """
        return self._roofline.cut_us(graph)

    def cost_source(self, node: torch.fx.Node) -> str:
        """Return ``free`` for a node that takes no time, else ``formula``: where :meth:`compute_us`
        comes from.
        """
        return "formula" if self._roofline.takes_time(node) else "free"

    def collective_source(self, kind: str, group_name: str, group_size: int) -> str:
        """Return ``table`` or ``formula``: where :meth:`collective_us` comes from."""
        covered = self._table is not None and self._table.covers(
            kind, self._shape(group_name, group_size)
        )
        return "table" if covered else "formula"

    def measured_bytes(self, kind: str, group_name: str, group_size: int) -> tuple[int, ...]:
        """Return the sizes that the table has for such collectives."""
        if self._table is None:
            return ()
        return self._table.measured_bytes(kind, self._shape(group_name, group_size))

    def unpriced(self) -> tuple[str, ...]:
        """Return the requested prices that the table does not have, one line each; empty without a
        table.
        """
        lines = (
            f"{kind} on {shape.num_ranks} ranks of {shape.num_nodes} nodes"
            for kind, shape in self._unpriced
        )
        return tuple(sorted(lines))

    def _shape(self, group_name: str, group_size: int) -> GroupShape:
        shape = self._shapes.get(group_name)
        if shape is not None and shape.num_ranks == group_size:
            return shape
        return group_shape(self.cluster, group_size)
