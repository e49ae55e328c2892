"""Parameters kept from forward to backward in TorchTitan's joint graph: tags for TorchTitan's pass
that repeats nodes of forward in backward.

For ``auto`` the graph in which every parameter is gathered again is cut in two at its first
backward node, and both halves are solved as one step. The best choice for them is compared in the
joint graph with none kept and with all kept.
"""

import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from apsched.capture.captured import CapturedGraph
from apsched.capture.graph_module import capture_graph
from apsched.capture.joint import passed_through
from apsched.compiler.keep import (
    CapturedPair,
    fastest_in_joint,
    none_fits,
    resharded_in_joint,
)
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.answer import Answers
from apsched.compiler.schedule_captured import process_rank
from apsched.compiler.schedule_graph import prepare_joint
from apsched.compiler.settings import Settings
from apsched.errors import InputError
from apsched.fx.collectives import is_collective
from apsched.fx.control_deps import without_control_deps
from apsched.fx.graph_copies import copied
from apsched.fx.passes.parameters import gather_nodes, is_backward
from apsched.names import in_node as in_node_entry
from apsched.torch_compat.compilers import describe_gradients
from apsched.whole_step.choices import Choice, kept_in_node, kept_whole
from apsched.whole_step.keep_request import AUTO, KeepRequest

logger = logging.getLogger(__name__)

PassFunction = Callable[..., GraphModule]
_CHOSEN = "%d of %d parameters are not gathered again, %d are to be resharded in their node"


def apsched_keep_pass(
    gm: GraphModule,
    example_inputs: Any = None,
    *,
    keep: KeepRequest,
    names: Callable[[GraphModule], Mapping[str, str]],
    gradients: Callable[[GraphModule], Mapping[int, str]],
    describe: Callable[[GraphModule], Mapping[str, str]],
    until_scheduled: Sequence[PassFunction],
    settings: Settings,
    solved: Answers,
    in_node: set[str],
) -> GraphModule:
    """Return ``gm`` with its gathers tagged as ``keep`` says; if that fails with
    ``on_error="fallback"``, as TorchTitan tagged them. ``in_node`` gets the parameters that
    :func:`apsched_reshard_pass` has to reshard in their node.

    ``names`` returns placeholder -> parameter, ``gradients`` output -> parameter. ``describe`` has
    the names, too, and changes a graph in place as the scheduling pass does before it captures.
    ``until_scheduled`` are the passes that run between this one and the scheduling pass, and
    ``solved`` gets the answers that are found. A graph without collectives stays as it is.
    """
    if not any(is_collective(node) for node in gm.graph.nodes):
        return gm
    shards = names(gm)

    def in_two(joint: GraphModule) -> CapturedPair:
        return halves(joint, shards)

    def repeated(kept: Choice) -> GraphModule:
        joint = copied(gm)
        describe_gradients(joint.graph, gradients(gm))
        tag_gathers(tagged_gathers(joint.graph, shards), kept_whole(kept))
        for one in until_scheduled:
            joint = one(joint, example_inputs)
        return resharded_in_joint(joint, in_two, kept_in_node(kept), settings)

    def prepare(agreement: GraphAgreement | None) -> tuple[dict[str, list[Node]], Choice]:
        gathers = tagged_gathers(gm.graph, shards)
        if not gathers:
            raise InputError(
                "keep: expected forward nodes with a tag whether backward repeats them, found none;"
                " leave tag_with_memory_policy_pass out of --compile.disable_passes"
            )
        if keep.mode != AUTO:
            if text := none_fits(keep, sorted(gathers)):
                raise InputError(text)
            return gathers, keep.fitting([*sorted(gathers), *map(in_node_entry, sorted(gathers))])
        # the passes run on every process rank: they may make process groups
        again = repeated(Choice())
        chosen = fastest_in_joint(
            sorted(gathers),
            in_two(again),
            lambda kept: _captured_joint(repeated(kept) if kept else again, describe),
            settings,
            agreement,
            solved,
        )
        return gathers, chosen

    if (prepared := prepare_joint(gm, settings, prepare)) is not None:
        gathers, chosen = prepared
        whole = kept_whole(chosen)
        tag_gathers(gathers, whole)
        in_node.update(kept_in_node(chosen))
        if process_rank() == 0:
            logger.info(_CHOSEN, len(whole), len(gathers), len(in_node))
    return gm


