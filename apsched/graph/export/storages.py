"""The storages that each node allocates, reads, writes, shares and frees: one walk in graph
order.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from apsched.capture.captured import CapturedGraph
from apsched.errors import InputError
from apsched.fx.assumed_sizes import rests_on_assumed
from apsched.fx.collectives import collective_kind, input_nodes
from apsched.fx.effects.effects import Effects
from apsched.fx.effects.of_node import effects_of
from apsched.fx.tensors import needed_bytes, storage_bytes, storage_key
from apsched.graph.export.aliasing import (
    STANDS_FOR,
    Tree,
    item_of,
    map_tensors,
    storages_by_tensor,
    storages_in,
    unique,
)
from apsched.graph.records import StorageRecord


@dataclass(slots=True)
class NodeStorages:
    """Storage ids that one node touches, each list without repetition."""

    allocates: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


@dataclass(slots=True)
class StorageTable:
    """Storages of a graph, and their uses by its nodes."""

    storages: list[StorageRecord] = field(default_factory=list)
    of_node: list[NodeStorages] = field(default_factory=list)
    """By rank."""
    effects: list[Effects] = field(default_factory=list)
    """By rank."""
    outputs: frozenset[int] = frozenset()
    """Storages that the graph returns."""
    assumed: set[int] = field(default_factory=set)
    """Storages whose size depends on data."""


def trace_storages(captured: CapturedGraph, nodes: tuple[torch.fx.Node, ...]) -> StorageTable:
    """Return the storages behind ``nodes`` (all of the graph, in order); ``frees`` is left to
    :func:`release`.
    """
    walk = _Walk(captured)
    for node in nodes:
        walk.visit(node)
    return walk.table


def release(table: StorageTable, holds: Iterable[tuple[int, int]]) -> None:
    """Fill in ``frees``: each storage at its last use; ``holds`` are pairs of a start that holds
    its reads and its wait.
    """
    last_use = [-1] * len(table.storages)
    for rank, used in enumerate(table.of_node):
        for s in (*used.allocates, *used.reads, *used.writes, *used.aliases):
            last_use[s] = rank
    for start, wait in holds:
        for s in table.of_node[start].reads:
            last_use[s] = max(last_use[s], wait)
    frees: list[list[int]] = [[] for _ in table.of_node]
    for s, rank in enumerate(last_use):
        if rank >= 0 and not table.storages[s].kept and s not in table.outputs:
            frees[rank].append(s)
    for used, freed in zip(table.of_node, frees, strict=True):
        used.frees = tuple(freed)


class _Walk:
    """State of the walk: the value of every node so far."""

    def __init__(self, captured: CapturedGraph) -> None:
        self.captured = captured
        self.table = StorageTable()
        self.values: dict[torch.fx.Node, Tree] = {}
        self.inputs: dict[int, int] = {}  # key of a fake storage of an input -> storage id

    def visit(self, node: torch.fx.Node) -> None:
        reads = self._storages_of(node.all_input_nodes)
        effects = Effects(idle=True)
        if node.op == "placeholder":
            used = self._input(node, _meta_value(node), kept=node.name in self.captured.kept_inputs)
        elif node.op == "get_attr":
            used = self._input(node, _constant(node), kept=True)
        elif node.op == "output":
            self.values[node], used = (), NodeStorages(reads=reads)
            self.table.outputs = frozenset(reads)
        elif node.target is operator.getitem and isinstance(
            source := self._value(node.args[0]), list
        ):
            container = node.args[0]
            assert isinstance(container, torch.fx.Node)
            self.values[node] = element = item_of(source, _meta_value(container), node.args[1])
            used = NodeStorages(reads=reads, aliases=tuple(storages_in(element)))
        else:
            effects = effects_of(node)
            used = self._call(node, reads, effects)
        self.table.of_node.append(used)
        self.table.effects.append(effects)

    def _input(self, node: torch.fx.Node, value: Any, *, kept: bool) -> NodeStorages:
        allocates: list[int] = []
        aliases: list[int] = []

        def leaf(tensor: torch.Tensor) -> tuple[int, ...]:
            key = storage_key(tensor)
            if key in self.inputs:
                s = self.inputs[key]
                record = self.table.storages[s]
                size = max(record.size_bytes, storage_bytes(tensor))
                self.table.storages[s] = StorageRecord(size_bytes=size, kept=record.kept or kept)
                aliases.append(s)
            else:
                s = self.inputs[key] = self._new(tensor, storage_bytes(tensor), kept=kept)
                allocates.append(s)
            return (s,)

        self.values[node] = map_tensors(leaf, value)
        return NodeStorages(allocates=tuple(allocates), aliases=unique(aliases))

    def _call(self, node: torch.fx.Node, reads: tuple[int, ...], effects: Effects) -> NodeStorages:
        writes = self._storages_of(effects.writes)
        if collective_kind(node) is not None:
            reads = self._storages_of(input_nodes(node))
        elif effects.out:
            reads = self._storages_of(
                a
                for a in (*node.args, *node.kwargs.values())
                if not any(a is out for out in effects.out)
            )
        first = len(self.table.storages)
        also = reads if effects.unknown else ()
        if effects.unknown and effects.sets_context:  # from here on it may stand for any of them
            self.values |= {
                source: map_tensors(lambda _: reads, source.meta.get("val"))
                for source in node.all_input_nodes
            }
        self.values[node] = value = (
            self._identified(node, also) if effects.by_identity else self._result(node, effects)
        )
        aliases = unique(s for s in storages_in(value) if s < first)
        return NodeStorages(
            allocates=tuple(range(first, len(self.table.storages))),
            reads=reads,
            writes=writes,
            aliases=aliases,
        )

    def _result(self, node: torch.fx.Node, effects: Effects) -> Tree:
        """Return the value of an operator call: for each return value the storages that it shares,
        or new ones.
        """
        fresh: dict[int, int] = {}
        value = _meta_value(node) if effects.shares else ()
        if len(effects.shares) == 1:
            return self._returned(value, effects.shares[0], fresh)
        if not effects.shares:
            return ()
        values = value if isinstance(value, list | tuple) else (value,) * len(effects.shares)
        return [
            self._returned(v, shared, fresh)
            for v, shared in zip(values, effects.shares, strict=False)
        ]

    def _returned(self, value: Any, shared: tuple[Any, ...], fresh: dict[int, int]) -> Tree:
        if not shared:
            return map_tensors(lambda tensor: (self._fresh(tensor, fresh),), value)
        if (
            len(shared) == 1
            and isinstance(value, list | tuple)
            and isinstance(shared[0], list | tuple)
            and len(value) == len(shared[0])
        ):
            return [
                self._value(argument) for argument in shared[0]
            ]  # list in, list out: element by element
        storages = self._storages_of(shared)
        return map_tensors(lambda _: storages, value)

    def _fresh(self, tensor: torch.Tensor, fresh: dict[int, int]) -> int:
        """Return a new storage, the same for results that share a fake storage."""
        key = storage_key(tensor)
        size = needed_bytes(tensor)
        if key not in fresh:
            fresh[key] = self._new(tensor, size, kept=False)
        else:
            known = self.table.storages[fresh[key]]
            self.table.storages[fresh[key]] = StorageRecord(
                size_bytes=max(known.size_bytes, size), kept=False
            )
        return fresh[key]

    def _identified(self, node: torch.fx.Node, also: tuple[int, ...]) -> Tree:
        """Return the value of a call without a schema: shared where the fake results share, and
        ``also`` with these storages.
        """
        passed: dict[int, tuple[int, ...]] = {}
        for source in node.all_input_nodes:
            for value in (source.meta.get("val"), source.meta.get(STANDS_FOR)):
                tensors = (
                    leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)
                )
                for tensor, ids in zip(
                    tensors, storages_by_tensor(self._value(source)), strict=False
                ):
                    passed.setdefault(storage_key(tensor), ids)
        fresh: dict[int, int] = {}

        def shared(tensor: torch.Tensor) -> tuple[int, ...]:
            return unique(
                (*(passed.get(storage_key(tensor)) or (self._fresh(tensor, fresh),)), *also)
            )

        return map_tensors(shared, node.meta.get("val"))

    def _new(self, tensor: torch.Tensor, size_bytes: int, *, kept: bool) -> int:
        s = len(self.table.storages)
        self.table.storages.append(StorageRecord(size_bytes=size_bytes, kept=kept))
        if rests_on_assumed(tensor):
            self.table.assumed.add(s)
        return s

    def _value(self, argument: Any) -> Tree:
        return self.values[argument] if isinstance(argument, torch.fx.Node) else ()

    def _storages_of(self, arguments: Iterable[Any]) -> tuple[int, ...]:
        """Return the storages behind nodes, or lists of nodes."""
        flat: list[torch.fx.Node] = []
        for argument in arguments:
            if isinstance(argument, torch.fx.Node):
                flat.append(argument)
            elif isinstance(argument, list | tuple):
                flat += (leaf for leaf in argument if isinstance(leaf, torch.fx.Node))
        return unique(s for node in flat for s in storages_in(self._value(node)))


def _meta_value(node: torch.fx.Node) -> Any:
    if "val" not in node.meta:
        raise InputError(
            f'node {node.name} ({node.target}): expected meta["val"] with its shape, found none;'
            " trace with fake tensors (make_fx) or run FakeTensorProp first"
        )
    return node.meta["val"]


def _constant(node: torch.fx.Node) -> Any:
    """Return the attribute that a get_attr node reads: a tensor, or a subgraph."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        if not hasattr(value, name):
            raise InputError(
                f"node {node.name}: expected the attribute {node.target} on the graph module, found"
                " none; hand in the traced module"
            )
        value = getattr(value, name)
    return value
