"""Facts about a member of a bucket for write-back, read from its nodes and checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from apsched.errors import InputError
from apsched.kinds import CollectiveKind
from apsched.problem.problem import Problem

_ops = torch.ops._c10d_functional
_KIND_OF_TARGET: dict[Any, CollectiveKind] = {
    _ops.all_gather_into_tensor.default: CollectiveKind.ALL_GATHER,
    _ops.reduce_scatter_tensor.default: CollectiveKind.REDUCE_SCATTER,
    _ops.all_reduce.default: CollectiveKind.ALL_REDUCE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One collective of a bucket: its nodes, and the shapes around it."""

    collective: int
    """Index in the problem."""
    start: Node
    wait: Node
    sent: Node
    """The node whose result it sends."""
    payload: Node
    """The node whose result is copied in: the node sent, or the input of the cast that makes it."""
    kind: CollectiveKind
    group: Any
    """As the graph hands it to the collective."""
    group_size: int
    reduce_op: str
    """Empty where nothing is reduced."""
    dtype: torch.dtype
    device: torch.device
    input_numel: int
    output_shape: tuple[int, ...]

    @property
    def output_numel(self) -> int:
        """Number of elements of its result."""
        return math.prod(self.output_shape)


def read_members(
    problem: Problem,
    nodes: Sequence[Node],
    collectives: Sequence[int],
    second: Mapping[str, str] | None = None,
) -> tuple[Member, ...]:
    """Return the members of one bucket in payload order; raise InputError where they can't share a
    launch.

    ``second`` maps the second groups of ``problem`` to the names by which they run.
    """
    members = tuple(_read_member(problem, nodes, c, second or {}) for c in collectives)
    first = members[0]
    for member in members[1:]:
        for label in ("kind", "group", "group_size", "reduce_op", "dtype", "device"):
            own, of_first = getattr(member, label), getattr(first, label)
            if own != of_first:
                raise InputError(
                    f"members of one bucket must agree in {label}: {member.start.name} has {own},"
                    f" {first.start.name} has {of_first}; put them in different buckets"
                )
    return members


def _read_member(
    problem: Problem, nodes: Sequence[Node], c: int, second: Mapping[str, str]
) -> Member:
    collective = problem.collectives[c]
    start, wait = nodes[collective.start], nodes[collective.wait]
    kind = _KIND_OF_TARGET.get(start.target)
    if kind is None:
        raise InputError(
            f"node {start.name}: only functional all-gathers, reduce-scatters and all-reduces of"
            f" one tensor can share a launch; found {start.target}; leave it in no bucket"
        )
    if tuple(start.users) != (wait,):
        users = ", ".join(user.name for user in start.users) or "nothing"
        raise InputError(
            f"node {start.name}: expected {wait.name} to be the only user of its result; found"
            f" {users}; leave it in no bucket"
        )
    arguments = _arguments(start)
    payload = sent = arguments["input"]
    value, result = _value(sent, start), _value(start, start)
    if collective.cast:
        payload = nodes[collective.cast[0]].all_input_nodes[0]
        if _value(payload, start).numel() != value.numel():
            raise InputError(
                f"node {start.name}: {sent.name} isn't {payload.name} in another dtype; solve this"
                " graph again"
            )
    group_size = problem.keys[collective.key].group_size
    if arguments.get("group_size", group_size) != group_size:
        raise InputError(
            f"node {start.name}: its group has {arguments['group_size']} process ranks, the problem"
            f" says {group_size}"
        )
    if isinstance(arguments["group_name"], Node):
        raise InputError(
            f"node {start.name}: its group is a value of the graph, which can't be resolved here;"
            " leave it in no bucket"
        )
    if kind == CollectiveKind.REDUCE_SCATTER and value.shape[0] % group_size:
        raise InputError(
            f"node {start.name}: dim 0 of its input, {value.shape[0]}, can't be split over"
            f" {group_size} process ranks"
        )
    return Member(
        collective=c,
        start=start,
        wait=wait,
        sent=sent,
        payload=payload,
        kind=kind,
        group=second.get(problem.keys[collective.key].group, arguments["group_name"]),
        group_size=group_size,
        reduce_op=arguments.get("reduce_op", ""),
        dtype=value.dtype,
        device=value.device,
        input_numel=value.numel(),
        output_shape=tuple(result.shape),
    )


def _arguments(start: Node) -> dict[str, Any]:
    """Return the arguments of ``start`` by name."""
    names = (argument.name for argument in start.target._schema.arguments)  # type: ignore[union-attr]
    return {**dict(zip(names, start.args, strict=False)), **start.kwargs}


def _value(node: Node, start: Node) -> torch.Tensor:
    """Return the (fake) value of ``node``, which must be static and contiguous."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f'node {node.name}: expected a tensor in meta["val"], found {value!r}; capture the'
            " graph with fake tensors"
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise InputError(
            f"node {start.name}: {node.name} has symbolic shape {tuple(value.shape)}; leave it in"
            " no bucket, or capture static shapes"
        )
    if not value.is_contiguous():
        layout = f"shape {tuple(value.shape)} and strides {value.stride()}"
        raise InputError(
            f"node {start.name}: {node.name} of {layout} isn't contiguous; leave it in no bucket"
        )
    return value
