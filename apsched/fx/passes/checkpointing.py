"""Activation checkpointing: which nodes of a layer the partitioner recomputes in backward.

Tags are those that ``torch.utils.checkpoint`` leaves when Dynamo traces it (``recompute`` and
``ac_graph_id``).
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from apsched.errors import InputError
from apsched.fx.collectives import tensor_bytes, tensors_of
from apsched.fx.graph_copies import copied
from apsched.fx.passes.parameters import gather_nodes, is_backward, mark_parameters
from apsched.fx.passes.run_passes import Pass, PassList
from apsched.torch_compat.sizes import same_sizes

logger = logging.getLogger(__name__)

_ATTENTION = "_scaled_dot_product_"
_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")
_REDUCTIONS = ("reduce_scatter_tensor", "all_reduce", "all_to_all_single")
_CHOICES = "none, full, selective or every-N (such as every-2)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Choices of activation checkpointing."""

    every: int
    """Every so many layers are recomputed; 0 for none."""
    selective: bool = False
    """Expensive nodes in them are saved."""

    @classmethod
    def parse(cls, text: str) -> "Checkpointing":
        """Return the choice that ``text`` names: ``none``, ``full``, ``selective`` or
        ``every-N``.
        """
        known = {
            "none": cls(every=0),
            "full": cls(every=1),
            "selective": cls(every=1, selective=True),
        }
        if text in known:
            return known[text]
        prefix, _, count = text.partition("every-")
        if prefix or not count.isdecimal() or int(count) < 1:
            raise InputError(f"activation_checkpoint must be {_CHOICES}; found {text!r}")
        return cls(every=int(count))

    def passes(self, layers: Sequence[str]) -> PassList:
        """Return the pass for a model whose layers have these names; none where nothing is
        recomputed.
        """
        return (
            checkpoint_activations(layers[:: self.every], selective=self.selective)
            if self.every
            else ()
        )


def checkpoint_activations(layers: Sequence[str], *, selective: bool = False) -> PassList:
    """Return the pass that recomputes the modules named by ``layers`` in backward; no pass where
    there are none.

    All of a layer is recomputed, or with ``selective`` all but its expensive nodes: attention,
    reductions over process ranks, every second matrix product (TorchTitan's choice), and the first
    residual sum, from which the second half of a layer starts. In these layers that takes the place
    of checkpointing that the model does itself.
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
    own = any("ac_graph_id" in node.meta for node in joint.graph.nodes)
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
        node.meta["ac_graph_id"] = layer if own else numbers[layer]
        node.meta["recompute"] = (
            CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
        )
    if own:
        _number(joint)


def _number(joint: GraphModule) -> None:
    """Number the regions of ``joint``, layers and those that the model checkpoints itself, in the
    order in which they run: the partitioner saves the results between a region and a later one.
    """
    places: dict[object, int] = {}
    for node in joint.graph.nodes:
        if "ac_graph_id" in node.meta:
            region = node.meta["ac_graph_id"]
            node.meta["ac_graph_id"] = places.setdefault(region, len(places))


def save_regions_of_several_units(unit_of: Mapping[str, int]) -> Pass:
    """Return the pass that has backward recompute no region with parameters of several units of
    FSDP2, and logs it; ``unit_of`` has parameter -> unit.

    The result of a region that forward reads behind it is saved, as in eager torch: recomputed for
    the head, it would have the last region gathered before the head. Eager FSDP2 gathers the units
    of a wider region once for the recomputation and once more for their backward, in
    two orders; its settings are about one.
    """

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        units: dict[object, set[int]] = {}
        for node, name in gather_nodes(result.graph).items():
            if "ac_graph_id" in node.meta and name in unit_of:
                units.setdefault(node.meta["ac_graph_id"], set()).add(unit_of[name])
        wide = {region for region, found in units.items() if len(found) > 1}
        for node in result.graph.nodes:
            if node.meta.get("ac_graph_id") in wide:
                del node.meta["ac_graph_id"], node.meta["recompute"]
            elif "ac_graph_id" in node.meta and any(map(_is_outside, node.users)):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if wide:
            logger.warning(
                "%d checkpointed regions have several units of fully_shard each: FSDP2 gathers"
                " these units twice in backward, which is not priced; memory counts all"
                " activations of the regions, which is too much, and time no recomputation; for"
                " exact numbers call fully_shard on each region, and on no module in it",
                len(wide),
            )
        return result

    return Pass(name="save_regions_of_several_units", run=run)


def _is_outside(user: Node) -> bool:
    """Return whether ``user`` is a call of forward in no region."""
    return user.op == "call_function" and "ac_graph_id" not in user.meta and not is_backward(user)


def _is_heavy(node: Node, products: int) -> bool:
    """Return whether ``node``, at or behind the matrix product number ``products``, is saved;
    results and waits of saved nodes are saved, too.
    """
    operator = _operator(node)
    if node.target is getitem or operator == "wait_tensor":
        return _is_heavy(node.all_input_nodes[0], products)
    if operator in _PRODUCTS:
        return products % 2 == 1
    return operator.startswith(_ATTENTION) or operator in _REDUCTIONS


def _is_sum(node: Node) -> bool:
    """Return whether ``node`` adds two tensors of one shape."""
    shapes = [
        tuple(source.meta["val"].shape)
        for source in node.all_input_nodes
        if isinstance(source.meta.get("val"), torch.Tensor)
    ]
    return _operator(node) == "add" and len(shapes) == 2 and same_sizes(*shapes)


def _operator(node: Node) -> str:
    return (
        node.target.overloadpacket.__name__
        if isinstance(node.target, torch._ops.OpOverload)
        else ""
    )


def blocks_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the blocks of a model: the children of its outermost ``ModuleList`` and
    ``ModuleDict``, whatever their class.

    A ``ModuleDict`` holds blocks where its children are of one class; otherwise it is a set of
    parts that have names.
    """
    found: list[str] = []

    def visit(name: str, parent: nn.Module) -> None:
        for key, child in parent.named_children():
            path = f"{name}.{key}" if name else key
            if _holds_blocks(child):
                found.extend(
                    f"{path}.{own}"
                    for own, block in child.named_children()
                    if any(True for _ in block.parameters())
                )
            else:
                visit(path, child)

    visit("", module)
    return tuple(found)


