"""The origin of a storage, in text that is the same for like tensors of all layers."""

import re
from collections.abc import Iterable

from apsched.problem.problem import Problem

BUFFERS = "buffers of buckets"
KEPT = "parameters and other tensors of the caller"
KEPT_ACROSS = "kept gathered"
"""Gathered parameters that one graph hands to the next (forward to backward, or to the next
micro-batch), so that they are not gathered again.
"""


def origin(problem: Problem, storage: int) -> str:
    """Return the origin of a storage: its module with layers as ``*`` and the node that made it, or
    that it is an input of the graph.
    """
    uses = problem.storages[storage]
    if uses.birth < 0:
        module = _layerless(problem.modules[uses.uses[0]]) if uses.uses else ""
        return f"input of the graph: {module}" if module else "input of the graph"
    collective = problem.collective_of_node.get(uses.birth)
    module = _layerless(problem.modules[uses.birth])
    if collective is not None:
        kind = problem.keys[problem.collectives[collective].key].kind
        gathered = _layerless(problem.collectives[collective].module)
        return f"{kind} of {gathered or module or problem.node_names[uses.birth]}"
    return (
        f"{_layerless(problem.node_names[uses.birth], '')} of {module}"
        if module
        else problem.node_names[uses.birth]
    )


def storages_of(problem: Problem, names: Iterable[str]) -> frozenset[int]:
    """Return the storages of the values of the nodes ``names``: inputs, waits, and nodes that
    allocate; names that the problem has not are left out.
    """
    places = {name: node for node, name in enumerate(problem.node_names)}
    nodes = {places[name] for name in names if name in places}
    gathered = {c.output_storage for c in problem.collectives if c.wait in nodes}
    made = {
        s
        for s, storage in enumerate(problem.storages)
        if (storage.birth in nodes if storage.birth >= 0 else nodes & {*storage.uses[:1]})
    }
    return frozenset(gathered | made)


def _layerless(name: str, put: str = "*") -> str:
    """Return ``name`` with the numbers of layers (or of nodes) replaced."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", put, name) if put else re.sub(r"_\d+$", "", name)
