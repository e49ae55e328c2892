"""Launches of a graph on each process group, in order, as text with the same meaning on all process
ranks.

A collective is known by its number among those of its group as captured: that is the same on every
process rank of the group, whatever else their graphs hold (stages of a pipeline), or the job would
hang without apsched, too.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from apsched.errors import InputError
from apsched.fx.collectives import (
    collective_kind,
    group_name,
    input_nodes,
    is_blocking_collective,
    is_collective,
    kind_inside,
    reduce_op,
    tensor_bytes,
    tensors_of,
)
from apsched.kinds import CollectiveKind
from apsched.names import first_name
from apsched.torch_compat.sizes import depends_on_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch."""

    what: str
    """Kind, reduction, dtype, bytes in and out."""
    members: tuple[int, ...]
    """Numbers of the collectives that share it, in payload order."""
    names: tuple[str, ...]
    """Their purpose (a parameter, else a node), for people: not compared."""

    def __str__(self) -> str:
        shown = ", ".join(self.names[:_SHOWN]) + (
            f" and {len(self.names) - _SHOWN} more" if len(self.names) > _SHOWN else ""
        )
        return f"{self.what} of {shown}" if shown else self.what


_SHOWN = 3


def launches_of(
    module: torch.fx.GraphModule,
    captured: torch.fx.GraphModule,
    names: Mapping[str, str] | None = None,
) -> dict[str, tuple[Launch, ...]]:
    """Return group -> its launches, in the order of ``module``, which was made from ``captured``
    (or is that).

    ``names`` maps a start node to the name that its launch shows.
    """
    numbers: dict[str, tuple[str, int]] = {}
    counts: dict[str, int] = {}
    for node in captured.graph.nodes:
        if (group := _group_of(node)) is not None:
            first = first_name(group)
            numbers[node.name] = (first, counts.setdefault(first, 0))
            counts[first] += 1
    launches: dict[str, list[Launch]] = {group: [] for group in counts}
    for node in module.graph.nodes:
        if (group := _group_of(node)) is None:
            continue
        note = node.meta.get("apsched", {})
        bucket = note.get("role") == "start" and node.name not in numbers  # a new one
        members = tuple(note["members"]) if bucket else (node.name,)
        first = first_name(
            group
        )  # a second group has the process ranks of the first, and is compared with it
        strange = [name for name in members if numbers.get(name, ("", 0))[0] != first]
        if strange:
            raise InputError(
                f"node {node.name}: its group {first!r} has no collective {strange[0]!r} in the"
                " graph as captured"
            )
        shown = tuple((names or {}).get(name) or name for name in members)
        what = _what(node) if group == first else f"second group: {_what(node)}"
        launches[first].append(
            Launch(what=what, members=tuple(numbers[n][1] for n in members), names=shown)
        )
    return {group: tuple(listed) for group, listed in launches.items()}


def groups_of(module: torch.fx.GraphModule) -> tuple[str, ...]:
    """Return the names of the groups that ``module`` communicates in, by first appearance."""
    return tuple(
        dict.fromkeys(
            first_name(group)
            for node in module.graph.nodes
            if (group := _group_of(node)) is not None
        )
    )


def collectives_digest(module: torch.fx.GraphModule) -> str:
    """Return a digest of the collectives of a graph, without sizes: shards may differ."""
    found = [str(node.target) for node in module.graph.nodes if is_collective(node)]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def order_digest(launches: Sequence[Launch]) -> str:
    """Return a digest of a launch order; names do not count."""
    return hashlib.sha256(
        repr([(launch.what, launch.members) for launch in launches]).encode()
    ).hexdigest()


def dump_launches(launches: Sequence[Launch]) -> bytes:
    """Return ``launches`` as JSON."""
    return json.dumps([[launch.what, launch.members, launch.names] for launch in launches]).encode()


def parse_launches(text: bytes) -> tuple[Launch, ...]:
    """Return the launches that :func:`dump_launches` wrote."""
    return tuple(
        Launch(what=what, members=tuple(members), names=tuple(names))
        for what, members, names in json.loads(text)
    )


def first_difference(own: Sequence[Launch], theirs: Sequence[Launch]) -> str:
    """Return the first difference of two launch orders, in one clause about the first."""
    for number, (a, b) in enumerate(zip(own, theirs, strict=False), start=1):
        if (a.what, a.members) != (b.what, b.members):
            return f"launch {number} is {a}, there it is {b}{_telling(a, b)}"
    if len(own) < len(theirs):
        return (
            f"it ends after {len(own)} launches, there launch {len(own) + 1} is {theirs[len(own)]}"
        )
    return (
        f"launch {len(theirs) + 1} is {own[len(theirs)]}, there it ends after {len(theirs)}"
        " launches"
    )


def _telling(a: Launch, b: Launch) -> str:
    """Return the difference of two launches whose text is the same."""
    return (
        ""
        if str(a) != str(b)
        else (
            f" (collectives {list(a.members)}, there {list(b.members)}, by their place in the graph"
            " as captured)"
        )
    )


def _group_of(node: torch.fx.Node) -> str | None:
    kind = collective_kind(node) or kind_inside(node.target)
    return group_name(node) if kind is not None or is_blocking_collective(node) else None


def _what(node: torch.fx.Node) -> str:
    """Return the description of a launch that its peers need."""
    sent = [tensor for source in input_nodes(node) for tensor in tensors_of(source)]
    dtype = str(sent[0].dtype).removeprefix("torch.") if sent else ""
    sizes = [sum(_bytes(tensor) for tensor in tensors) for tensors in (sent, tensors_of(node))]
    kind = str(collective_kind(node) or kind_inside(node.target))
    if is_blocking_collective(node):
        kind = "shard_dim_alltoall"
    size = (
        "" if kind == CollectiveKind.ALL_TO_ALL else f"{sizes[0]} -> {sizes[1]} bytes"
    )  # each process rank may send as much as it likes
    form = (
        "coalesced" if "_coalesced" in str(node.target) else ""
    )  # as many transfers as members in one launch
    return " ".join(word for word in (form, kind, reduce_op(node), dtype, size) if word)


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor``; 0 where that depends on data: each process rank may have its
    own.
    """
    return 0 if depends_on_data(tensor.numel()) else tensor_bytes(tensor)
