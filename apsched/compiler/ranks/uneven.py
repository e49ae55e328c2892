"""Process ranks whose graphs differ only in sizes of shards, padding and constants: the test of
that, and the mapping of a schedule from one to another.

If a dimension does not divide evenly, DTensor pads the smaller shards before a gather and cuts the
padding off after a reduction. So some process ranks have nodes that others do not have.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apsched.errors import InputError
from apsched.fx.collectives import is_collective, is_wait_tensor
from apsched.fx.passes.parameters import serves_alone
from apsched.graph.export.signature import node_signature
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, Step, StepKind

_PADS = (torch.ops.aten.constant_pad_nd.default,)
_CUTS = (torch.ops.aten.slice.Tensor,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """The compared part of a graph whose shards need not have the sizes of others."""

    digest: str
    """Equal for graphs that differ in sizes, padding and constants alone."""
    padding: tuple[int, ...]
    """Nodes that pad the input of a collective, or cut its result."""


def likeness_of(graph: torch.fx.Graph, problem: Problem) -> Likeness:
    """Return the likeness of ``graph``, which ``problem`` is about."""
    padding = _padding(graph)
    numbers: dict[torch.fx.Node, int] = {}  # by place among all but padding
    hasher, count = hashlib.sha256(b"apsched likeness 1\n"), 0
    for rank, node in enumerate(graph.nodes):
        if rank in padding:
            numbers[node] = numbers[node.all_input_nodes[0]]
            continue
        numbers[node], count = count, count + 1
        hasher.update(node_signature(node, numbers, 0, sized=False).encode())
    nodes = tuple(graph.nodes)
    for c in problem.collectives:
        key = problem.keys[c.key]
        hasher.update(
            repr(
                (
                    *(numbers[nodes[place]] for place in (c.start, c.wait)),
                    *(str(key.kind), key.group_size, key.reduce_op, key.dtype, key.device),
                    *(key.stream, c.on_path, c.may_share),
                )
            ).encode()
        )
    return Likeness(digest=hasher.hexdigest(), padding=tuple(sorted(padding)))


def _padding(graph: torch.fx.Graph) -> set[int]:
    nodes = list(graph.nodes)
    sent: set[torch.fx.Node] = set()  # all that becomes of it is sent
    for node in reversed(nodes):
        if is_collective(node) or (
            serves_alone(node) and node.users and all(user in sent for user in node.users)
        ):
            sent.add(node)
    received: set[torch.fx.Node] = set()
    for node in nodes:
        if is_wait_tensor(node) or (
            serves_alone(node) and all(source in received for source in node.all_input_nodes)
        ):
            received.add(node)
    return {
        rank
        for rank, node in enumerate(nodes)
        if (node.target in _PADS and node in sent) or (node.target in _CUTS and node in received)
    }


def mapped_schedule(
    schedule: Schedule, padding: Sequence[int], problem: Problem, own_padding: Sequence[int]
) -> Schedule:
    """Return ``schedule``, of a graph with nodes of padding ``padding``, as one of ``problem``,
    which is like that graph and has ``own_padding``.

    Order and buckets stay as they are. Padding goes where it is first needed, and so does a cast
    that a copy-in does there and not here, since padding lies in between.
    """
    other, own = set(padding), set(own_padding)
    last = max((step.index for step in schedule.steps if step.kind is StepKind.NODE), default=0)
    theirs = [node for node in range(last + 1) if node not in other]
    ours = [node for node in range(problem.num_nodes) if node not in own]
    if len(theirs) != len(ours):
        raise InputError(
            f"{problem.name}: expected a schedule of {len(ours)} nodes without padding, found one"
            f" of {len(theirs)}"
        )
    own_node = dict(zip(theirs, ours, strict=True))
    replaced = {
        node
        for bucket in schedule.buckets
        for member in (problem.collectives[c] for c in bucket.members)
        for node in (member.start, member.wait, *(() if bucket.coalesced else member.cast))
    }
    moved = [
        step if step.kind is not StepKind.NODE else Step(StepKind.NODE, own_node[step.index])
        for step in schedule.steps
        if step.kind is not StepKind.NODE or step.index in own_node
    ]
    moved = [s for s in moved if s.kind is not StepKind.NODE or s.index not in replaced]
    placed = {step.index for step in moved if step.kind is StepKind.NODE}
    left = set(range(problem.num_nodes)) - placed - replaced
    steps: list[Step] = []
    for step in moved:
        steps += [Step(StepKind.NODE, node) for node in _first(step, schedule, problem, left)]
        steps.append(step)
    return Schedule(buckets=schedule.buckets, steps=tuple(steps))


def _first(step: Step, schedule: Schedule, problem: Problem, left: set[int]) -> list[int]:
    """Return the nodes of ``left`` that must come before ``step``, in order; ``left`` loses
    them.
    """
    stack: list[int] = []
    if step.kind is StepKind.NODE:
        stack = [step.index]
    elif step.kind in (StepKind.COPY_IN, StepKind.START):
        members = [problem.collectives[c] for c in schedule.buckets[step.index].members]
        stack = [node for member in members for node in (member.start, *member.cast)]
    found: set[int] = set()
    while stack:
        for before in problem.predecessors[stack.pop()]:
            if before in left:
                left.discard(before)
                found.add(before)
                stack.append(before)
    return sorted(found)
