"""Activation checkpointing: which nodes of a layer the partitioner recomputes in backward.

Tags are those that ``torch.utils.checkpoint`` leaves when Dynamo traces it (``recompute`` and ``ac_graph_id``).
"""

from operator import getitem

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from apsched.capture.joint import Tag
from apsched.models.options import ModelOptions

_ATTENTION = "_scaled_dot_product_"
_PRODUCTS = ("mm", "bmm", "_grouped_mm")
_REDUCTIONS = ("reduce_scatter_tensor", "all_reduce", "all_to_all_single")


def checkpoint_tag(options: ModelOptions, num_layers: int) -> Tag | None:
    """Return what marks the checkpointed layers of a joint graph, or ``None`` without activation checkpointing."""
    layers = {f"layers.{layer}": layer for layer in options.checkpointed_layers(num_layers)}
    if not layers:
        return None
    selective = options.activation_checkpoint == "selective"

    def tag(joint: GraphModule) -> None:
        products = 0
        for node in joint.graph.nodes:
            layer = layers.get(_layer_of(node))
            if layer is None or node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
                continue
            products += _operator(node) in _PRODUCTS
            node.meta["ac_graph_id"] = layer
            save = selective and _is_saved(node, products)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return tag


def _is_saved(node: Node, products: int) -> bool:
    """Return whether selective checkpointing saves ``node``: TorchTitan's choice, with its results and waits."""
    operator = _operator(node)
    if node.target is getitem or operator == "wait_tensor":
        return _is_saved(node.all_input_nodes[0], products)
    if operator in _PRODUCTS:
        return products % 2 == 1
    return operator.startswith(_ATTENTION) or operator in _REDUCTIONS


def _operator(node: Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


def _layer_of(node: Node) -> str:
    """Return ``layers.N`` of the module that ``node`` comes from, or an empty string."""
    for name in node.meta.get("nn_module_stack") or ():
        if name.startswith("layers.") and name.count(".") == 1:
            return str(name)
    return ""