def _holds_blocks(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 0
    return (
        isinstance(module, nn.ModuleDict)
        and len(module) > 0
        and len({type(child).__name__ for child in module.values()}) == 1
    )


def recompute_gathers(*, reshard_after_forward: bool = True, kept: Collection[str] = ()) -> Pass:
    """Return the pass that names the parameter of each node which serves one, and tags gathers for
    the partitioner.

    With ``reshard_after_forward`` the whole single-input chain behind a gather's wait (slice, cast,
    permute, view) is recomputed in backward. Where only the gather is tagged, the partitioner saves
    the result of the chain: a cast or transposed copy of every parameter (AutoParallel #469).
    Parameters ``kept`` are not gathered again.
    """

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        mark_parameters(result.graph, reshard_after_forward=reshard_after_forward, kept=kept)
        return result

    return Pass(
        name="recompute_gathers",
        run=run,
        spec=partial(_check_chains, kept=kept) if reshard_after_forward else None,
    )


def _check_chains(joint: GraphModule, kept: Collection[str] = ()) -> None:
    """Raise InputError where part of a chain is tagged and part is not."""
    for node, name in gather_nodes(joint.graph).items():
        if "recompute" not in node.meta and name not in kept:
            raise InputError(
                f"node {node.name}: expected a recompute tag on all that only moves a parameter,"
                " found none"
            )


def saved_nodes(forward: GraphModule, num_outputs: int) -> list[Node]:
    """Return the values that the forward graph passes to backward: its outputs after the first
    ``num_outputs``, without inputs passed on.
    """
    outputs = forward.graph.output_node().args[0]
    assert isinstance(outputs, list | tuple)
    saved = [value for value in outputs[num_outputs:] if isinstance(value, Node)]
    return [node for node in dict.fromkeys(saved) if node.op != "placeholder"]


def saved_bytes(forward: GraphModule, num_outputs: int) -> int:
    """Return the bytes of :func:`saved_nodes`."""
    return sum(
        tensor_bytes(tensor)
        for node in saved_nodes(forward, num_outputs)
        for tensor in tensors_of(node)
    )
