"""Recompute tags: gathered parameters are gathered again in backward, or kept, as a whole chain."""

from torch.fx import GraphModule, Node

from apsched.collectives import tensor_bytes, tensors_of
from apsched.errors import InputError
from apsched.passes.copies import copied
from apsched.passes.manager import Pass
from apsched.passes.parameters import gather_nodes, mark_parameters


def recompute_gathers(*, reshard_after_forward: bool = True) -> Pass:
    """Return the pass that names the parameter of each node which serves one, and tags gathers for the partitioner.

    With ``reshard_after_forward`` the whole single-input chain behind a gather's wait (slice, cast, permute, view) is recomputed in
    backward. Where only the gather is tagged, the partitioner saves what the chain makes of it: a cast or transposed copy of every
    parameter (AutoParallel #469).
    """

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        mark_parameters(result.graph, reshard_after_forward=reshard_after_forward)
        return result

    return Pass(name="recompute_gathers", run=run, spec=_check_chains if reshard_after_forward else None)


def _check_chains(joint: GraphModule) -> None:
    """Raise InputError where part of a chain is tagged and part is not."""
    for node in gather_nodes(joint.graph):
        if "recompute" not in node.meta:
            raise InputError(f"node {node.name}: expected a recompute tag on all that only moves a parameter, found none")


def saved_nodes(forward: GraphModule, num_outputs: int) -> list[Node]:
    """Return what the forward graph hands to backward: its outputs behind the first ``num_outputs``, without inputs passed on."""
    outputs = forward.graph.output_node().args[0]
    assert isinstance(outputs, list | tuple)
    saved = [value for value in outputs[num_outputs:] if isinstance(value, Node)]
    return [node for node in dict.fromkeys(saved) if node.op != "placeholder"]


def saved_bytes(forward: GraphModule, num_outputs: int) -> int:
    """Return the bytes of :func:`saved_nodes`."""
    return sum(tensor_bytes(tensor, node) for node in saved_nodes(forward, num_outputs) for tensor in tensors_of(node))