def apsched_reshard_pass(
    gm: GraphModule,
    example_inputs: Any = None,
    *,
    names: Callable[[GraphModule], Mapping[str, str]],
    settings: Settings,
    in_node: Collection[str],
) -> GraphModule:
    """Return ``gm``, in which backward gathers each of the parameters ``in_node`` again, with these
    resharded in their node: forward keeps one part of each, and backward gathers the parts. If that
    fails with ``on_error="fallback"``, ``gm`` as it is.
    """
    if not in_node:
        return gm
    shards = names(gm)

    def prepare(agreement: GraphAgreement | None) -> GraphModule:
        return resharded_in_joint(gm, lambda joint: halves(joint, shards), in_node, settings)

    made = prepare_joint(gm, settings, prepare)
    return gm if made is None else made


def _captured_joint(
    joint: GraphModule, describe: Callable[[GraphModule], Mapping[str, str]]
) -> CapturedGraph:
    joint = copied(joint)
    names_of_state = describe(joint)
    free = without_control_deps(joint)
    return capture_graph(free, name="joint", parameter_names=names_of_state)


def tagged_gathers(graph: torch.fx.Graph, names: Mapping[str, str]) -> dict[str, list[Node]]:
    """Return parameter -> the forward nodes between it and its first uses, of the parameters whose
    nodes all have a tag; ``names`` has placeholder -> parameter.
    """
    found: dict[str, list[Node]] = {}
    for node, name in gather_nodes(graph, names).items():
        if not is_backward(node):
            found.setdefault(name, []).append(node)
    return {k: nodes for k, nodes in found.items() if all("recompute" in n.meta for n in nodes)}


def tag_gathers(gathers: Mapping[str, list[Node]], kept: Collection[str]) -> None:
    """Tag the nodes of ``gathers``: the parameters ``kept`` are not gathered again in backward, the
    others are.
    """
    for name, nodes in gathers.items():
        for node in nodes:
            node.meta["recompute"] = (
                CheckpointPolicy.MUST_SAVE if name in kept else CheckpointPolicy.MUST_RECOMPUTE
            )


def halves(joint: GraphModule, names: Mapping[str, str]) -> CapturedPair:
    """Return ``joint`` in two: the nodes before its first backward node, and the rest. ``names``
    has placeholder -> parameter.

    Forward returns its outputs of ``joint``, then all that backward reads, which takes these values
    as its inputs, under the same names.
    """
    calls = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
    first = next((k for k, node in enumerate(calls) if _begins_backward(node)), len(calls))
    placeholders = joint.graph.find_nodes(op="placeholder")
    early, late = [*placeholders, *calls[:first]], calls[first:]
    before = set(early)
    read = dict.fromkeys(
        value for node in late for value in node.all_input_nodes if value in before
    )
    constants = [value for value in read if value.op == "get_attr"]
    passed = [value for value in read if value.op != "get_attr"]
    outputs = list(joint.graph.output_node().args[0])  # type: ignore[arg-type]
    places = range(len(outputs))
    forward = _half(
        joint, early, [k for k in places if outputs[k] in before], extra=passed, inputs=()
    )
    backward = _half(
        joint,
        [*constants, *late],
        [k for k in places if outputs[k] not in before],
        extra=(),
        inputs=passed,
    )
    kept = {node.name for node in placeholders}
    return (
        _captured("forward", forward, kept, names),
        _captured(
            "backward",
            backward,
            {node.name for node in passed_through(forward.graph, backward.graph)},
            names,
        ),
    )


def _begins_backward(node: Node) -> bool:
    """Return whether ``node`` is backward, and not a result of a forward node that has several:
    TorchTitan repeats ``getitem`` right behind that node, in forward.
    """
    of_forward = node.target is operator.getitem and not any(map(is_backward, node.all_input_nodes))
    return is_backward(node) and not of_forward


def _half(
    joint: GraphModule,
    nodes: Collection[Node],
    places: Collection[int],
    *,
    extra: Collection[Node],
    inputs: Collection[Node],
) -> GraphModule:
    """Return ``nodes`` of ``joint`` as a module that takes ``inputs``, too; its outputs are those
    of ``joint`` at ``places``, then ``extra``.
    """
    graph = torch.fx.Graph()
    values: dict[Node, Node] = {}
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        values[node].meta = dict(node.meta)
    old = joint.graph.output_node()
    results = [old.args[0][k] for k in places] + list(extra)  # type: ignore[index]
    output = graph.output(
        tuple(values[value] if isinstance(value, Node) else value for value in results)
    )
    if (described := old.meta.get("desc")) is not None:
        output.meta["desc"] = [described[k] for k in places] + [None for _ in extra]
    return GraphModule(joint, graph)


def _captured(
    name: str, module: GraphModule, kept: Collection[str], names: Mapping[str, str]
) -> CapturedGraph:
    placeholders = {node.name for node in module.graph.find_nodes(op="placeholder")}
    return capture_graph(
        module,
        name=name,
        kept_inputs=placeholders.intersection(kept),
        parameter_names={key: names[key] for key in names if key in placeholders},
    )
