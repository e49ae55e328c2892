"""Which wait belongs to which start, by storage, as torch's registry of pending work has it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apsched.errors import InputError
from apsched.fx.collectives import is_collective, is_wait_tensor
from apsched.graph.export.storages import NodeStorages


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Pairs of ranks."""

    wait_of_start: dict[int, int]
    """The first wait on any output of a start."""
    later_waits: dict[int, int]
    """Wait for work that an earlier wait has waited for already -> that wait, or -1 where the work
    is not of this graph.
    """


def match_waits(nodes: Sequence[torch.fx.Node], storages: Sequence[NodeStorages]) -> Waits:
    """Return the waits of all starts; InputError for a start that nobody waits for, or a wait for
    several starts.
    """
    pending: dict[int, int] = {}  # storage -> start
    waited: dict[int, int] = {}  # storage -> wait
    wait_of_start: dict[int, int] = {}
    later_waits: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        used = storages[rank]
        if is_collective(node):
            for s in (*used.allocates, *(used.writes or used.aliases)):
                if s in pending and pending[s] not in wait_of_start:
                    _refuse(
                        node,
                        f"its result goes where the collective {nodes[pending[s]].name} is still"
                        " writing",
                    )
                pending[s] = rank
        elif is_wait_tensor(node):
            starts = {pending.pop(s) for s in used.aliases if s in pending}
            new = sorted(starts - wait_of_start.keys())
            if len(new) > 1:
                _refuse(
                    node,
                    "it waits for several collectives"
                    f" ({', '.join(nodes[start].name for start in new)}), expected one",
                )
            if new:
                wait_of_start[new[0]] = rank
                waited.update(dict.fromkeys((*storages[new[0]].allocates, *used.aliases), rank))
            else:
                later_waits[rank] = max(
                    (wait_of_start[s] for s in starts),
                    default=waited.get(used.aliases[0], -1) if used.aliases else -1,
                )
    for start in pending.values():
        if start not in wait_of_start:
            _refuse(
                nodes[start],
                "no wait_tensor waits for it; wait inside of the graph, so that its end can be"
                " scheduled",
            )
    return Waits(wait_of_start=wait_of_start, later_waits=later_waits)


def _refuse(node: torch.fx.Node, reason: str) -> None:
    raise InputError(f"node {node.name}: {reason}")
