"""Bitwise mode: gradients are reduced in the buckets, and in the payload order, of eager FSDP2, so
that sums come out bit for bit.

NCCL adds a chunk of the buffer in an order that depends on its place in the buffer, so membership
and payload order of a reduce-scatter decide the last bit. ``fully_shard`` on each transformer block
and on the root makes one parameter group of each block, and one of the remaining parameters; the
gradients of a group go into one reduce-scatter, in the order in which the group lists its
parameters; each backward reduces its own, where gradients of several micro-batches are not added
first. With several replicas the all-reduce that follows has the same members. All-gathers only
copy, and stay free.

torch/distributed/fsdp/_fully_shard/_fsdp_init.py: ``_get_managed_modules`` lists modules children
first, ``_get_managed_states`` their own parameters one module after the other. That is the order of
``named_parameters()`` but for modules that have parameters both of their own and in their children.
``named_parameters()`` is the order of the parameters among the inputs of a traced graph, and so of
their gradients among its outputs. Dynamo orders inputs by first use: there the user must state the
order (``parameter_order``), else bitwise mode is refused.
"""

import logging
from collections import Counter
from collections.abc import Iterator

from apsched.errors import InputError
from apsched.kinds import CollectiveKind
from apsched.names import block_of
from apsched.problem.problem import Collective, Problem

logger = logging.getLogger(__name__)

BITWISE_RULE = (
    "bitwise: each FSDP unit's gradients in one bucket of their own, in order of registration"
)


def fsdp_units(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return the reductions of each unit and key, in payload order; ``InputError`` if the graph
    does not have that order.

    Where a parameter has several reductions, those of several micro-batches, eager FSDP2 reduces
    the unit once for each: the first ones of its parameters share a launch, the second ones
    another. Of a module that runs several times in one pass eager FSDP2 adds the gradients first,
    which no launch of these reductions can repeat.
    """
    _warn_of_replicas_first(problem)
    units: dict[tuple[str, int, int], list[int]] = {}
    num_before: Counter[tuple[str, int]] = Counter()
    for c in sorted(_reductions(problem), key=lambda c: problem.collectives[c].start):
        collective = problem.collectives[c]
        name = problem.node_names[collective.start]
        if not collective.module:
            raise InputError(
                f"{problem.name}: bitwise needs the name of each gradient's parameter, and node"
                f" {name} has none; capture the module itself (package.module:function), or with a"
                " tracer that keeps names of parameters"
            )
        if collective.output_place < 0:
            raise InputError(
                f"{problem.name}: bitwise needs the order in which parameters were registered,"
                f" which the graph does not have for {name} (graph files written before version 3"
                " don't); capture it again"
            )
        parameter = (collective.module, collective.key)
        unit = block_of(collective.module.rpartition(".")[0])
        units.setdefault((unit, collective.key, num_before[parameter]), []).append(c)
        num_before[parameter] += 1
    return tuple(tuple(_in_payload_order(problem, members)) for members in units.values())


def _warn_of_replicas_first(problem: Problem) -> None:
    """Warn of a gradient that is all-reduced over the replicas before it is reduced to shards:
    FSDP2 does both the other way round, and sums round in another order.

    A group that carries collectives of activations, too, is one of tensor parallelism, where FSDP2
    gets gradients that are all-reduced.
    """
    parallel = {problem.keys[c.key].group for c in problem.collectives if c.on_path}
    reduced = {
        c.wait: problem.keys[c.key].group
        for c in problem.collectives
        if _kind(problem, c) == CollectiveKind.ALL_REDUCE and not c.on_path
    }
    for c in problem.collectives:
        if _kind(problem, c) != CollectiveKind.REDUCE_SCATTER or c.on_path:
            continue
        node = c.start
        while len(before := problem.predecessors[node]) == 1 and node not in reduced:
            node = before[0]
        if node in reduced and reduced[node] not in parallel:
            logger.warning(
                "%s: weights may differ from those of eager FSDP2 in the last bits, though bitwise"
                " is set: FSDP2 reduces gradients to shards first and then over the replicas; this"
                " graph all-reduces that of %s over group %s before (%s), as DTensor does for"
                " [Replicate(), Shard(0)]",
                problem.name,
                c.module or problem.node_names[c.start],
                reduced[node],
                problem.node_names[node],
            )
            return


def _reductions(problem: Problem) -> Iterator[int]:
    """Yield the reduce-scatters of gradients, and the all-reduces that take their results on; DDP's
    all-reduces have no unit.
    """
    scattered = {
        c.wait
        for c in problem.collectives
        if _kind(problem, c) == CollectiveKind.REDUCE_SCATTER and not c.on_path
    }
    behind = list(scattered)
    while behind:
        for node in problem.successors[behind.pop()]:
            if node not in scattered:
                scattered.add(node)
                behind.append(node)
    for c, collective in enumerate(problem.collectives):
        kind = _kind(problem, collective)
        if not collective.on_path and (
            kind == CollectiveKind.REDUCE_SCATTER
            or (kind == CollectiveKind.ALL_REDUCE and collective.start in scattered)
        ):
            yield c


def _kind(problem: Problem, collective: Collective) -> str:
    return problem.keys[collective.key].kind


def _in_payload_order(problem: Problem, members: list[int]) -> list[int]:
    """Return ``members`` as their unit lists them: by place among the outputs, but parameters of
    children before those of a module.
    """
    by_place = sorted(members, key=lambda c: problem.collectives[c].output_place)
    tree = _Module()
    for c in by_place:
        tree.add(problem.collectives[c].module.split("."), c)
    return list(tree.parameters())


class _Module:
    """A module as names show it: children and own parameters in order of registration."""

    def __init__(self) -> None:
        self.children: dict[str, _Module] = {}
        self.own: list[int] = []

    def add(self, path: list[str], c: int) -> None:
        if len(path) == 1:
            self.own.append(c)
        else:
            self.children.setdefault(path[0], _Module()).add(path[1:], c)

    def parameters(self) -> Iterator[int]:
        for child in self.children.values():
            yield from child.parameters()
        yield from self.own
