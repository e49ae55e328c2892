"""The protocol that every source of durations follows (design: costs).

A model may also price coalesced launches, one launch of n transfers of S bytes in all, by a third
method: ``coalesced_member_us(kind, group_name, group_size) -> float | None``, the time that each
member adds on the group's stream, so that

    t = collective_us(kind, group_name, group_size, S) + n * coalesced_member_us(kind, group_name,
    group_size)

NCCL launches the calls between ncclGroupStart and ncclGroupEnd as one kernel, and chooses algorithm
and protocol for operations within a factor of four in size by the sum of their bytes
(src/enqueue.cc, ncclPrepareTasks); one term for each of them remains. Where the method is missing,
or returns ``None``, buckets are flat.

A model that knows kernels of several nodes may price cuts of them, by a fourth method:
``cut_us(graph)`` returns for each node before which a kernel may be cut the times of the nodes of
that kernel after the cut, in microseconds. In a graph that a schedule cut, such nodes carry a mark
(``apsched.costs.compute.fusion.PIECE``), and ``compute_us`` returns the same. Where the method is
missing, kernels stay whole.

A model of measured times may state the sizes at which it has one, by a fifth method:
``measured_bytes(kind, group_name, group_size) -> Sequence[int]``. Prices travel as curves
(``apsched.costs.price_curve``), which are exact at these sizes.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class CostModel(Protocol):
    """Durations of compute nodes and of collectives of any size.

    ``compute_us`` of a *start node* is the price of its launch: the time that launching takes on
    the compute stream.
    """

    def compute_us(self, node: torch.fx.Node) -> float:
        """Return the time of ``node`` on the compute stream, in microseconds."""
        ...

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        """Return the time of a collective on its group's stream, in microseconds.

        ``kind`` is ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        ``size_bytes`` is counted once, as NCCL does: an all-gather by its output, a reduce-scatter
        by its input, the others by their size.
        """
        ...


def coalesced_member_us(
    cost_model: CostModel, kind: str, group_name: str, group_size: int
) -> float | None:
    """Return the price of each member of a coalesced launch, in microseconds; ``None`` if
    ``cost_model`` has none.
    """
    price = getattr(cost_model, "coalesced_member_us", None)
    return price(kind, group_name, group_size) if callable(price) else None


def measured_bytes(
    cost_model: CostModel, kind: str, group_name: str, group_size: int
) -> tuple[int, ...]:
    """Return the sizes for which ``cost_model`` has a measured time of that collective, in bytes;
    none if it does not state them.
    """
    sizes = getattr(cost_model, "measured_bytes", None)
    return tuple(sizes(kind, group_name, group_size)) if callable(sizes) else ()


def cut_us(
    cost_model: CostModel, graph: torch.fx.Graph
) -> Mapping[torch.fx.Node, Mapping[torch.fx.Node, float]]:
    """Return the times of the nodes of a kernel that is cut, by the node before the cut; none if
    ``cost_model`` has no price for it.
    """
    price = getattr(cost_model, "cut_us", None)
    return price(graph) if callable(price) else {}
