"""New nodes with their metadata: values, provenance, and the entries inherited from the collectives
that they stand for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from apsched.torch_compat.graphs import node_source
from apsched.writeback.members import Member

_PASS_NAME = "apsched"
_FROM_FIRST = ("nn_module_stack", "fwd_nn_module_stack", "custom", "stack_trace")
_WHERE_ALL_AGREE = ("autograd_backward", "recompute", "ac_graph_id", "partitioner_tag", "seq_nr")

Source = Callable[[Member], Node]
"""The origin of a new node in a member: its start or its wait."""


class Emitter:
    """Appends nodes to the new graph; names of the old graph stay free for its own nodes."""

    def __init__(self, graph: Graph, taken_names: set[str]) -> None:
        self._graph = graph
        self._taken = taken_names
        self._sources: dict[Node, Any] = {}

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        name: str,
        value: torch.Tensor | list[torch.Tensor] | None,
        role: str,
        members: Sequence[Member],
        of: Source,
    ) -> Node:
        """Append a call that stands for ``members`` and return it."""
        sources = [of(member) for member in members]
        node = self._graph.create_node(
            "call_function", target, args, kwargs or {}, name=self._fresh(name)
        )
        node.meta = _inherited(sources)
        node.meta["val"] = value
        node.meta["from_node"] = [self._source(source) for source in sources]
        node.meta["apsched"] = {
            "role": role,
            "members": [member.start.name for member in members],
            "sources": [source.name for source in sources],
        }
        return node

    def _fresh(self, base: str) -> str:
        name, k = base, 0
        while name in self._taken:
            k += 1
            name = f"{base}_{k}"
        self._taken.add(name)
        return name

    def _source(self, node: Node) -> Any:
        if node not in self._sources:
            self._sources[node] = node_source(node, _PASS_NAME)
        return self._sources[node]


def _inherited(sources: Sequence[Node]) -> dict[str, Any]:
    first = sources[0].meta
    meta = {key: first[key] for key in _FROM_FIRST if key in first}
    for key in _WHERE_ALL_AGREE:
        if key in first and all(
            key in source.meta and source.meta[key] == first[key] for source in sources
        ):
            meta[key] = first[key]
    return meta
