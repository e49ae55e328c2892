"""Where a storage comes from, in words that are the same for like tensors of all layers."""

import re

from apsched.problem.problem import Problem

BUFFERS = "buffers of buckets"
KEPT = "parameters and what else the caller keeps"


def origin(problem: Problem, storage: int) -> str:
    """Return where a storage comes from: its module with layers as ``*`` and what made it, or that
    the graph was given it.
    """
    uses = problem.storages[storage]
    if uses.birth < 0:
        module = _layerless(problem.modules[uses.uses[0]]) if uses.uses else ""
        return f"given to the graph: {module}" if module else "given to the graph"
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


def _layerless(name: str, put: str = "*") -> str:
    """Return ``name`` with the numbers of layers (or of nodes) replaced."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", put, name) if put else re.sub(r"_\d+$", "", name)
