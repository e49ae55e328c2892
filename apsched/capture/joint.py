"""Capture a training step: AOTAutograd's joint graph, partitioned into forward and backward as a
compiler gets them.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from apsched.capture.captured import Capture, CapturedGraph, SavedBytes
from apsched.capture.fake_values import with_missing_values
from apsched.capture.module_stack import recorded_modules, shared_modules_named_once
from apsched.fx.chains import mark_chains
from apsched.fx.collectives import group_name, is_communication
from apsched.fx.graph_copies import with_graph
from apsched.fx.passes.checkpointing import saved_bytes
from apsched.fx.passes.lists import add_at_the_end, joint_passes
from apsched.fx.passes.own_reductions import with_own_reductions
from apsched.fx.passes.parameters import parameter_names
from apsched.fx.passes.partition_replay import (
    forget_spent_tags,
    is_tagged,
    replayed_saves,
    tag_saved,
)
from apsched.fx.passes.roles import classify
from apsched.fx.passes.run_passes import PassList, run_passes
from apsched.fx.subgraphs import with_all_inside
from apsched.graph.garbage import rare_garbage_collection
from apsched.progress import working_on
from apsched.torch_compat.graphs import is_parameter_or_buffer, process_group_names
from apsched.torch_compat.partition import partitioned_graphs


def capture_module(
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    source: str,
    reshard_after_forward: bool = True,
    kept_parameters: Collection[str] = (),
    passes: PassList = (),
    count_saved: bool = False,
    num_micro_batches: int | None = None,
) -> Capture:
    """Return the forward and the backward graph of ``module(*inputs)``; nothing is computed.

    Parameters and inputs, also in tuples, may be real, or fake tensors of one fake mode; parameters
    may be DTensors: the graph then takes their local shards. With ``reshard_after_forward`` the
    gathered parameters are gathered again in backward, but for ``kept_parameters``. ``passes`` run
    on the joint graph first (docs/passes.md). With ``count_saved`` the joint graph is also
    partitioned without tags on gathers, and ``saved_bytes`` shows the effect of the tags. Sums of
    the gradients of a module that runs several times go behind all compute. A process group must
    run if the module uses one (:func:`apsched.capture.fake_world.world`).
    ``num_micro_batches`` is the required number of micro-batches that do not depend on each other
    (:mod:`apsched.fx.chains`); ``None``: any number.

    The forward graph has tags on the values that it saves. A module that runs such graphs is
    partitioned in the same way (:mod:`apsched.fx.passes.partition_replay`).

    The graphs are called as a compiler would call them::

        # in the order of the placeholders, DTensors as local shards
        loss, *saved = forward(*parameters, *buffers, *inputs)
        # one per forward input, None where there is none
        gradients = backward(*saved, tangent)

    Every node has ``meta["nn_module_stack"]`` (``fwd_nn_module_stack`` in backward) where a module
    made it, and ``meta["custom"]["apsched_parameter"]`` where it gathers a parameter or reduces its
    gradient, each gradient by itself; every collective has its role
    (:mod:`apsched.fx.passes.roles`).
    """

    given = {one.name for one in passes}
    sums = (one for one in add_at_the_end() if one.name not in given)
    passes = (*passes, *sums, mark_chains(num_micro_batches))

    def prepare(joint: GraphModule) -> GraphModule:
        if is_tagged(joint):
            return run_passes(joint, (forget_spent_tags(), *passes, classify())).module
        return run_passes(
            joint,
            (
                *passes,
                *joint_passes(reshard_after_forward=reshard_after_forward, kept=kept_parameters),
            ),
        ).module

    untagged: list[GraphModule] = []

    def unprepared(joint: GraphModule) -> GraphModule:
        return run_passes(joint, (*passes, classify())).module

    with recorded_modules(module), shared_modules_named_once(module), rare_garbage_collection():
        forward, backward, num_outputs = partitioned_graphs(
            module,
            inputs,
            prepare,
            is_static=lambda node: is_parameter_or_buffer(node.meta.get("desc")),
            saves=_saves,
            beside=(unprepared, untagged.append) if count_saved else None,
        )
    saved = None
    if untagged:
        saved = SavedBytes(
            tagged=saved_bytes(forward, num_outputs), untagged=saved_bytes(untagged[0], num_outputs)
        )
    working_on(f"missing values of {len(forward.graph.nodes)} nodes", is_long=True)
    forward = run_passes(with_missing_values(forward), (tag_saved(num_outputs),)).module
    first = _captured("forward", forward, kept=forward.graph.find_nodes(op="placeholder"))
    graphs = [replace(first, has_backward=backward is not None)]
    if backward is not None:
        backward = with_own_reductions(backward)
        backward = with_missing_values(backward)  # torch makes nodes without: those of generators
        backward = with_graph(backward, backward.graph, like=forward)  # its code is made late, too
        graphs.append(
            _captured("backward", backward, kept=passed_through(forward.graph, backward.graph))
        )
    used = {argument for graph in graphs for argument in _group_names(graph.module)}
    ranks = {name: ranks for name, ranks in sorted(process_group_names().items()) if name in used}
    return Capture(source=source, graphs=tuple(graphs), group_ranks=ranks, saved_bytes=saved)


def _saves(joint: GraphModule) -> list[Node]:
    """Return the values to save that an earlier partition chose; the partition begins here."""
    working_on(f"partition of {len(joint.graph.nodes)} nodes", is_long=True)
    return replayed_saves(joint.graph.nodes)


def _captured(name: str, module: GraphModule, *, kept: Iterable[Node]) -> CapturedGraph:
    kept_names = {node.name for node in kept}
    _drop_opaque(module)
    placeholders = {node.name for node in module.graph.find_nodes(op="placeholder")}
    return CapturedGraph(
        name=name,
        module=module,
        kept_inputs=frozenset(kept_names & placeholders),
        parameter_names=parameter_names(module.graph),
    )


def _drop_opaque(module: GraphModule) -> None:
    """Remove inputs and outputs that are no tensors or numbers: DTensor's device meshes, which no
    node uses.
    """
    graph = module.graph
    opaque = [
        node
        for node in graph.find_nodes(op="placeholder")
        if not isinstance(node.meta["val"], torch.Tensor | torch.SymInt | int)
    ]
    output = graph.output_node()
    opaque = [node for node in opaque if not set(node.users) - {output}]
    keep = [k for k, value in enumerate(output.args[0]) if value not in opaque]  # type: ignore[arg-type]
    for key in ("desc", "output_stack_traces"):
        if key in output.meta:
            output.meta[key] = [output.meta[key][k] for k in keep]
    output.args = (tuple(output.args[0][k] for k in keep),)  # type: ignore[index]
    for node in opaque:
        graph.erase_node(node)
    module.recompile()


def passed_through(forward: torch.fx.Graph, backward: torch.fx.Graph) -> list[Node]:
    """Return the backward inputs that are forward inputs, or views of them: their memory is the
    caller's.
    """
    outputs = forward.output_node().args[0]
    saved = {v.name: v for v in outputs if isinstance(v, Node)}  # type: ignore[union-attr]
    return [
        node
        for node in backward.find_nodes(op="placeholder")
        if node.name in saved and _base(saved[node.name]).op == "placeholder"
    ]


def _base(node: Node) -> Node:
    while (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.is_view
    ):
        node = node.all_input_nodes[0]
    return node


def _group_names(module: GraphModule) -> Iterable[str]:
    nodes = with_all_inside(module.graph.nodes)
    return (group_name(node) for node in nodes if is_communication(node.target))
