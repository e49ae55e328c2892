"""One gather for each parameter, where the forward part of a graph gathers it several times:
several micro-batches in one graph, or a weight that is read twice.
"""

from torch.fx import GraphModule, Node

from apsched.fx.graph_copies import copied, finished
from apsched.fx.passes.parameters import gather_nodes, is_backward
from apsched.fx.passes.run_passes import Pass


def merge_gathers() -> Pass:
    """Return the pass that merges equal nodes of a joint graph between a parameter and its uses in
    forward: casts, gathers, waits and views. Values stay bit for bit.

    The min-cut partitioner does so with all equal nodes, the default partitioner with none
    (torch/_functorch/partitioners.py).
    """
    return Pass(name="merge_gathers", run=_merged)


def _merged(module: GraphModule) -> GraphModule:
    result = copied(module)
    first: dict[tuple[object, str], Node] = {}
    for node in gather_nodes(result.graph):
        if is_backward(node):
            continue
        same = first.setdefault((node.target, repr((node.args, node.kwargs))), node)
        if same is not node:
            node.replace_all_uses_with(same)
            result.graph.erase_node(node)
    return finished(result)
