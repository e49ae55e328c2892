"""The role of each collective, by the structure of the graph alone: no tags, no names, no
descriptors.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Node

from apsched.capture.captured import CapturedGraph
from apsched.fx.collectives import input_nodes
from apsched.fx.passes.roles import Role, roles_of
from apsched.graph.export.analysis import analyse
from apsched.graph.export.provenance import directions


def structural_roles(
    captured: CapturedGraph, group_ranks: Mapping[str, tuple[int, ...]]
) -> dict[Node, Role]:
    """Return start -> role, as :func:`apsched.fx.passes.roles.classify` would tag it.

    What :mod:`apsched.graph.export.placement` finds to take from graph inputs alone gathers a
    parameter, if those are inputs that the caller keeps: saved activations are gathered, too
    (sequence parallelism). What it finds to end in graph outputs alone, in backward, reduces a
    gradient.
    """
    analysis = analyse(replace(captured, parameter_names={}), group_ranks)
    nodes, placement = analysis.nodes, analysis.placement
    direction = directions(captured, nodes)
    gathers = {
        nodes[s] for s in placement.from_inputs if _inputs_before(nodes[s]) <= captured.kept_inputs
    }
    reductions = {nodes[s] for s in placement.to_outputs if direction[s] == "backward"}
    return roles_of(
        [nodes[s] for s in sorted(analysis.waits.wait_of_start)],
        gathers=gathers,
        reductions=reductions,
    )


def _inputs_before(start: Node) -> set[str]:
    """Return the names of the placeholders that ``start`` derives from."""
    seen: set[Node] = set()
    stack = list(input_nodes(start))
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return {node.name for node in seen if node.op == "placeholder"}
