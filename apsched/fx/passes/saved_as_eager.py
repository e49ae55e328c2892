"""Saves of eager autograd: values that backward reads, which a compiler would compute again."""

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from apsched.fx.collectives import is_collective
from apsched.fx.graph_copies import copied
from apsched.fx.passes.parameters import is_backward
from apsched.fx.passes.run_passes import Pass
from apsched.torch_compat.graphs import is_parameter_or_buffer


def save_as_eager() -> Pass:
    """Return the pass that has backward compute only tagged nodes again: regions that the model
    checkpoints, and gathers of parameters.

    The min-cut partitioner recomputes pointwise nodes to save memory, also through several units of
    FSDP2, which are then gathered in another order than in eager torch. Values of parameters alone
    stay free, and so do views, which hold no memory of their own. The partitioner saves the results
    of collectives, also of those that autograd runs on saved values alone, and so places these in
    forward; here they stay in backward.
    """

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        activations: set[Node] = set()
        for node in result.graph.nodes:
            if node.op == "placeholder":
                if not is_parameter_or_buffer(node.meta.get("desc")):
                    activations.add(node)
            elif not is_backward(node) and not activations.isdisjoint(node.all_input_nodes):
                activations.add(node)
                if "recompute" not in node.meta and _is_computed(node):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif is_backward(node) and is_collective(node):
                node.meta["partitioner_tag"] = "must_be_in_backward"
        return result

    return Pass(name="save_as_eager", run=run)


def _is_computed(node: Node) -> bool:
    """Return whether the result of ``node`` is no view of its inputs and no part of a result."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return all(one.alias_info is None for one in target._schema.returns)
