"""The role of each collective: FSDP, HSDP, DDP, tensor, sequence or expert parallelism.

Two sources say which collectives serve parameters and their gradients: on AOTAutograd's joint graph
the descriptors of its inputs and outputs (:func:`classify`, before the partitioner; tags live in
``node.meta`` and survive its copies), on any graph its structure alone
(:func:`apsched.graph.export.structural_roles.structural_roles`). This module derives the roles from
either source.
"""

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from functools import cache

from torch.fx import GraphModule, Node

from apsched.errors import InputError
from apsched.fx.collectives import (
    collective_kind,
    group_name,
    is_all_gather,
    is_collective,
    is_wait_tensor,
)
from apsched.fx.graph_copies import copied
from apsched.fx.passes.parameters import gather_nodes, gradient_nodes
from apsched.fx.passes.run_passes import Pass
from apsched.kinds import CollectiveKind
from apsched.names import primary_group

ROLE_KEY = "apsched_role"
"""``node.meta["custom"][ROLE_KEY]`` of a start and its wait is the role of the collective."""


class Role(StrEnum):
    """The role of a collective."""

    PARAMETER_GATHER = "parameter_gather"
    """FSDP, HSDP: a parameter from its shards."""
    GRADIENT_SCATTER = "gradient_scatter"
    """FSDP, first step of HSDP: a gradient reduced to its shards."""
    REPLICA_SUM = "replica_sum"
    """Second step of HSDP: the shard of a gradient, summed over replicas."""
    GRADIENT_SUM = "gradient_sum"
    """DDP: a whole gradient, summed over replicas."""
    PARTIAL_GRADIENT_SUM = "partial_gradient_sum"
    """Tensor parallelism: parts of the gradient of a parameter that each process rank has whole
    (norms), before data parallelism.
    """
    TENSOR_PARALLEL = "tensor_parallel"
    """All-reduce of activations, or of their gradients."""
    SEQUENCE_PARALLEL = "sequence_parallel"
    """All-gather or reduce-scatter of activations, or of their gradients."""
    EXPERT_PARALLEL = "expert_parallel"
    """All-to-all of tokens, and whatever else runs on a group that has one."""
    OTHER = "other"
    """Anything else, such as a statistic summed over the data-parallel group."""


def classify() -> Pass:
    """Return the pass that tags each collective of a joint graph with its role, by the descriptors
    of AOTAutograd.
    """
    return Pass(name="classify", run=_classified, spec=check_tags)


def _classified(module: GraphModule) -> GraphModule:
    result = copied(module)
    graph = result.graph
    gathers, reductions = gather_nodes(graph).keys(), gradient_nodes(graph).keys()
    starts = [node for node in graph.nodes if is_collective(node)]
    for start, role in roles_of(starts, gathers=gathers, reductions=reductions).items():
        for node in (start, *waits_of(start)):
            node.meta["custom"] = {**node.meta.get("custom", {}), ROLE_KEY: str(role)}
    return result


def check_tags(module: GraphModule) -> None:
    """Raise InputError for a collective without a role."""
    for node in module.graph.nodes:
        if is_collective(node) and tagged_role(node) is None:
            raise InputError(
                f"node {node.name}: expected a role on each collective, found none; classify the"
                " joint graph"
            )


def tagged_role(node: Node) -> Role | None:
    """Return the role in the tag of a start or wait; ``None`` without a tag."""
    role = node.meta.get("custom", {}).get(ROLE_KEY)
    return Role(role) if role is not None else None


def waits_of(start: Node) -> list[Node]:
    """Return the waits of a start, those of its items too."""
    results = [
        start,
        *(
            user
            for user in start.users
            if not is_wait_tensor(user) and len(user.all_input_nodes) == 1
        ),
    ]
    return [user for result in results for user in result.users if is_wait_tensor(user)]


def roles_of(
    starts: Iterable[Node], *, gathers: Collection[Node], reductions: Collection[Node]
) -> dict[Node, Role]:
    """Return the role of each start; ``gathers`` take parameters alone, ``reductions`` end in
    gradients alone.

    Both may hold other nodes, too.
    """
    starts = list(starts)
    serving = {
        s
        for s in starts
        if (is_all_gather(s) and s in gathers) or (not is_all_gather(s) and s in reductions)
    }
    busy: dict[
        str, set[CollectiveKind | None]
    ] = {}  # group -> kinds that it has between computations
    for start in starts:
        if start not in serving:
            busy.setdefault(group_name(start), set()).add(collective_kind(start))
    primary = primary_group(group_name(s) for s in serving if is_all_gather(s))
    later = _later(serving)
    behind = {s: later(s) for s in serving}
    return {
        s: (
            _gradient_role(s, serving, behind, busy)
            if s in serving
            else _activation_role(s, primary, busy)
        )
        for s in starts
    }


def _gradient_role(
    start: Node,
    serving: set[Node],
    behind: dict[Node, frozenset[Node]],
    busy: dict[str, set[CollectiveKind | None]],
) -> Role:
    kind = collective_kind(start)
    if kind == CollectiveKind.ALL_GATHER:
        return Role.PARAMETER_GATHER
    if kind == CollectiveKind.REDUCE_SCATTER:
        return Role.GRADIENT_SCATTER
    if any(
        start in behind[s] for s in serving if collective_kind(s) == CollectiveKind.REDUCE_SCATTER
    ):
        return Role.REPLICA_SUM
    if behind[start] or busy.get(group_name(start), set()) & {
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_TO_ALL,
    }:
        return Role.PARTIAL_GRADIENT_SUM
    return Role.GRADIENT_SUM


def _activation_role(
    start: Node, primary: str | None, busy: dict[str, set[CollectiveKind | None]]
) -> Role:
    group = group_name(start)
    if CollectiveKind.ALL_TO_ALL in busy[group]:
        return Role.EXPERT_PARALLEL
    kind = collective_kind(start)
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        return Role.SEQUENCE_PARALLEL
    return (
        Role.TENSOR_PARALLEL
        if kind == CollectiveKind.ALL_REDUCE and group != primary
        else Role.OTHER
    )


def _later(serving: set[Node]) -> Callable[[Node], frozenset[Node]]:
    """Return a function: start -> the starts of gradients that take on its result."""

    @cache
    def later(start: Node) -> frozenset[Node]:
        if is_all_gather(start):
            return frozenset()
        found: set[Node] = set()
        seen, stack = {start}, [start]
        while stack:
            for user in stack.pop().users:
                if user in serving:
                    found |= {user} | later(user)
                elif user not in seen and user.op != "output":
                    seen.add(user)
                    stack.append(user)
        return frozenset(found)

    return later
