"""Second process groups that run: made once in the life of a process, by all of their process
ranks, in the order of the graph.
"""

from collections.abc import Mapping

import torch.distributed as dist

from apsched.names import RUNNING, first_name
from apsched.problem.problem import Problem
from apsched.problem.second_group import second_groups
from apsched.torch_compat.graphs import group_of_name, process_group_names


def running_second_groups(problem: Problem) -> Mapping[str, str]:
    """Return for each second group of ``problem`` the name that it runs by; its own where no such
    group runs here, or only a fake one.

    All process ranks of a group rewrite the same graphs in the same order, so each group is made by
    all of them, and before the first launch on it.
    """
    return {name: _running(name) for name in second_groups(problem)}


def _running(name: str) -> str:
    first = first_name(name)
    for running, doubled in RUNNING.items():
        if doubled == first:
            return running
    ranks = (
        process_group_names().get(first) if dist.is_available() and dist.is_initialized() else None
    )
    if ranks is None or dist.get_backend(group_of_name(first)) == "fake":
        return name
    made = dist.new_group(
        list(ranks), use_local_synchronization=True, group_desc=f"gathers beside {first}"
    )
    RUNNING[made.group_name] = first
    return str(made.group_name)
