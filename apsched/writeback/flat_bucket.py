"""The nodes of a flat bucket: one buffer, one launch, copied in by one kernel and, for an
all-gather, out by one a member.

Forms as in "SimpleFSDP" (2024) and FSDP2
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); lifetimes as in
:mod:`apsched.schedule.memory`.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node

from apsched.kinds import CollectiveKind
from apsched.writeback.emit import Emitter, Source
from apsched.writeback.members import Member

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def _start(member: Member) -> Node:
    return member.start


def _wait(member: Member) -> Node:
    return member.wait


class FlatBucket:
    """Common to all kinds: views, and the steps copy-in, start, wait and copy-out, to be called in
    this order.

    ``values`` maps nodes of the old graph to nodes of the new one; results of members are entered
    under their waits.
    """

    def __init__(
        self, emitter: Emitter, index: int, members: Sequence[Member], values: dict[Node, Node]
    ) -> None:
        self._emitter = emitter
        self._name = f"bucket_{index}"
        self._members = tuple(members)
        self._first = self._members[0]
        self._values = values
        self._total = sum(member.input_numel for member in members)
        """Elements of the payload of this process rank."""
        self._buffer: Node

    def copy_in(self) -> None:
        """Append the nodes that gather the payload."""
        raise NotImplementedError

    def start(self) -> None:
        """Append the launch."""
        raise NotImplementedError

    def wait(self) -> None:
        """Append the wait, and the views that are members' results."""
        raise NotImplementedError

    def copy_out(self, collective: int) -> None:
        """Append the copy of a member's result, where results don't stay in the buffer."""
        raise NotImplementedError

    def _call(
        self,
        target: Any,
        *args: Any,
        name: str,
        value: torch.Tensor | None,
        role: str,
        of: Source,
        **kwargs: Any,
    ) -> Node:
        name = f"{self._name}_{name}"
        return self._emitter.call(
            target, args, kwargs, name=name, value=value, role=role, members=self._members, of=of
        )

    def _view(
        self, node: Node, shape: Sequence[int], *, name: str, of: Source, members: Sequence[Member]
    ) -> Node:
        """Append ``node`` in another shape; free."""
        value = node.meta["val"]
        if tuple(value.shape) == tuple(shape):
            return node
        args = (node, list(shape))
        return self._emitter.call(
            _aten.view.default,
            args,
            name=name,
            value=value.view(shape),
            role="view",
            members=members,
            of=of,
        )

    def _slice(
        self,
        node: Node,
        dim: int,
        first: int,
        length: int,
        *,
        name: str,
        of: Source,
        members: Sequence[Member],
    ) -> Node:
        """Append a part of ``node`` along ``dim``; free."""
        value = node.meta["val"].narrow(dim, first, length)
        args = (node, dim, first, first + length)
        return self._emitter.call(
            _aten.slice.Tensor, args, name=name, value=value, role="view", members=members, of=of
        )

    def _payload_views(self, *shape: int) -> list[Node]:
        """Append each member's input as ``[*shape, rest]``."""
        lead = math.prod(shape)
        return [
            self._view(
                self._values[member.payload],
                (*shape, member.input_numel // lead),
                name=f"{member.start.name}_payload",
                of=_start,
                members=(member,),
            )
            for member in self._members
        ]

    def _new_value(self, *shape: int) -> torch.Tensor:
        value: torch.Tensor = self._first.payload.meta["val"]
        return value.new_empty(shape, dtype=self._first.dtype)

    def _results_as_views(self, flat: Node) -> None:
        """Enter each member's part of ``flat`` as its result."""
        offset = 0
        for member in self._members:
            name, one = member.start.name, (member,)
            part = self._slice(
                flat, 0, offset, member.output_numel, name=f"{name}_part", of=_wait, members=one
            )
            self._values[member.wait] = self._view(
                part, member.output_shape, name=f"{name}_result", of=_wait, members=one
            )
            offset += member.output_numel

    def _wait_for(self, started: Node) -> Node:
        return self._call(
            _c10d.wait_tensor.default,
            started,
            name="wait",
            value=started.meta["val"],
            role="wait",
            of=_wait,
        )


class AllGatherBucket(FlatBucket):
    """``empty`` [world * total], one copy into this process rank's part, gather in place, one
    ``clone`` a member.

    The copy casts where a member's input was cast for it alone, as FSDP2's ``all_gather_copy_in``
    does.
    """

    def __init__(
        self,
        emitter: Emitter,
        index: int,
        members: Sequence[Member],
        values: dict[Node, Node],
        process_rank: int,
    ) -> None:
        super().__init__(emitter, index, members, values)
        self._rank = process_rank
        offsets = accumulate((member.input_numel for member in members), initial=0)
        self._member_at = {
            member.collective: (member, offset)
            for member, offset in zip(members, offsets, strict=False)
        }

    def copy_in(self) -> None:
        first, total = self._first, self._total
        size = first.group_size * total
        self._buffer = self._call(
            _aten.empty.memory_format,
            [size],
            dtype=first.dtype,
            device=first.device,
            pin_memory=False,
            name="buffer",
            value=self._new_value(size),
            role="buffer",
            of=_start,
        )
        self._own = self._slice(
            self._buffer,
            0,
            self._rank * total,
            total,
            name=f"{self._name}_own",
            of=_start,
            members=self._members,
        )
        places = [
            self._slice(
                self._own,
                0,
                offset,
                member.input_numel,
                name=f"{member.start.name}_place",
                of=_start,
                members=(member,),
            )
            for member, offset in self._member_at.values()
        ]
        self._call(
            _aten._foreach_copy_.default,
            places,
            self._payload_views(),
            name="copy_in",
            value=None,
            role="copy_in",
            of=_start,
        )

    def start(self) -> None:
        self._started = self._call(
            _c10d.all_gather_into_tensor_out.default,
            self._own,
            self._first.group_size,
            self._first.group,
            out=self._buffer,
            name="start",
            value=self._buffer.meta["val"],
            role="start",
            of=_start,
        )

    def wait(self) -> None:
        waited = self._wait_for(self._started)
        shape = (self._first.group_size, self._total)
        self._gathered = self._view(
            waited, shape, name=f"{self._name}_gathered", of=_wait, members=self._members
        )

    def copy_out(self, collective: int) -> None:
        member, offset = self._member_at[collective]
        one = (member,)
        name = member.start.name
        part = self._slice(
            self._gathered,
            1,
            offset,
            member.input_numel,
            name=f"{name}_part",
            of=_wait,
            members=one,
        )
        copy = self._emitter.call(
            _aten.clone.default,
            (part,),
            {"memory_format": torch.contiguous_format},
            name=f"{name}_copy_out",
            value=self._new_value(member.group_size, member.input_numel),
            role="copy_out",
            members=one,
            of=_wait,
        )
        self._values[member.wait] = self._view(
            copy, member.output_shape, name=f"{name}_whole", of=_wait, members=one
        )


class ReduceScatterBucket(FlatBucket):
    """One ``cat`` along dim 1 of ``[world, -1]``, reduce-scatter; results are views of its
    result.
    """

    def copy_in(self) -> None:
        payload = self._payload_views(self._first.group_size)
        value = self._new_value(self._first.group_size, self._total // self._first.group_size)
        self._buffer = self._call(
            _aten.cat.default, payload, 1, name="copy_in", value=value, role="copy_in", of=_start
        )

    def start(self) -> None:
        first = self._first
        args = (self._buffer, first.reduce_op, first.group_size, first.group)
        value = self._new_value(1, self._total // first.group_size)
        self._started = self._call(
            _c10d.reduce_scatter_tensor.default,
            *args,
            name="start",
            value=value,
            role="start",
            of=_start,
        )

    def wait(self) -> None:
        waited = self._view(
            self._wait_for(self._started),
            (self._started.meta["val"].numel(),),
            name=f"{self._name}_flat",
            of=_wait,
            members=self._members,
        )
        self._results_as_views(waited)


class AllReduceBucket(FlatBucket):
    """One ``cat``, all-reduce in place; results are views of the buffer."""

    def copy_in(self) -> None:
        value = self._new_value(self._total)
        self._buffer = self._call(
            _aten.cat.default,
            self._payload_views(),
            name="copy_in",
            value=value,
            role="copy_in",
            of=_start,
        )

    def start(self) -> None:
        args = (self._buffer, self._first.reduce_op, self._first.group)
        value = self._buffer.meta["val"]
        self._started = self._call(
            _c10d.all_reduce_.default, *args, name="start", value=value, role="start", of=_start
        )

    def wait(self) -> None:
        self._results_as_views(self._wait_for(self._started))


def make_bucket(
    emitter: Emitter,
    index: int,
    members: Sequence[Member],
    values: dict[Node, Node],
    process_rank: int,
) -> FlatBucket:
    """Return the bucket of ``members``; ``process_rank`` is this process rank's rank in their
    group.
    """
    match members[0].kind:
        case CollectiveKind.ALL_GATHER:
            return AllGatherBucket(emitter, index, members, values, process_rank)
        case CollectiveKind.REDUCE_SCATTER:
            return ReduceScatterBucket(emitter, index, members, values)
        case _:
            return AllReduceBucket(emitter, index, members, values)
