"""Process groups of the ranks of one node: made once in the life of a process, by all of their
process ranks.
"""

import torch.distributed as dist

from apsched.fx.node_shards import NodeGroup
from apsched.names import base_of_node_group
from apsched.torch_compat.graphs import resolved_group

_RUNNING: dict[tuple[int, ...], str] = {}
"""Process ranks -> name of their group."""


def running_node_group(node: NodeGroup) -> str:
    """Return the name by which the group of ``node`` runs, which is made at the first call; that of
    ``node`` where no process group runs, or only a fake one.

    All process ranks of a node rewrite the same graphs in the same order, so each of them makes it,
    and before the first gather on it.
    """
    around = base_of_node_group(node.name)
    if around is None or not dist.is_available() or not dist.is_initialized():
        return node.name
    if dist.get_backend(resolved_group(around)) == "fake":
        return node.name
    if node.ranks not in _RUNNING:
        made = dist.new_group(
            list(node.ranks),
            use_local_synchronization=True,
            group_desc=f"ranks of {around} on one node",
        )
        _RUNNING[node.ranks] = str(made.group_name)
    return _RUNNING[node.ranks]
