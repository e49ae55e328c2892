"""The nodes of a coalesced bucket: one launch of as many transfers as there are members, and a wait
for each.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from apsched.kinds import CollectiveKind
from apsched.writeback.emit import Emitter
from apsched.writeback.members import Member

_c10d = torch.ops._c10d_functional


def _start(member: Member) -> Node:
    return member.start


def _wait(member: Member) -> Node:
    return member.wait


class CoalescedBucket:
    """The steps start and wait, to be called in this order.

    ``values`` maps nodes of the old graph to nodes of the new one; results of members are entered
    under their waits. The work is registered under every result
    (torch/csrc/distributed/c10d/Functional.cpp): the first wait is for all of them, the others are
    free.
    """

    def __init__(
        self, emitter: Emitter, index: int, members: Sequence[Member], values: dict[Node, Node]
    ) -> None:
        self._emitter = emitter
        self._name = f"bucket_{index}"
        self._members = tuple(members)
        self._values = values
        self._started: Node

    def start(self) -> None:
        """Append the launch."""
        first = self._members[0]
        sent = [self._values[member.sent] for member in self._members]
        target: Any = _c10d.all_gather_into_tensor_coalesced.default
        args: tuple[Any, ...] = (sent, first.group_size, first.group)
        if first.kind == CollectiveKind.REDUCE_SCATTER:
            target, args = (
                _c10d.reduce_scatter_tensor_coalesced.default,
                (sent, first.reduce_op, first.group_size, first.group),
            )
        value = [member.start.meta["val"] for member in self._members]
        self._started = self._emitter.call(
            target,
            args,
            name=f"{self._name}_start",
            value=value,
            role="start",
            members=self._members,
            of=_start,
        )

    def wait(self) -> None:
        """Append a wait for each member."""
        parts = [
            self._emitter.call(
                operator.getitem,
                (self._started, place),
                name=f"{member.start.name}_started",
                value=member.start.meta["val"],
                role="view",
                members=(member,),
                of=_start,
            )
            for place, member in enumerate(self._members)
        ]
        for member, part in zip(self._members, parts, strict=True):
            self._values[member.wait] = self._emitter.call(
                _c10d.wait_tensor.default,
                (part,),
                name=f"{member.start.name}_waited",
                value=member.wait.meta["val"],
                role="wait",
                members=(member,),
                of=_wait,
            )
