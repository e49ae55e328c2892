"""One gather for each parameter, where the forward part of a graph gathers it several times
(several micro-batches in one graph, or a weight that is read twice), or where its backward was
traced with gathers of its own.
"""

from functools import partial

import torch
from torch.fx import GraphModule, Node

from apsched.fx.graph_copies import copied, finished
from apsched.fx.passes.parameters import gather_nodes, is_backward
from apsched.fx.passes.run_passes import Pass


def merge_gathers(*, backward: bool = False) -> Pass:
    """Return the pass that merges equal nodes of a joint graph between a parameter and its uses in
    forward: casts, gathers, waits and views. Values stay bit for bit.

    With ``backward`` also those of backward, for a graph whose tags decide which gathers run again
    there: a module that was partitioned before it was compiled has such nodes, behind ``detach``.

    The min-cut partitioner does so with all equal nodes, the default partitioner with none
    (torch/_functorch/partitioners.py).
    """
    return Pass(name="merge_gathers", run=partial(_merged, backward=backward))


def _merged(module: GraphModule, *, backward: bool) -> GraphModule:
    result = copied(module)
    first: dict[tuple[object, str], Node] = {}
    for node in gather_nodes(result.graph):
        if is_backward(node) and not backward:
            continue
        same = first.setdefault((node.target, repr((node.args, node.kwargs))), node)
        if backward and node.target is torch.ops.aten.detach.default:
            same = node.all_input_nodes[0]  # the same values: the graph has its gradients
        if same is not node:
            node.replace_all_uses_with(same)
            result.graph.erase_node(node)
    return finished(result)
