"""The protocol that every source of durations follows (design: costs)."""

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class CostModel(Protocol):
    """Durations of compute nodes and of collectives of any size.

    ``compute_us`` of a *start node* is the price of its launch: the time that launching takes on the compute stream.
    """

    def compute_us(self, node: torch.fx.Node) -> float:
        """Return the time of ``node`` on the compute stream, in microseconds."""
        ...

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        """Return the time of a collective on its group's stream, in microseconds.

        ``kind`` is ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``. ``size_bytes`` is counted once,
        as NCCL does: an all-gather by its output, a reduce-scatter by its input, the others by their size.
        """
        ...
