"""Repeated waits: torch 2.14 merges equal collectives, and leaves a wait for each use of the result
(torch/_functorch/compile_utils.py, fx_graph_cse merges no node with an effect). The first wait is
enough: the others return the same tensor, with nothing left to wait for.
"""

from torch.fx import GraphModule, Node

from apsched.fx.collectives import is_wait_tensor
from apsched.fx.graph_copies import copied


def without_repeated_waits(module: GraphModule) -> GraphModule:
    """Return ``module`` with one wait for each result of a collective, the first; itself where no
    wait is repeated.
    """
    if not any(_repeats(module)):
        return module
    copy = copied(module)
    for wait, first in _repeats(copy):
        wait.replace_all_uses_with(first)
        copy.graph.erase_node(wait)
    copy.recompile()
    return copy


def _repeats(module: GraphModule) -> list[tuple[Node, Node]]:
    """Return the repeated waits, each with the first one for the same result."""
    first: dict[Node, Node] = {}
    waits = [n for n in module.graph.nodes if is_wait_tensor(n) and len(n.all_input_nodes) == 1]
    pairs = [(wait, first.setdefault(wait.all_input_nodes[0], wait)) for wait in waits]
    return [(wait, one) for wait, one in pairs if wait is not one]
