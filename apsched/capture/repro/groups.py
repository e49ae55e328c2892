"""The process groups that a graph knows only by name: their sizes, and stand-ins where a shape
depends on one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from apsched.capture.fake_world import world
from apsched.capture.repro.source import ReproSource
from apsched.errors import InputError
from apsched.fx.collectives import STATE_GROUP_RANKS, argument, group_argument
from apsched.torch_compat.graphs import registered_groups

_SIZES_IN_ARGUMENTS = ("_c10d_functional", "_c10d_functional_autograd", "bucketing")
"""Libraries whose operators get the size of the group as an argument, or do not need it for their
shapes.
"""


def group_sizes(
    graph: torch.fx.Graph,
    source: ReproSource,
    group_ranks: Mapping[str, tuple[int, ...]],
    where: Callable[[torch.fx.Node], str],
) -> dict[str, int]:
    """Return group name -> number of process ranks, of every group that the file sets up or a node
    names: from the arguments of a collective, else from the user, else from the file.

    Raises
    ------
    InputError
        If nothing says how large a group is, or two collectives disagree.
    """
    sizes: dict[str, int] = {}
    unknown: dict[str, torch.fx.Node] = {}
    for node in graph.nodes:
        name, size = group_argument(node), argument(node, "group_size", None)
        if not isinstance(name, str):
            continue
        if not isinstance(size, int):
            unknown.setdefault(name, node)
        elif sizes.setdefault(name, size) != size:
            raise InputError(
                f"{where(node)}: expected process group {name!r} to have {sizes[name]} process"
                f" ranks throughout, found {size} at node {node.name}; write the file again"
            )
    stated = {name: len(ranks) for name, ranks in group_ranks.items() if ranks}
    sizes = {**source.group_sizes, **stated, **sizes}
    for name, node in unknown.items():
        if name not in sizes:
            raise InputError(
                f"{where(node)}: expected the size of process group {name!r} of node {node.name},"
                f" found none in the file; {STATE_GROUP_RANKS}"
            )
    return dict(sorted(sizes.items()))


def needs_groups(graph: torch.fx.Graph) -> bool:
    """Return whether a shape depends on a group that must exist."""
    return any(
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace not in _SIZES_IN_ARGUMENTS
        and group_argument(node) is not None
        for node in graph.nodes
    )


@contextmanager
def fake_groups(sizes: Mapping[str, int]) -> Iterator[None]:
    """Run the body with fake process groups of these names and sizes; this process is rank 0 of
    each.
    """
    with world(max(sizes.values())), registered_groups(sizes):
        yield
