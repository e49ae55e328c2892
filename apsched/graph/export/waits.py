"""The start of each wait, by storage, as torch's registry of pending work has it.

A transfer is *scheduled* where its start is a known collective and one wait of this graph waits for
it and for nothing else before. Everything else stays where it is: communication that is not known,
starts whose wait is in the caller or nowhere, several that one wait is for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from apsched.fx.collectives import (
    CollectiveCall,
    is_collective,
    is_unknown_communication,
    is_wait_tensor,
)
from apsched.graph.export.storages import NodeStorages


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Ranks of starts and waits."""

    wait_of_start: dict[int, int]
    """Of scheduled transfers: the first wait on any output of a start."""
    later_waits: dict[int, int]
    """Wait for work that an earlier wait has waited for already -> that wait, or -1 where the work
    is not of this graph.
    """
    unscheduled: dict[int, tuple[int, ...]]
    """Start of a transfer that is not scheduled -> the waits for it; none where no wait of this
    graph is for it.
    """


def match_waits(nodes: Sequence[torch.fx.Node], storages: Sequence[NodeStorages]) -> Waits:
    """Return the waits of all starts."""
    pending: dict[int, list[int]] = {}  # storage -> starts
    waited: dict[int, int] = {}  # storage -> wait
    wait_of_start: dict[int, int] = {}
    later_waits: dict[int, int] = {}
    unscheduled: dict[int, list[int]] = {}
    left: dict[int, int] = {}  # storage -> start of the last transfer on it that is not scheduled
    for rank, node in enumerate(nodes):
        used = storages[rank]
        if is_collective(node) or is_unknown_communication(node.target):
            for s in (*used.allocates, *(used.writes or used.aliases)):
                pending.setdefault(s, []).append(rank)
        elif is_wait_tensor(node):
            starts = {start for s in used.aliases for start in pending.pop(s, ())}
            new = sorted(starts - wait_of_start.keys())
            if len(new) == 1 and is_collective(nodes[new[0]]) and new[0] not in unscheduled:
                wait_of_start[new[0]] = rank
                waited.update(dict.fromkeys((*storages[new[0]].allocates, *used.aliases), rank))
            elif new:
                for start in new:
                    unscheduled.setdefault(start, []).append(rank)
                    touched = storages[start]
                    left |= dict.fromkeys((*touched.allocates, *touched.writes), start)
            elif again := {left[s] for s in used.aliases if s in left}:
                for start in sorted(again):  # of another of its results
                    unscheduled[start].append(rank)
            else:
                later_waits[rank] = max(
                    (wait_of_start[s] for s in starts),
                    default=waited.get(used.aliases[0], -1) if used.aliases else -1,
                )
    for left_over in pending.values():
        for start in left_over:
            if start not in wait_of_start:
                unscheduled.setdefault(start, [])
    return Waits(
        wait_of_start=wait_of_start,
        later_waits=later_waits,
        unscheduled={start: tuple(waits) for start, waits in sorted(unscheduled.items())},
    )


def keep_unscheduled(
    waits: Waits, calls: Mapping[int, CollectiveCall], storages: Sequence[NodeStorages]
) -> None:
    """Let the storages of transfers that are not scheduled be read and written until their waits,
    or until the last node, which is the output.
    """
    for start, ends in waits.unscheduled.items():
        used = storages[start]
        holds_input = start not in calls or calls[start].holds_input
        touched = (*(used.reads if holds_input else ()), *used.allocates, *used.writes)
        for end in ends or (len(storages) - 1,):
            storages[end].reads = tuple(dict.fromkeys((*storages[end].reads, *touched)))
            if ends:
                storages[end].writes = tuple(
                    dict.fromkeys((*storages[end].writes, *storages[end].aliases))
                )


def wait_for_all_results(waits: Waits, storages: Sequence[NodeStorages]) -> None:
    """Let the first wait for a transfer of several results end it for all of them, and each later
    wait for it keep them: torch's work holds them, and is registered under each
    (torch/csrc/distributed/c10d/Functional.cpp).
    """
    start_of_wait = {wait: start for start, wait in waits.wait_of_start.items()}
    for wait, start in start_of_wait.items():
        used = storages[wait]
        others = [s for s in _results(storages[start]) if s not in used.aliases]
        used.reads = tuple(dict.fromkeys((*used.reads, *others)))
        used.writes = tuple(dict.fromkeys((*used.writes, *others)))
    for later, wait in waits.later_waits.items():
        if wait in start_of_wait:
            held = _results(storages[start_of_wait[wait]])
            storages[later].reads = tuple(dict.fromkeys((*storages[later].reads, *held)))


def _results(start: NodeStorages) -> tuple[int, ...]:
    return (*start.allocates, *start.writes)


def read_beside_waits(
    waits: Waits, nodes: Sequence[torch.fx.Node], storages: Sequence[NodeStorages]
) -> Iterator[int]:
    """Yield the storages of transfers whose results a node takes from the start, and not from the
    wait: they are there after the wait all the same.
    """
    used = dict(zip(nodes, storages, strict=True))
    for start in waits.wait_of_start:
        stack = [nodes[start]]
        while stack:
            for user in stack.pop().users:
                if is_wait_tensor(user) or user.op == "output":
                    continue
                if used[user].allocates or used[user].writes or not used[user].aliases:
                    yield from storages[start].allocates
                else:  # a view
                    stack.append(user)
