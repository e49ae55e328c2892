"""Activation checkpointing: which nodes of a layer the partitioner recomputes in backward.

Tags are those that ``torch.utils.checkpoint`` leaves when Dynamo traces it (``recompute`` and ``ac_graph_id``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from apsched.errors import InputError
from apsched.passes.copies import copied
from apsched.passes.manager import Pass, PassList
from apsched.passes.parameters import is_backward

_ATTENTION = "_scaled_dot_product_"
_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")
_REDUCTIONS = ("reduce_scatter_tensor", "all_reduce", "all_to_all_single")
_CHOICES = "none, full, selective or every-N (such as every-2)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """What people choose about activation checkpointing."""

    every: int
    """Every so many layers are recomputed; 0 for none."""
    selective: bool = False
    """What is heavy is saved in them."""

    @classmethod
    def parse(cls, text: str) -> "Checkpointing":
        """Return the choice that ``text`` names: ``none``, ``full``, ``selective`` or ``every-N``."""
        known = {"none": cls(every=0), "full": cls(every=1), "selective": cls(every=1, selective=True)}
        if text in known:
            return known[text]
        prefix, _, count = text.partition("every-")
        if prefix or not count.isdecimal() or int(count) < 1:
            raise InputError(f"activation_checkpoint must be {_CHOICES}; found {text!r}")
        return cls(every=int(count))

    def passes(self, layers: Sequence[str]) -> PassList:
        """Return the pass for a model whose layers have these names; none where nothing is recomputed."""
        return checkpoint_activations(layers[:: self.every], selective=self.selective) if self.every else ()


def checkpoint_activations(layers: Sequence[str], *, selective: bool = False) -> PassList:
    """Return the pass that recomputes the modules named by ``layers`` in backward; no pass where there are none.

    All of a layer is recomputed, or with ``selective`` all but what is heavy: attention, reductions over process ranks, every second
    matrix product (TorchTitan's choice), and the first residual sum, from which the second half of a layer starts.
    """
    if not layers:
        return ()
    numbers = {layer: k for k, layer in enumerate(layers)}

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        _tag(result, numbers, selective=selective)
        return result

    return (Pass(name="checkpoint_activations", run=run),)


def _tag(joint: GraphModule, numbers: Mapping[str, int], *, selective: bool) -> None:
    products, summed = 0, set()
    for node in joint.graph.nodes:
        stack = list(node.meta.get("nn_module_stack") or ())
        layer = next((name for name in stack if name in numbers), None)
        if layer is None or node.op != "call_function" or is_backward(node):
            continue
        products += _operator(node) in _PRODUCTS
        first_sum = stack[-1] == layer and layer not in summed and _is_sum(node)
        if first_sum:
            summed.add(layer)
        save = selective and (first_sum or _is_heavy(node, products))
        node.meta["ac_graph_id"] = numbers[layer]
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _is_heavy(node: Node, products: int) -> bool:
    """Return whether ``node``, at or behind the matrix product of that number, is saved; so are results and waits of what is."""
    operator = _operator(node)
    if node.target is getitem or operator == "wait_tensor":
        return _is_heavy(node.all_input_nodes[0], products)
    if operator in _PRODUCTS:
        return products % 2 == 1
    return operator.startswith(_ATTENTION) or operator in _REDUCTIONS


def _is_sum(node: Node) -> bool:
    """Return whether ``node`` adds two tensors of one shape."""
    shapes = [tuple(source.meta["val"].shape) for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    return _operator(node) == "add" and len(shapes) == 2 and shapes[0] == shapes[1]


def _operator(node: Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""
