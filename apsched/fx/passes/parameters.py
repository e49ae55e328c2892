"""Find the nodes that serve one parameter: from its shard to its first use, and from its gradient
to the output.
"""

from collections.abc import Collection, Mapping
from operator import getitem

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from apsched.torch_compat.graphs import gradient_of, parameter_behind

PARAMETER_KEY = "apsched_parameter"
"""``node.meta["custom"][PARAMETER_KEY]`` is the name of the parameter that a node gathers, casts,
views or reduces.
"""

_AFTER_ALL_CHECKPOINTS = 100_000
"""``ac_graph_id`` above that of any checkpointed region, so that the partitioner sees no boundary
here (TorchTitan does the same).
"""

_aten, _prims = torch.ops.aten, torch.ops.prims
_COPIES = {
    _aten._to_copy.default,
    _aten._unsafe_view.default,
    _aten.cat.default,
    _aten.clone.default,
    _aten.constant_pad_nd.default,
    _aten.slice_backward.default,
    _prims.convert_element_type.default,
}
_SCALINGS = {_aten.div.Tensor, _aten.div.Scalar, _aten.mul.Tensor, _aten.mul.Scalar}


def serves_alone(node: Node) -> bool:
    """Return whether ``node`` only moves data: a view, a cast, a copy, a collective or its wait."""
    if node.op != "call_function":
        return False
    if node.target is getitem or node.target in _COPIES:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.namespace == "_c10d_functional" or node.target.is_view
    )


def is_scaling(node: Node) -> bool:
    """Return whether ``node`` multiplies or divides one tensor by a number: the mean of a gradient
    over process ranks.
    """
    return (
        node.op == "call_function"
        and node.target in _SCALINGS
        and sum(isinstance(arg, Node) for arg in node.args) == 1  # a square has the same one twice
    )


def is_backward(node: Node) -> bool:
    """Return whether a tracer or partitioner marked ``node`` as backward."""
    return node.meta.get("partitioner_tag") == "is_backward" or bool(
        node.meta.get("autograd_backward")
    )


def tag_backward(joint: torch.fx.Graph, num_forward_outputs: int) -> None:
    """Tag nodes as backward that were traced in backward with the tag of forward, and that no
    forward output needs.

    A module whose backward computes a forward node again, and keeps the notes of its nodes while it
    is traced, has such nodes. The default partitioner would take all nodes before them for forward
    (torch/_functorch/partitioners.py, default_partition).
    """
    outputs = list(joint.output_node().args[0])  # type: ignore[arg-type]
    todo = [value for value in outputs[:num_forward_outputs] if isinstance(value, Node)]
    of_forward: set[Node] = set()
    while todo:
        node = todo.pop()
        if node not in of_forward:
            of_forward.add(node)
            todo += node.all_input_nodes
    backward = False
    for node in joint.nodes:
        tag = node.meta.get("partitioner_tag")
        backward = backward or (node.op == "call_function" and tag == "is_backward")
        if backward and tag == "is_forward" and node not in of_forward:
            node.meta["partitioner_tag"] = "is_backward"


def gather_nodes(joint: torch.fx.Graph, names: Mapping[str, str] | None = None) -> dict[Node, str]:
    """Return node -> parameter, for every node between a parameter and its first uses, in either
    direction. ``names`` has placeholder -> parameter; ``None``: as descriptors say.
    """
    names = parameter_names(joint) if names is None else names
    owner: dict[Node, str] = {}
    for node in joint.nodes:
        if node.op == "placeholder":
            name = names.get(node.name)
            if name is not None:
                owner[node] = name
        elif serves_alone(node):
            owners = {owner.get(source) for source in node.all_input_nodes}
            name = owners.pop() if len(owners) == 1 else None
            if name is not None:
                owner[node] = name
    return {node: name for node, name in owner.items() if node.op != "placeholder"}


def gradient_nodes(joint: torch.fx.Graph) -> dict[Node, str]:
    """Return backward node -> parameter, for every node between the compute of a gradient and the
    output.
    """
    output = joint.output_node()
    descriptors = output.meta.get("desc") or ()
    final: dict[Node, set[str | None]] = {}
    for value, descriptor in zip(output.args[0], descriptors, strict=False):  # type: ignore[arg-type]
        if isinstance(value, Node):
            final.setdefault(value, set()).add(gradient_of(descriptor))
    owner: dict[Node, str] = {}
    for node in reversed(joint.nodes):
        if not (serves_alone(node) or is_scaling(node)) or not is_backward(node):
            continue
        owners = {owner.get(user) for user in node.users if user is not output} | final.get(
            node, set()
        )
        name = owners.pop() if len(owners) == 1 else None
        if name is not None:
            owner[node] = name
    return owner


def mark_parameters(
    joint: torch.fx.Graph, *, reshard_after_forward: bool, kept: Collection[str] = ()
) -> None:
    """Name the parameter on each node that serves one, and have the partitioner gather again in
    backward, but for the parameters ``kept``.

    The whole chain up to the last layout op is marked for recomputation: marked less, the
    partitioner saves a transposed view or copy of every gathered parameter.
    """
    gathers = gather_nodes(joint)
    for node, name in (gathers | gradient_nodes(joint)).items():
        node.meta["custom"] = {**node.meta.get("custom", {}), PARAMETER_KEY: name}
    for node, name in gathers.items():
        if reshard_after_forward and name not in kept:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _AFTER_ALL_CHECKPOINTS
        else:  # activation checkpointing recomputes activations, not parameters
            node.meta.pop("recompute", None)
            node.meta.pop("ac_graph_id", None)


def parameter_names(graph: torch.fx.Graph) -> Mapping[str, str]:
    """Return placeholder -> name of the parameter, for the placeholders that are one."""
    named = (
        (node.name, parameter_behind(node.meta.get("desc")))
        for node in graph.find_nodes(op="placeholder")
    )
    return {placeholder: name for placeholder, name in named if name is not None}
