"""Process groups of the ranks of one node: made once in the life of a job, by all of their process
ranks.
"""

import torch.distributed as dist

from apsched.fx.node_shards import NodeGroup
from apsched.torch_compat.graphs import process_group_names

_RUNNING: dict[tuple[int, ...], str] = {}
"""Process ranks -> name of their group."""


def running_node_group(node: NodeGroup) -> str:
    """Return the name by which the group of ``node`` runs, which is made at the first call; that of
    ``node`` where no process group runs.

    All process ranks of a node rewrite the same graphs in the same order, so each of them makes it,
    and before the first gather on it.
    """
    if not dist.is_available() or not dist.is_initialized():
        return node.name
    if _RUNNING.get(node.ranks) not in process_group_names():
        made = dist.new_group(
            list(node.ranks), use_local_synchronization=True, group_desc="ranks of one node"
        )
        _RUNNING[node.ranks] = str(made.group_name)
    return _RUNNING[node.ranks]
