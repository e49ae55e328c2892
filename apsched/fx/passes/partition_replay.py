"""Partition replay: a module that was partitioned once keeps its decisions when it is compiled
again.

A compiler that partitions a joint graph, wraps both halves into a module and hands that to
``torch.compile`` (AutoParallel does) has it partitioned twice. The second joint graph is another
one: the nodes that the first backward recomputed stand in it twice. Equal nodes are merged, and the
min-cut partitioner then saves their results: every gathered parameter (AutoParallel #467, #485). So
the forward graph has tags on its saved values (:func:`tag_saved`), tracers copy the tags, and the
second partition saves just those values (:func:`replayed_saves`).
"""

from collections.abc import Iterable
from operator import getitem

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from apsched.fx.graph_copies import copied
from apsched.fx.passes.checkpointing import saved_nodes
from apsched.fx.passes.parameters import is_backward
from apsched.fx.passes.run_passes import Pass
from apsched.torch_compat.sizes import same_sizes

SAVED_KEY = "apsched_saved"
"""``node.meta["custom"][SAVED_KEY]`` of a node that backward gets: ``True``, or of one with several
results which of them.
"""


def tag_saved(num_outputs: int) -> Pass:
    """Return the pass that marks the saved values of a forward graph; ``num_outputs`` is the number
    of its outputs that are not for backward alone.

    Items of a node with several results are marked on that node, by index: tracers drop the
    metadata of ``getitem``. They drop that of views, too, which they make again, so the tensor
    behind a view is marked beside it.
    """

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        for node in saved_nodes(result, num_outputs):
            mark_saved(node)
        return result

    return Pass(name="tag_saved", run=run)


def mark_saved(node: Node) -> None:
    """Mark that forward hands ``node`` to backward, on it and on the tensor of which it is a
    view.
    """
    if node.target is getitem:
        parent = node.all_input_nodes[0]
        known = parent.meta.get("custom", {}).get(SAVED_KEY, ())
        _mark(parent, tuple(sorted({*known, node.args[1]})))
        return
    if node.op == "call_function":
        _mark(node, True)
    if is_whole_view(node):
        mark_saved(node.all_input_nodes[0])


def is_whole_view(node: Node) -> bool:
    """Return whether ``node`` is a view of all of another tensor."""
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or not node.target.is_view
        or len(node.all_input_nodes) != 1
    ):
        return False
    view, base = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    return (
        isinstance(view, torch.Tensor)
        and isinstance(base, torch.Tensor)
        and same_sizes([view.numel()], [base.numel()])
    )


def is_tagged(module: GraphModule) -> bool:
    """Return whether a joint graph has tags of an earlier partition."""
    return any(SAVED_KEY in node.meta.get("custom", {}) for node in module.graph.nodes)


def forget_spent_tags() -> Pass:
    """Return the pass that drops recompute tags, which tracers copy, too: their decision has been
    made.

    The second partition would take kept tags for new demands: the first one has marked the nodes
    next to a checkpointed layer as ``MUST_SAVE``, whether backward needs it or not.
    """

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        for node in result.graph.nodes:
            node.meta.pop("recompute", None)
            node.meta.pop("ac_graph_id", None)
        return result

    return Pass(name="forget_spent_tags", run=run)


def _mark(node: Node, value: object) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), SAVED_KEY: value}


def replayed_saves(nodes: Iterable[Node]) -> list[Node]:
    """Return the values to save of a joint graph with tags of an earlier partition; empty if there
    are none.

    Tags on backward nodes don't count: tracers copy those of the forward node to the nodes that
    follow from it in backward (AutoParallel #531). Later marks go first: ``MUST_SAVE`` is saved,
    ``PREFER_RECOMPUTE`` and ``MUST_RECOMPUTE`` are not.
    """
    nodes = [node for node in nodes if node.op == "call_function" and not is_backward(node)]
    tagged = [node for node in nodes if _is_saved(node)]
    if not tagged:
        return []
    wanted = {
        node
        for node in tagged
        if _policy(node) not in (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
    }
    return [node for node in nodes if node in wanted or _policy(node) is CheckpointPolicy.MUST_SAVE]


def _is_saved(node: Node) -> bool:
    if node.target is getitem:
        items = node.all_input_nodes[0].meta.get("custom", {}).get(SAVED_KEY, ())
        return isinstance(items, tuple) and node.args[1] in items
    return node.meta.get("custom", {}).get(SAVED_KEY) is True


def _policy(node: Node) -> object:
    node = node.all_input_nodes[0] if node.target is getitem else node
    return node.meta.get("recompute")
